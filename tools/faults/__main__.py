"""Injects faults into a small pipeline, and looks whether it ends as if nothing had been, or refuses by name.

Reads   this checkout, as it is now
Writes  to a temporary folder, which stays only where something was WRONG
Run     make faults N=50 SEED=1
        python -m tools.faults --seed 1 --only 17    one of them again

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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from tools.faults.judge import NeverCame, Outcome, Wrong
from tools.faults.kinds import KINDS, NEEDS_A_SMALL_DISK, Trial
from tools.faults.workspaces import CannotRun, Reference, build_reference

TRIES = 5
"""At moments that are drawn one after the other, until the fault meets what it is to disturb."""
OWN_MOUNTS = "BAKEOFF_FAULTS_OWN_MOUNTS"
"""Set where this process has a view of its own of what is mounted: nothing of it outlives the process."""


@dataclass(frozen=True)
class Result:
    kind: str
    outcome: Outcome


@click.command(help=__doc__)
@click.option("--count", default=10, show_default=True, type=click.IntRange(min=1), help="How many.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", type=click.IntRange(min=1), help="Just the one of this number.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Of this kind; may be repeated.")
def main(count: int, seed: int, only: int | None, kinds: tuple[str, ...]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    enter_own_mounts()
    can_mount = OWN_MOUNTS in os.environ
    kinds = kinds or tuple(KINDS)
    if not can_mount:
        kinds = tuple(kind for kind in kinds if KINDS[kind] not in NEEDS_A_SMALL_DISK)
        click.echo("LEFT OUT: full disks; they need root, or `unshare --mount --map-root-user`")
    if not kinds:
        raise click.ClickException("nothing is left to do")
    root = Path(tempfile.mkdtemp(prefix="bakeoff-faults-")).resolve()  # processes are found by where they work
    results: dict[int, Result] = {}
    began = time.monotonic()
    try:
        click.echo("the undisturbed pipeline")
        reference = build_reference(root / "reference", click.echo)
        numbers = [only] if only else range(1, count + 1)
        dealt = list(deck(seed, max(numbers), kinds))
        for number in numbers:
            kind = dealt[number - 1]
            results[number] = Result(kind, inflict(reference, root / f"fault-{number}", kind, seed, number))
    except CannotRun as error:
        raise click.ClickException(str(error)) from None
    finally:
        wrong = [number for number, result in results.items() if result.outcome is Outcome.WRONG]
        if results:
            kept = sum(result.outcome in (Outcome.UNDISTURBED, Outcome.REFUSED) for result in results.values())
            click.echo(tally(list(results.values())))
            click.echo(f"{kept} of {len(results)} as promised, in {time.monotonic() - began:.0f} s")
        chosen = "".join(f" --kind {kind!r}" for kind in kinds) if kinds != tuple(KINDS) else ""
        for number in wrong:
            again = f"make faults SEED={seed} ONLY={number}" + (f' ARGS="{chosen[1:]}"' if chosen else "")
            click.echo(f"{number}: kept in {root}/fault-{number}*; again: {again}")
        if not wrong:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(1 if wrong else 0)


def deck(seed: int, count: int, kinds: Sequence[str]) -> Iterator[str]:
    """At least so many of the kinds, in rounds: each once a round, in an order of its own."""
    draw = random.Random(f"order {seed}")
    for _ in range(0, count, len(kinds)):
        yield from draw.sample(kinds, len(kinds))


def inflict(reference: Reference, folder: Path, kind: str, seed: int, number: int) -> Outcome:
    """One fault, its line printed."""
    trial = Trial(reference, folder, random.Random(f"fault {seed} {number} {kind}"))
    began, outcome, why = time.monotonic(), Outcome.NEVER_CAME, ""
    for _ in range(TRIES):
        try:
            outcome = KINDS[kind](trial)
        except NeverCame:
            _remove(folder)
            continue
        except Wrong as error:
            outcome, why = Outcome.WRONG, f"\n      {error}"
        except BaseException:
            _remove(folder)
            raise
        break
    if outcome is not Outcome.WRONG:
        _remove(folder)
    seconds = time.monotonic() - began
    click.echo(f"{number:4}  {kind:<24}  {trial.stage:<24}  {outcome:<14}  {seconds:4.0f} s  {trial.moment}{why}")
    return outcome


def _remove(folder: Path) -> None:
    for path in folder.parent.glob(f"{folder.name}*"):
        if path == folder or path.name.startswith(f"{folder.name}."):
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink(missing_ok=True)


def tally(results: list[Result]) -> str:
    counts = Counter((result.kind, result.outcome) for result in results)
    total = Counter(result.outcome for result in results)
    rows = [(kind, [counts[kind, outcome] for outcome in Outcome]) for kind in KINDS]
    shown = [row for row in rows if any(row[1])] + [("all", [total[outcome] for outcome in Outcome])]
    lines = [f"{'':<24}" + "".join(f"{outcome:>16}" for outcome in Outcome)]
    return "\n".join(lines + [f"{kind:<24}" + "".join(f"{count:>16}" for count in each) for kind, each in shown])


def enter_own_mounts() -> None:
    """Become a process that can mount a small disk which nobody else sees; stay as it is where that cannot be."""
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
