"""Predicted memory of one recipe on one device: what `make plan JSON=1` prints and `tools.api` returns."""

from __future__ import annotations

from dataclasses import dataclass

from stages.kit.planning.disk import DiskUse
from stages.kit.planning.prediction import MemoryRecord


@dataclass(frozen=True, kw_only=True)
class CheaperPlan:
    """The first plan down the ladder that fits; where none does, the first that might, else the last one."""

    changes: tuple[str, ...]
    """In order, e.g. "micro_batch 2 -> 1, grad_accumulation 8 -> 16"."""
    settings: dict[str, str]
    """As they are after the changes."""
    verdict: str
    """"fits", "too close" or "does not fit"."""
    total_gib: float


@dataclass(frozen=True, kw_only=True)
class RecipeMemory:
    """Predicted memory of a recipe; amounts in GiB, of one device, the fullest."""

    recipe: str
    profile: str
    memory_gb: float | None
    """The size of a GPU that was asked for, as cards are sold; None on a CPU, where the machine's memory counts."""
    base: str
    """As the profile names it, e.g. `hub:OWNER/NAME@REVISION`."""
    batch: str
    """The batch that the prediction is for, in words."""
    settings: dict[str, str]
    """What the ladder may change, as planned: micro_batch, grad_accumulation, gradient_checkpointing, ..."""
    memory: MemoryRecord
    """As planned, with the fields of data/runs/RECIPE/memory.json; `memory.verdict` is "fits", "too close", "does not
    fit", or "unknown" where the profile does not give the GPU's size."""
    usable_gib: float | None
    """Usable memory of the device; None where it is not known."""
    cheapest: CheaperPlan | None
    """None where the plan fits as it is, or where nothing is known of the device."""
    evaluation_batch_size: int | None
    """The profile's evaluation.batch_size, or what `auto` is here, halved until it fits; None where not even 1 does."""
    after: dict[str, str]
    """The verdict of each recipe that has to be trained before this one, with the cheapest settings that fit."""
    disk: DiskUse
    """In bytes."""
    command: str | None
    """Runs the recipe on this device; None where it does not fit. It stops after the training where only the evaluation
    does not fit."""
