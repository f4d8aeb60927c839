"""Runs a whole tiny pipeline in two clones at different paths, one of them killed again and again, and compares them.

Reads   this checkout, as it is now
Writes  to a temporary folder, which stays only where something was WRONG
Run     make repeat TASK=detection KILLS=20 SEED=1

Nobody disturbs the first. In the second every process gets SIGKILL at random moments of its stages, and the same
command is given again, which has to go on from what a training has saved. All that the stages wrote there has to be the
same, byte for byte, times and memory aside; `make verify` has to find it as recorded, and DVC up to date. Where one of
these is not so, or a command fails, that is WRONG, and it ends with 1.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import psutil

from stages.kit.launcher.pipeline import declared_stages
from tools.faults.judge import Wrong, require_same_end, require_success, verify_commands
from tools.faults.kinds import DVC_STUMBLES
from tools.faults.workspaces import (
    CannotRun,
    Ended,
    Workspace,
    clone_checkout,
    make_environment,
    tiny_params,
    workspace_in,
)
from tools.verify.measured import SHOWN

LIMIT_S = 3600
"""Of one run of the pipeline, which takes some ten minutes."""
KEPT_EACH_STEPS = 20
"""Of a training of a few hundred, so that most kills find a checkpoint to go on from."""


@click.command(help=__doc__)
@click.option("--task", default="detection", show_default=True, help="Of which the pipeline is.")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=0), help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the moments; what stages take counts too.")
def main(task: str, kills: int, seed: int) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix="bakeoff-repeat-")).resolve()  # processes are found by where they work
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
        with tiny_params(workspace.folder) as params:
            params["checkpoints"].update(every_minutes=None, every_steps=KEPT_EACH_STEPS)
    say(f"{target}, undisturbed, which takes minutes")
    seconds = run_undisturbed(first, target)
    say(f"undisturbed: {sum(seconds.values()):.0f} s, {len(seconds)} stages")
    drawn = draw.choices(list(seconds), list(seconds.values()), k=kills)
    num_killed = run_killed(second, target, Moments([(stage, draw.random()) for stage in drawn], seconds), say)
    for workspace in (first, second):
        require_success(workspace.verify())
        require_success(workspace.dvc("status", "-q", "--with-deps", target))
    written = {stage.name: stage.written for stage in declared_stages(first.folder)}
    ran = [name for name, outs in written.items() if all((first.folder / out).exists() for out in outs)]
    compared = [out for name in ran for out in written[name] if Path(out).name not in SHOWN]
    same = require_same_end(second.folder, first.folder, compared)
    return (
        f"the SAME, killed {num_killed} times: {len(ran)} stages, {len(same.equal)} files byte for byte, "
        f"{len(same.measured)} but for times and memory, {same.size_bytes / 2**20:.0f} MiB; not compared, as they show "
        f"times and memory: {', '.join(SHOWN)}"
    )


def run_undisturbed(workspace: Workspace, target: str) -> dict[str, float]:
    """Seconds that each stage took, in their order. Raises CannotRun where the pipeline fails, or none is seen."""
    seconds: dict[str, float] = {}
    ended = workspace.dvc("repro", target, meanwhile=lambda process: seconds.update(_watched(workspace, process)))
    if ended.code != 0:
        raise CannotRun(f"the undisturbed pipeline itself fails:\n{ended.said[-2000:]}")
    if not seconds:
        raise CannotRun(
            f"no stage was seen at work in {workspace.folder}, so none could be killed:\n{ended.said[-2000:]}"
        )
    return seconds


def run_killed(workspace: Workspace, target: str, pending: Moments, say: Callable[[str], None]) -> int:
    """Bring about the target although all is killed at each of these moments.

    Returns how many kills came. Raises Wrong where the target does not come about, or a training does not go on from
    what it saved.
    """
    began, num_killed, num_resumed = time.monotonic(), 0, 0
    stage, saved_step = "", 0  # that was running when all was killed last
    while True:
        ended = _repro(workspace, target, say, meanwhile=partial(_kill_when_due, workspace, pending))
        num_resumed += _went_on(ended, stage, saved_step)
        if ended.code != -signal.SIGKILL:
            break
        num_killed += 1
        *_, stage = _said_by_stage(ended)
        saved_step = _saved_step(workspace, stage)
        say(f"  {num_killed:2}  killed in {stage}{f', saved at step {saved_step}' if saved_step else ''}")
    require_success(ended)
    say(
        f"killed {num_killed} times in {time.monotonic() - began:.0f} s; "
        f"a training went on from a checkpoint {num_resumed} times"
    )
    return num_killed


class Moments:
    """At which all is yet to be killed, in whatever order DVC runs the stages."""

    def __init__(self, shares: Sequence[tuple[str, float]], seconds: Mapping[str, float]) -> None:
        """shares: of a stage, from 0 to 1 and by its name, how much of it has passed. seconds: that each takes."""
        self._seconds = seconds
        self._by_stage: dict[str, list[float]] = {}
        for stage, share in shares:
            self._by_stage.setdefault(stage, []).append(share)

    def is_due(self, stage: str, seconds: float, through: Sequence[str]) -> bool:
        """Whether one is, so many seconds into a stage; it is then none any more.

        through: the stages before it that this command has run. A training that goes on is through early: what such a
        stage has left over is this one's, at the same share of it.
        """
        left_over = [share for earlier in through for share in self._by_stage.pop(earlier, [])]
        here = self._by_stage[stage] = sorted([*self._by_stage.get(stage, []), *left_over])
        if here and seconds >= here[0] * self._seconds.get(stage, 0.0):
            del here[0]
            return True
        return False


def _kill_when_due(workspace: Workspace, pending: Moments, process: subprocess.Popen[bytes]) -> None:
    seen: dict[str, None] = {}
    for now, seconds in _watched(workspace, process):
        seen[now] = None
        if pending.is_due(now, seconds, [stage for stage in seen if stage != now]):
            workspace.kill_all()
            return


def _repro(
    workspace: Workspace,
    target: str,
    say: Callable[[str], None],
    *,
    meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Ended:
    """Where DVC stumbles over what a killed one left, what `make verify` names is done, and the same command given."""
    ended = workspace.dvc("repro", target, meanwhile=meanwhile)
    if not DVC_STUMBLES.search(ended.said):
        return ended
    for command in verify_commands(workspace.verify()):
        say(f"      DVC's own fault, mended as make verify says: {command}")
        require_success(workspace.shell(command))
    return workspace.dvc("repro", target, meanwhile=meanwhile)


def _said_by_stage(ended: Ended) -> dict[str, str]:
    """What each stage said that DVC ran, by its name."""
    _, *names_and_words = re.split(r"^Running stage '(.+)':$", ended.said, flags=re.MULTILINE)
    return dict(zip(names_and_words[::2], names_and_words[1::2], strict=True))


def _saved_step(workspace: Workspace, stage: str) -> int:
    """Of the newest checkpoint of a training; 0 where there is none, or the stage is something else."""
    kind, _, recipe = stage.partition("@")
    found = (workspace.folder / ".bakeoff/checkpoints" / recipe).glob("*/step-*") if kind == "train" else ()
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def _went_on(ended: Ended, stage: str, saved_step: int) -> bool:
    """Whether the training did, from this step. Raises Wrong where it began anew."""
    said = _said_by_stage(ended).get(stage, "")
    went_on = f"goes on from step {saved_step} " in said
    # Killed again before its first step it has not said.
    if saved_step and said and not went_on and (ended.code == 0 or re.search(r"\bstep \d+/\d", said)):
        raise Wrong(f"{stage} was saved at step {saved_step}, and did not go on from there: {said[-400:]}")
    return went_on


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


if __name__ == "__main__":
    main(prog_name="python -m tools.faults.repeat")
