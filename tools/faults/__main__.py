"""Injects faults into a small pipeline, which has to end as if nothing had happened, or refuse by name.

Reads   this checkout, as it is now
Writes  to a temporary folder, which stays only where something was WRONG
Run     make faults N=50 SEED=1
        python -m tools.faults --seed 1 --only 17    one of them again

With BAKEOFF_PLACE=slurm: kills of launchers that wait for jobs, and of jobs (.ci/with-slurm make faults).

Each fault is drawn from the seed and its number, and drawn again where it comes too late. After it the same command is
run again, or the one that a message names. Ends with 1 where an outcome is WRONG.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from tools.faults.judge import NeverCame, Outcome, Wrong
from tools.faults.kinds import FULL_DISK, KINDS, Trial
from tools.faults.slurm_kinds import SLURM_KINDS
from tools.faults.workspaces import Reference, build_reference

TRIES = 5
"""At moments drawn one after the other, until the fault comes in time."""
OWN_MOUNTS = "BAKEOFF_FAULTS_OWN_MOUNTS"
"""Set in a process whose mounts nobody else sees, and which end with it."""


@click.command(help=__doc__)
@click.option("--count", default=10, show_default=True, type=click.IntRange(min=1), help="How many.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", type=click.IntRange(min=1), help="Just the one of this number.")
def main(count: int, seed: int, only: int | None) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    enter_own_mounts()
    in_slurm = os.environ.get("BAKEOFF_PLACE") == "slurm"
    kinds = list(SLURM_KINDS if in_slurm else KINDS)
    if in_slurm and "SLURM_CONF" not in os.environ:
        raise click.ClickException("BAKEOFF_PLACE is slurm, and SLURM_CONF names none; .ci/with-slurm starts one")
    if not in_slurm and OWN_MOUNTS not in os.environ:
        kinds.remove(FULL_DISK)
        click.echo("LEFT OUT: full disks; they need root, or `unshare --mount --map-root-user`")
    root = Path(tempfile.mkdtemp(prefix="bakeoff-faults-")).resolve()  # processes are found by their folder
    outcomes: dict[int, Outcome] = {}
    began = time.monotonic()
    try:
        click.echo("the undisturbed pipeline")
        reference = build_reference(root / "reference")
        for number in [only] if only else range(1, count + 1):
            kind = kind_of(seed, number, kinds)
            outcomes[number] = inflict(reference, root / f"fault-{number}", kind, seed, number)
    finally:
        tally = Counter(outcomes.values())
        if outcomes:
            counts = ", ".join(f"{tally[outcome]} {outcome}" for outcome in Outcome)
            click.echo(f"{len(outcomes)} faults in {time.monotonic() - began:.0f} s: {counts}")
        for number, outcome in outcomes.items():
            if outcome is Outcome.WRONG:
                click.echo(f"{number}: kept in {root}/fault-{number}*; again: make faults SEED={seed} ONLY={number}")
        if not tally[Outcome.WRONG]:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(1 if tally[Outcome.WRONG] else 0)


def kind_of(seed: int, number: int, kinds: Sequence[str]) -> str:
    """Each kind comes once a round, in a random order."""
    round_, place = divmod(number - 1, len(kinds))
    return random.Random(f"round {seed} {round_}").sample(kinds, len(kinds))[place]


def inflict(reference: Reference, folder: Path, kind: str, seed: int, number: int) -> Outcome:
    """One fault; prints a line about it."""
    trial = Trial(reference, folder, random.Random(f"fault {seed} {number} {kind}"))
    began, outcome, why = time.monotonic(), Outcome.NEVER_CAME, ""
    for _ in range(TRIES):
        try:
            outcome = (KINDS | SLURM_KINDS)[kind](trial)
        except NeverCame:
            pass
        except Wrong as error:
            outcome, why = Outcome.WRONG, f"\n      {error}"
        finally:
            if outcome is not Outcome.WRONG:
                _remove(folder)
        if outcome is not Outcome.NEVER_CAME:
            break
    seconds = time.monotonic() - began
    click.echo(f"{number:4}  {kind:<24}  {trial.stage:<24}  {outcome:<14}  {seconds:4.0f} s  {trial.moment}{why}")
    return outcome


def _remove(folder: Path) -> None:
    """With the logs and temporary files beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in folder.parent.glob(f"{folder.name}.*"):
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def enter_own_mounts() -> None:
    """Become a process that can mount a small disk which nobody else sees; stay as it is where that is impossible."""
    if OWN_MOUNTS in os.environ:
        return
    for rights in ([], ["--map-root-user"]):
        unshare = ["unshare", "--mount", "--propagation", "private", *rights]
        with tempfile.TemporaryDirectory() as folder, suppress(OSError):
            tried = [*unshare, "mount", "-t", "tmpfs", "-o", "size=64k", "none", folder]
            if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
                environment = {**os.environ, OWN_MOUNTS: "1"}
                # sys.orig_argv: python -m tools.faults and its options.
                os.execvpe("unshare", [*unshare, "--", sys.executable, *sys.orig_argv[1:]], environment)


if __name__ == "__main__":
    main(prog_name="python -m tools.faults")
