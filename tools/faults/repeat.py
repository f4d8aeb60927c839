"""Runs a whole tiny pipeline in two clones at different paths, one of them killed again and again, and compares them.

Reads   this checkout, as it is now
Writes  to a temporary folder, which stays only where something was WRONG
Run     make repeat TASK=detection KILLS=20 SEED=1

The first is undisturbed. In the second every process gets SIGKILL at random moments, and the same command is given
again, which has to go on from the last checkpoint of a training. All outputs have to be the same, byte for byte, times
and memory aside; `make verify` has to find them as recorded, and DVC up to date. Where one of these is not so, or a
command fails, that is WRONG, and it ends with 1.
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
from collections.abc import Sequence
from pathlib import Path

import click

from stages.kit.launcher.pipeline import declared_stages
from tools.faults.judge import DVC_FAILS, Wrong, require_same_end, require_success, verify_commands
from tools.faults.workspaces import Ended, Workspace, clone_checkout, make_environment, tiny_params, workspace_in
from tools.verify.measured import SHOWN

LIMIT_S = 3600
"""For one run of the pipeline, which takes some ten minutes."""
SAVE_EVERY_STEPS = 20
"""Of a few hundred, so that most kills find a checkpoint to go on from."""


@click.command(help=__doc__)
@click.option("--task", default="detection", show_default=True, help="Whose pipeline to run.")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(min=0), help="How many, at most.")
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
def main(task: str, kills: int, seed: int) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix="bakeoff-repeat-")).resolve()  # processes are found by their folder
    try:
        compare_two_runs(root, f"compare@{task}", kills, random.Random(f"moments {seed}"))
    except Wrong as error:
        click.echo(f"WRONG: {error}\nboth are kept in {root}")
        sys.exit(1)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    shutil.rmtree(root, ignore_errors=True)


def compare_two_runs(root: Path, target: str, kills: int, draw: random.Random) -> None:
    """Prints what is the same. Raises ClickException where the undisturbed run fails; Wrong."""
    environment = make_environment(root)
    first, second = (
        workspace_in(root / place, environment, limit_s=LIMIT_S) for place in ("first", "another place/the second")
    )
    for workspace in (first, second):
        clone_checkout(workspace.folder)
        with tiny_params(workspace.folder) as params:
            params["checkpoints"].update(every_minutes=None, every_steps=SAVE_EVERY_STEPS)
    click.echo(f"{target}, undisturbed, which takes minutes")
    began = time.monotonic()
    ended = first.dvc("repro", target)
    if ended.code != 0:
        raise click.ClickException(f"the undisturbed pipeline itself fails:\n{ended.output[-2000:]}")
    seconds = time.monotonic() - began
    click.echo(f"undisturbed: {seconds:.0f} s")
    # On average all kills together take as long as the undisturbed run.
    num_killed = run_killed(second, target, [draw.uniform(0, 2 * seconds / kills) for _ in range(kills)])
    for workspace in (first, second):
        require_success(workspace.verify())
        require_success(workspace.dvc("status", "-q", "--with-deps", target))
    written = {stage.name: stage.written for stage in declared_stages(first.folder)}
    ran = [name for name, outs in written.items() if all((first.folder / out).exists() for out in outs)]
    compared = [out for name in ran for out in written[name] if Path(out).name not in SHOWN]
    same = require_same_end(second.folder, first.folder, compared)
    click.echo(
        f"the SAME, killed {num_killed} times: {len(ran)} stages, {len(same.equal)} files byte for byte, "
        f"{len(same.measured)} but for times and memory, {same.size_bytes / 2**20:.0f} MiB; not compared, as they show "
        f"times and memory: {', '.join(SHOWN)}"
    )


def run_killed(workspace: Workspace, target: str, moments: Sequence[float]) -> int:
    """Run the pipeline to its end although everything is killed each time.

    moments: seconds from the start of a command to its kill. Returns how many kills came in time. Raises Wrong where
    the last command fails, or where a training does not go on from its checkpoint.
    """
    began, num_killed, num_resumed = time.monotonic(), 0, 0
    stage, saved_step = "", 0  # at the last kill
    for moment in [*moments, LIMIT_S]:
        ended = _repro(workspace, target, moment)
        num_resumed += _resumed(ended, stage, saved_step)
        if ended.code != -signal.SIGKILL:
            break
        num_killed += 1
        stage = next(reversed(_output_by_stage(ended)), stage)
        saved_step = _saved_step(workspace, stage)
        click.echo(
            f"  {num_killed:2}  killed in {stage or 'dvc'}{f', saved at step {saved_step}' if saved_step else ''}"
        )
    require_success(ended)
    click.echo(
        f"killed {num_killed} times in {time.monotonic() - began:.0f} s; "
        f"a training went on from a checkpoint {num_resumed} times"
    )
    return num_killed


def _repro(workspace: Workspace, target: str, moment: float) -> Ended:
    """Where DVC fails after a kill, `make verify` names what fixes it, and the command is given again."""

    def kill(process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            workspace.kill_all()

    ended = workspace.dvc("repro", target, meanwhile=kill)
    if not DVC_FAILS.search(ended.output):
        return ended
    for command in verify_commands(workspace.verify()):
        click.echo(f"      DVC's own fault, fixed as make verify says: {command}")
        require_success(workspace.shell(command))
    return workspace.dvc("repro", target, meanwhile=kill)


def _output_by_stage(ended: Ended) -> dict[str, str]:
    """The output of each stage that DVC ran, by its name."""
    _, *names_and_outputs = re.split(r"^Running stage '(.+)':$", ended.output, flags=re.MULTILINE)
    return dict(zip(names_and_outputs[::2], names_and_outputs[1::2], strict=True))


def _saved_step(workspace: Workspace, stage: str) -> int:
    """That of a training's newest checkpoint; 0 where there is none, or for another stage."""
    kind, _, recipe = stage.partition("@")
    found = (workspace.folder / ".bakeoff/checkpoints" / recipe).glob("*/step-*") if kind == "train" else ()
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def _resumed(ended: Ended, stage: str, saved_step: int) -> bool:
    """Whether the training went on from this step. Raises Wrong where it began anew."""
    output = _output_by_stage(ended).get(stage, "")
    resumed = f"goes on from step {saved_step} " in output
    # Killed again before its first step, it has not said so yet.
    if saved_step and output and not resumed and (ended.code == 0 or re.search(r"\bstep \d+/\d", output)):
        raise Wrong(f"{stage} was saved at step {saved_step}, and did not go on from there: {output[-400:]}")
    return resumed


if __name__ == "__main__":
    main(prog_name="python -m tools.faults.repeat")
