"""A training whose fingerprint another recipe's has is not repeated: the result would be the same, bit for bit."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

from stages.core.documents import read_json
from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, Lineage, short, verified_lineage, write_lineage
from stages.core.publish import publish_json, published
from stages.kit.memory_use.stage_memory import StageMemory, stage_memory_path, write_stage_memory
from stages.kit.planning.plan import Plan
from stages.kit.training.record import read_record

log = logging.getLogger("stages")


def reuse_training(other: str, plan: Plan, fingerprint: str, base: Lineage, *, write: bool) -> bool:
    """Take over what recipe `other` trained, where its fingerprint is this one; whether it was.

    Whatever is wrong with the other's files is logged, and the recipe has to be trained.
    write: False for all but the first of several processes.
    """
    theirs, ours = Path("data/runs") / other, Path("data/runs") / plan.recipe
    fix = f"dvc repro -f -s train@{other}"
    try:
        record = read_record(theirs / "training/training.json")
        lineage = verified_lineage(theirs / "trained", fix=fix)
        memory = read_json(StageMemory, stage_memory_path(Path("data"), plan.task, name=other, stage="train"), fix=fix)
    except UserError as error:
        log.info("%s has trained by the same plan, but: %s", other, error)
        return False
    if record.fingerprint != fingerprint:
        log.info("%s has trained by the same plan, but with other code, packages or data, or elsewhere", other)
        return False
    if not write:
        return True
    with published(ours / "training") as training_dir, published(ours / "trained") as trained_dir:
        shutil.copytree(theirs / "training", training_dir, dirs_exist_ok=True)
        shutil.copytree(theirs / "trained", trained_dir, dirs_exist_ok=True)
        (trained_dir / LINEAGE_FILE).unlink()
        parents = {"base": (Path(plan.base_dir), base)}
        copied = write_lineage(trained_dir, kind="trained", name=plan.recipe, parents=parents)
        if copied.digest != lineage.digest:
            raise UserError(f"{theirs / 'trained'} changed while it was read; run the stage again")
        record = replace(record, recipe=plan.recipe, taken_from=other)
        publish_json(record, training_dir / "training.json")
    write_stage_memory(replace(memory, name=plan.recipe), task=plan.task)
    log.info("the training is that of %s, content %s: taken over (-f trains anew)", other, short(lineage.digest))
    return True
