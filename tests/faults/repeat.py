"""Runs a whole tiny pipeline in two clones at different paths, one of them killed again and again, and compares them.

Reads   this checkout, as it is now
Writes  to a temporary folder, which stays only where the two differ
Run     make repeat TASK=detection KILLS=20 SEED=1

Nobody disturbs the first. In the second every process gets SIGKILL at random moments of its stages, and the same
command is given again. All that the stages wrote there has to be the same, byte for byte, times and memory aside;
`make verify` has to find it as recorded, and DVC up to date. Ends with 1 where one of these is not so.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import click
import psutil
from ruamel.yaml import YAML

from stages.kit.containers.pipeline import declared_stages
from tests.faults.judge import Wrong, require_same_end, require_success
from tests.faults.workspaces import CannotRun, Workspace, clone_checkout, make_environment, workspace_in

LIMIT_S = 3600
"""Of one run of the pipeline, which takes some ten minutes."""
KEPT_EACH_STEPS = 20
"""Of a training of a few hundred, so that most kills find a checkpoint to go on from."""


@click.command(help=__doc__)
@click.option("--task", default="detection", show_default=True, help="Of which the pipeline is.")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=0), help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
def main(task: str, kills: int, seed: int) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix="bakeoff-repeat-"))
    try:
        same = compare_two_runs(root, f"compare@{task}", kills, random.Random(f"moments {seed}"), click.echo)
    except CannotRun as error:
        shutil.rmtree(root, ignore_errors=True)
        raise click.ClickException(str(error)) from None
    except Wrong as error:
        click.echo(f"WRONG: {error}\nboth are kept in {root}")
        sys.exit(1)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    shutil.rmtree(root, ignore_errors=True)
    click.echo(same)


def compare_two_runs(root: Path, target: str, kills: int, draw: random.Random, say: Callable[[str], None]) -> str:
    """What both have in common, in words. Raises CannotRun where the undisturbed run fails; Wrong."""
    environment = make_environment(root)
    first, second = (
        workspace_in(root / place, environment, limit_s=LIMIT_S) for place in ("first", "another place/the second")
    )
    for workspace in (first, second):
        clone_checkout(workspace.folder)
        _save_often(workspace.folder / "params.yaml")
    seconds = run_undisturbed(first, target)
    say(f"undisturbed: {sum(seconds.values()):.0f} s, {len(seconds)} stages")
    stages = list(seconds)
    drawn = sorted(draw.choices(stages, list(seconds.values()), k=kills), key=stages.index)
    run_killed(second, target, [(stage, draw.random() * seconds[stage]) for stage in drawn], say)
    for workspace in (first, second):
        require_success(workspace.verify())
        require_success(workspace.dvc("status", "-q", "--with-deps", target))
    written = {stage.name: stage.written for stage in declared_stages(first.folder)}
    ran = [name for name, outs in written.items() if all((first.folder / out).exists() for out in outs)]
    same = require_same_end(second.folder, first.folder, [out for name in ran for out in written[name]])
    return (
        f"the SAME: {len(ran)} stages, {len(same.equal)} files byte for byte, {len(same.measured)} but for times and "
        f"memory, {same.size_bytes / 2**20:.0f} MiB"
    )


def run_undisturbed(workspace: Workspace, target: str) -> dict[str, float]:
    """Seconds that each stage took, in their order. Raises CannotRun where the pipeline fails."""
    seconds: dict[str, float] = {}
    ended = workspace.dvc("repro", target, meanwhile=lambda process: seconds.update(_watched(workspace, process)))
    if ended.code != 0:
        raise CannotRun(f"the undisturbed pipeline itself fails:\n{ended.said[-2000:]}")
    return seconds


def run_killed(
    workspace: Workspace, target: str, moments: Sequence[tuple[str, float]], say: Callable[[str], None]
) -> None:
    """Bring about the target although all is killed at each of these moments: so many seconds into a stage, or where
    it is through by then. Raises Wrong where it does not come about.
    """
    began, went_on = time.monotonic(), 0
    for number, (stage, moment_s) in enumerate(moments, start=1):

        def kill(process: subprocess.Popen[bytes], stage: str = stage, moment_s: float = moment_s) -> None:
            reached = False
            for now, seconds in _watched(workspace, process):
                reached = reached or now == stage
                if reached and (now != stage or seconds >= moment_s):
                    workspace.kill_all()
                    return

        ended = workspace.dvc("repro", target, meanwhile=kill)
        went_on += "goes on from step" in ended.said
        came = ended.code == -signal.SIGKILL
        say(f"  {number:2}  {stage:<28}  after {moment_s:4.1f} s{'' if came else '; never came'}")
        if not came:
            require_success(ended)
    ended = workspace.dvc("repro", target)
    require_success(ended)
    went_on += "goes on from step" in ended.said
    say(f"killed: {time.monotonic() - began:.0f} s; a training went on from a checkpoint {went_on} times")


def _watched(workspace: Workspace, process: subprocess.Popen[bytes]) -> Iterator[tuple[str, float]]:
    """The newest stage, e.g. "train r1-llm-only", and the seconds since it began; again and again, until dvc ends."""
    stage, began = "", 0.0
    while process.poll() is None:
        found = workspace.process_of("stage")
        with suppress(psutil.Error):
            now = " ".join(found.cmdline()[2:]).removeprefix("stages.") if found is not None else stage
            if now != stage:
                stage, began = now, time.monotonic()
        if stage:
            yield stage, time.monotonic() - began
        time.sleep(0.1)


def _save_often(path: Path) -> None:
    yaml = YAML()
    raw = yaml.load(path)
    raw["checkpoints"].update(every_minutes=None, every_steps=KEPT_EACH_STEPS)
    yaml.dump(raw, path)


if __name__ == "__main__":
    main(prog_name="python -m tests.faults.repeat")
