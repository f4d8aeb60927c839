"""Features of frozen vision towers: computed once for all samples of a training, and kept on the disk.

    .bakeoff/features/DIGEST/part-000000.safetensors    samples as the collator encodes them, by number, with the
                                                        features of their images in place of pixels
                             part-000000.sha256
                             lock                       held, shared, by every training that reads them

DIGEST covers everything that features and texts depend on, so trainings with another seed or learning rate share them.
A part is complete or absent; a damaged one is computed again.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stages.core.errors import UserError, bytes_text
from stages.core.lineage import file_digest, json_digest
from stages.core.locks import idle_folders, lock_folder
from stages.internals.transformers_internals import on_device
from stages.models.prompts import tokenizer_of
from stages.planning.plan import Plan
from stages.training.batches import FEATURES, ConversationCollator, padded
from stages.training.trainer import RecipeTrainer

PART_SAMPLES = 64
"""Samples of a file: held in memory while it is made, and made again after an interruption."""

log = logging.getLogger("stages")


@contextmanager
def frozen_features(
    trainer: RecipeTrainer, root: Path, identity: Mapping[str, str], *, limit_gb: float
) -> Iterator[None]:
    """Within the block the trainer's batches hold features, if the plan wants that; those missing are computed first.

    Each process of a training computes its share, and nothing removes them meanwhile.
    root: .bakeoff/features. identity: the training's (identity.py). limit_gb: size of all features below
    root, in GB; the least recently used ones are removed.
    Raises UserError if they cannot be written.
    """
    plan, collator = trainer.plan, trainer.data_collator
    if not plan.features_bytes:
        yield
        return
    assert isinstance(collator, ConversationCollator)
    folder = root / _digest(plan, identity)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(folder, shared=True))
            os.utime(folder)
            _compute_missing(trainer, collator, folder)
        except OSError as error:
            raise UserError(
                f"{folder} cannot hold the features of the frozen parts, {bytes_text(plan.features_bytes)} at most: "
                f"{error}; make room, or have each step compute them: profiles.{plan.profile}.memory.features_gb: 0"
            ) from None
        trainer.accelerator.wait_for_everyone()
        if trainer.args.process_index == 0:
            _remove_unused(root, round(limit_gb * 1e9))
        trainer.data_collator = FeatureCollator(folder, collator)
        yield


class FeatureCollator(ConversationCollator):
    """Batches as the given collator makes them, with FEATURES in place of pixels, read from files."""

    def __init__(self, folder: Path, collator: ConversationCollator) -> None:
        vars(self).update(vars(collator))
        self.folder = folder

    def padded_batch(self, examples: Sequence[Mapping[str, int]]) -> dict[str, torch.Tensor]:
        samples = [self._sample(int(example["sample"])) for example in examples]
        return padded(samples, tokenizer_of(self.processor).pad_token_id)

    def _sample(self, number: int) -> dict[str, torch.Tensor]:
        file = _opened(_part(self.folder, number // PART_SAMPLES * PART_SAMPLES))
        prefix = f"{number}."
        names = (name for name in list(file.keys()) if name.startswith(prefix))
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


@cache
def _opened(path: Path) -> Any:
    """Mapped into memory; a data-loader worker maps it for itself."""
    return safe_open(path, framework="pt")


def _digest(plan: Plan, identity: Mapping[str, str]) -> str:
    facts = {name: value for name, value in identity.items() if name not in ("plan", "attempt", "validation")}
    recipe, memory, images = plan.recipe, plan.memory, plan.images and asdict(plan.images)
    settings = [recipe.answer_format, recipe.loss, recipe.max_length, plan.skip_too_long, images]
    # The micro-batch, as a GPU may round a matrix product by its size.
    settings += [memory.precision, plan.quantization, memory.attn, memory.micro_batch]
    return json_digest([facts, settings])


def _compute_missing(trainer: RecipeTrainer, collator: ConversationCollator, folder: Path) -> None:
    """This process's share of the parts that are not there yet."""
    count = len(collator.records)
    starts = range(0, count, PART_SAMPLES)
    rank, world = trainer.args.process_index, trainer.args.world_size
    missing = [start for start in starts[rank::world] if not _is_undamaged(_part(folder, start))]
    for done, start in enumerate(missing, start=1):
        numbers = range(start, min(start + PART_SAMPLES, count))
        _write_part(_computed(trainer, collator, numbers), _part(folder, start))
        log.info("features of frozen parts: %d/%d", min(done * world, len(starts)), len(starts))
    if not missing:
        log.info("features of frozen parts: found in %s", folder)


@torch.no_grad()
def _computed(
    trainer: RecipeTrainer, collator: ConversationCollator, numbers: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The samples' tensors, each named NUMBER.NAME; images of a micro-batch of samples per pass."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    per_pass = trainer.plan.memory.micro_batch
    tensors: dict[str, torch.Tensor] = {}
    for first in range(0, len(numbers), per_pass):
        chosen = numbers[first : first + per_pass]
        samples = [collator.padded_batch([{"sample": number}]) for number in chosen]
        with_images = [sample for sample in samples if "pixel_values" in sample]
        features: Iterator[torch.Tensor] = iter(())
        if with_images:
            names = ("pixel_values", "image_grid_thw")
            images = {name: torch.cat([sample[name] for sample in with_images]) for name in names}
            with trainer.compute_loss_context_manager():
                outputs = model.get_image_features(**on_device(trainer, images))
            features = iter(outputs.pooler_output)  # one tensor an image
        for number, sample in zip(chosen, samples, strict=True):
            if sample.pop("pixel_values", None) is not None:
                sample[FEATURES] = torch.cat([next(features) for _ in sample["image_grid_thw"]]).cpu()
            tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in sample.items()}
    return tensors


def _part(folder: Path, start: int) -> Path:
    return folder / f"part-{start:06d}.safetensors"


def _write_part(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raises OSError, as on a full disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")  # another training may make the same one
    digest = temporary.with_suffix(".sha256")
    try:
        save_file(tensors, temporary)
        digest.write_text(file_digest(temporary) + "\n", encoding="utf-8")
        digest.replace(path.with_suffix(".sha256"))
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
        digest.unlink(missing_ok=True)


def _is_undamaged(path: Path) -> bool:
    try:
        undamaged = file_digest(path) == path.with_suffix(".sha256").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return False
    if not undamaged:
        log.warning("%s is corrupt; recomputing its features", path)
    return undamaged


def _remove_unused(root: Path, limit_bytes: int) -> None:
    """Remove features that no training reads, the least recently used first, until the rest is within the limit."""
    folders: list[tuple[int, Path, int]] = []  # last use, folder, size
    for folder in root.iterdir():
        with suppress(OSError):  # another training is writing to it, or removing it
            folders.append((folder.stat().st_mtime_ns, folder, sum(path.stat().st_size for path in folder.iterdir())))
    total = sum(size for _, _, size in folders)
    sizes = {folder: size for _, folder, size in sorted(folders)}
    for folder in idle_folders(sizes):
        if total <= limit_bytes:
            return
        with suppress(OSError):
            shutil.rmtree(folder)
            total -= sizes[folder]
