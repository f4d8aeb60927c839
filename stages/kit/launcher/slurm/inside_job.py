"""The launcher in a job: runs the stage as anywhere, puts its outputs aside, and writes how it ended.

Where Slurm asks it to end, since its time is over (SIGUSR1) or others come first (SIGTERM), and not the person, a
training has saved its work, and the job goes back into the queue.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stages.core.signals import ENDING
from stages.kit.launcher.needs import repository_dir
from stages.kit.launcher.outputs import remove
from stages.kit.launcher.pipeline import declared_stages, stage_of_command
from stages.kit.launcher.slurm.client import Unanswered, ask_to_end, described, requeue
from stages.kit.launcher.slurm.job_dir import JobDir
from stages.kit.launcher.slurm.nodes import node_of
from stages.kit.training.checkpoints import checkpoints_dir

JOB_VARIABLE = "BAKEOFF_JOB"
"""Its folder; without it, this is no job."""
TIME_IS_UP = signal.SIGUSR1
"""What Slurm is told to send before a job's time is over (sbatch --signal)."""


def run_inside_job(
    stage: str, args: tuple[str, ...], run: Callable[[], int], *, workspace_dir: Path, say: Callable[[str], None]
) -> int:
    """Run the stage by `run`, which returns its exit code, and leave the rest to whoever waits for the job."""
    job = JobDir(Path(os.environ[JOB_VARIABLE]))
    declared = stage_of_command(declared_stages(workspace_dir), stage, args)
    assert declared is not None
    saves_in = checkpoints_dir(repository_dir(os.environ, workspace_dir), args[0]) if stage == "train" else None
    if job.end() is not None:  # put back into the queue as it ended
        return 0
    # A name for each start: what a node wrote before its job was put back into the queue is not to fail the next one.
    failed_path = job.folder / f"failed-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    if node_of(os.environ) > 0:
        code = run()
        if code != 0 and code - 128 not in ENDING:
            failed_path.write_text(str(code), encoding="utf-8")
            with suppress(Unanswered):  # the first node would wait for this one
                ask_to_end(os.environ["SLURM_JOB_ID"], alone=False)
        return code
    saved_before = newest_checkpoint(saves_in)
    for out in declared.outs:  # DVC has removed them; a job that was cancelled after that may have left some
        remove(workspace_dir / out)
    code = run()
    if failed_path.exists():
        code = int(failed_path.read_text(encoding="utf-8") or code)
    elif code - 128 in ENDING and not job.cancel_path.exists():
        number = os.environ.get("SLURM_JOB_ID", "")
        if described(number).get("JobState", "RUNNING") != "RUNNING":  # no answer is none
            return code  # cancelled, or in the queue already
        if code == 128 + TIME_IS_UP and newest_checkpoint(saves_in) == saved_before:
            say(
                "the time of its job was over before it had "
                + ("saved anything new" if saves_in else "ended, and it saves nothing on the way")
                + "; give it more: slurm.gpu.minutes or slurm.cpu.minutes in params.yaml, or another partition"
            )
        elif (problem := requeue(number)) is None:
            say(f"job {number} goes back into the queue, and on from there when it is its turn")
            return code
        else:
            say(f"job {number} cannot go back into the queue ({problem}); the same command goes on from there")
    outputs = job.put_aside(workspace_dir, declared.outs) if code == 0 else []
    job.write_end(code, outputs)
    return code


def newest_checkpoint(recipe_dir: Path | None) -> tuple[int, Path] | None:
    """The time and the folder of the checkpoint that was written last; None for none."""
    found: list[tuple[int, Path]] = []
    for path in recipe_dir.glob("*/step-*") if recipe_dir else ():
        with suppress(FileNotFoundError):  # another training of the recipe has removed it
            found.append((path.stat().st_mtime_ns, path))
    return max(found, default=None)
