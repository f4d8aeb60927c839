"""A stage that ran out of memory is started anew, each time one rung of its ladder further down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stages.core.errors import OUT_OF_MEMORY, UserError
from stages.core.params.schema import Params
from stages.kit.launcher.engines import Engine
from stages.kit.launcher.stage_run import Ended, StageRun
from stages.kit.planning.ladder import batch_size_changes, rung_changes
from stages.kit.planning.plan import read_plan
from stages.kit.planning.prediction import read_memory_record


def run_down_the_ladder(
    engine: Engine, stage_run: StageRun, params: Params, *, say: Callable[[str], None]
) -> tuple[Ended, int]:
    """Run the stage, and again with the next rung's settings each time it runs out of memory.

    Returns how the last attempt ended, and its number. Raises UserError where memory ran out with nothing left to give
    up.
    """
    ended = engine.run(stage_run)
    if ended.code != OUT_OF_MEMORY:
        return ended, 0
    what = " ".join((stage_run.stage, *stage_run.args))
    changes = ladder(stage_run, params)
    if stage_run.num_nodes > 1:
        raise UserError(
            f"{what} ran out of memory on a node, and is not started anew over several; what would take less, in this "
            f"order: {', '.join(changes) or 'nothing that keeps its result'}"
        )
    for attempt, change in enumerate(changes, start=1):
        say(f"{what} ran out of memory; it starts anew with {change}")
        ended = engine.run(replace(stage_run, attempt=attempt))
        if ended.code != OUT_OF_MEMORY:
            return ended, attempt
    if not changes:
        raise UserError(f"{what} ran out of memory; it needs a machine or a profile with more")
    tried = "\n".join(f"  {change}" for change in ("as planned", *changes))
    memory_path = stage_run.workspace_dir / "data/runs" / stage_run.args[0] / "memory.json"
    predicted = ""
    if stage_run.stage == "train" and memory_path.exists():
        record = read_memory_record(memory_path)
        predicted = f"As planned it was predicted to take {record.summary()} (calibration: {record.calibration}).\n"
    raise UserError(
        f"{what} ran out of memory with everything given up that its result allows. It tried, one after the other:\n"
        f"{tried}\n{predicted}What is left is yours to choose: a profile with more memory, fewer images.max_pixels, or "
        f"a smaller base"
    )


def ladder(stage_run: StageRun, params: Params) -> list[str]:
    """What each further attempt at a stage changes; nothing where it has nothing to give up."""
    answers = stage_run.stage in ("evaluate", "predict")
    if stage_run.stage in ("train", "merge"):
        plan = read_plan(stage_run.args[0] if stage_run.args else "", runs_dir=stage_run.workspace_dir / "data/runs")
        if stage_run.stage == "train":
            return rung_changes(plan)
        # A merge out of 4 bits answers too; a training's last rung may have turned to them.
        answers = plan.quantization != "none" or plan.may_quantize
    return batch_size_changes(params.active.evaluation.batch_size) if answers else []
