"""Disk that a recipe takes, predicted from its plan and compared with the free space before a stage begins."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError, bytes_text
from stages.core.params.schema import Params
from stages.planning.plan import Plan

WEIGHT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
TRAINED_BYTES = 4
"""Bytes of a trained weight, which is kept in fp32 whatever the precision."""
CHECKPOINT_SHARE = 3
"""A checkpoint, in trained weights: with AdamW's two states of each (training/checkpoints.py)."""


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Disk of one recipe, in bytes. Workspace and DVC's cache share files; on two disks, it is so much on each."""

    trained_bytes: int
    merged_bytes: int
    """Written in any case, as a merge is certified from the disk."""
    keeps_merged: bool
    checkpoints_bytes: int
    """At most, while it trains; removed when DVC has kept what was trained."""
    features_bytes: int = 0
    """Features of images, kept for other trainings."""

    def __str__(self) -> str:
        merged = f"{bytes_text(self.merged_bytes)} merged" + ("" if self.keeps_merged else " while it is certified")
        checkpoints = f"{bytes_text(self.checkpoints_bytes)} of checkpoints while it trains"
        features = f"; {bytes_text(self.features_bytes)} of features of images" if self.features_bytes else ""
        return f"{bytes_text(self.trained_bytes)} trained, {merged}; {checkpoints}{features}"


def disk_use(plan: Plan, params: Params) -> DiskUse:
    """plan: with its trainable parameters counted."""
    trained = plan.trainable["total"] * TRAINED_BYTES
    keeps_best = plan.validation is not None and plan.validation.keep_best
    adapters = sum(plan.trainable[part] for part in plan.recipe.parts.trained("lora"))
    doubled = plan.recipe.lora is not None and plan.recipe.lora.takes_from_base  # saved with twice the rank
    return DiskUse(
        trained_bytes=trained + doubled * adapters * TRAINED_BYTES,
        merged_bytes=(plan.trainable["all"] - adapters) * WEIGHT_BYTES[plan.memory.precision],
        keeps_merged=params.leaves_weights(plan.name),
        # While one is written there is one more than are kept, and each may have a better one before it.
        checkpoints_bytes=(params.checkpoints.keep * (2 if keeps_best else 1) + 1) * CHECKPOINT_SHARE * trained,
        features_bytes=plan.features_bytes,
    )


def require_room(needed_bytes: int, folder: Path, *, what: str) -> None:
    """Raises UserError where the disk of a folder has less free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"{what} takes up to {bytes_text(needed_bytes)} of disk, but {folder} has {bytes_text(free_bytes)} free. "
            f"Make room (`dvc gc --workspace` removes from DVC's cache all that this workspace does not refer to), or "
            f"take less: models.keep_merged: false leaves out merged models once they are certified, "
            f"checkpoints.keep: 1 keeps fewer checkpoints"
        )
