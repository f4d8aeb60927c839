"""What a stage needs beside its declared inputs: GPUs, sources, folders that are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stages.core.params.schema import DeviceParams, Params
from stages.kit.evaluation.vllm.environment import TARGETS
from stages.kit.training.checkpoints import checkpoints_dir

TRACKED = ("train", "evaluate", "compare")
"""Stages that leave a run in Weights & Biases, where tracking is on."""


def gpus_wanted(stage: str, device: DeviceParams) -> int:
    """Training takes the devices of the profile, what holds one model for inference takes one of them."""
    if device.kind == "cpu":
        return 0
    return {"train": device.count, "merge": 1, "build": 1, "evaluate": 1, "predict": 1}.get(stage, 0)


def image_target(stage: str, params: Params) -> str:
    """The image that a stage runs in. Where vLLM is to answer, the plan runs in its image too: one that is missing is
    named before a training, and not after.
    """
    asks_vllm = params.active.evaluation.engine == "vllm" and stage in ("plan", "evaluate")
    kind = params.active.device.kind
    return TARGETS[kind] if asks_vllm else kind


def source_of(stage: str, name: str, params: Params) -> str:
    """Where base and prepare take their data from; "" for the other stages, and for a name the stage will refuse."""
    profile = params.active
    if stage == "prepare" and name in profile.datasets:
        return profile.datasets[name].source
    return profile.bases.get(name, "") if stage == "base" else ""


def source_dir(source: str, workspace_dir: Path) -> Path | None:
    kind, _, where = source.partition(":")
    return Path(os.path.normpath(workspace_dir / where)) if kind == "folder" else None


def hub_cache(caller: Mapping[str, str]) -> Path:
    """As huggingface_hub chooses it (huggingface_hub/constants.py)."""
    cache_home = Path(caller.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(caller.get("HF_HOME") or cache_home / "huggingface").expanduser().absolute()


def kept_dirs(stage: str, name: str, params: Params, repository: Path) -> tuple[Path, ...]:
    """Folders that a stage writes to beside its outputs: a training, what is tracked, and publish, which may have to
    make a key; none for the other stages, and for a name that a training will refuse.

    Weights & Biases keeps runs in .bakeoff/tracking, as stages/kit/training/records.py says.
    """
    if stage == "publish":
        return (repository / ".bakeoff/signing",)
    tracked = (repository / ".bakeoff/tracking",) if params.tracking.wandb and stage in TRACKED else ()
    if stage != "train":
        return tracked
    if name not in params.recipes:
        return ()
    return (checkpoints_dir(repository, name), repository / ".bakeoff/features", *tracked)


def repository_dir(caller: Mapping[str, str], workspace_dir: Path) -> Path:
    """Of the person, also where DVC runs an experiment in a clone that it throws away."""
    return Path(caller.get("DVC_ROOT") or workspace_dir)
