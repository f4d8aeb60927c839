"""Features of frozen vision towers: computed once for all samples of a training, and kept on the disk.

    .bakeoff/features/DIGEST/part-000000.safetensors    samples as the collator encodes them, by number, with the
                                                        features of their pictures in place of pixels
                             part-000000.sha256
                             lock                       held, shared, by every training that reads them

The digest is that of all that features and texts depend on, so that another seed or learning rate finds them. A part is
complete or absent; a damaged one is computed anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stages.core.errors import UserError, bytes_text
from stages.core.lineage import file_digest
from stages.kit.internals.transformers_internals import on_device
from stages.kit.planning.plan import Plan
from stages.kit.training.checkpoints import locked, open_lock
from stages.kit.training.collators import FEATURES, ConversationCollator, padded

if TYPE_CHECKING:
    from stages.kit.training.trainer import RecipeTrainer

PART_SAMPLES = 64
"""Samples of a file: held in memory while it is made, and made again after an interruption."""

log = logging.getLogger("stages")


def features_dir(repository_dir: Path) -> Path:
    return repository_dir / ".bakeoff/features"


@contextmanager
def kept_features(root: Path, plan: Plan, identity: Mapping[str, str]) -> Iterator[Path | None]:
    """The folder of the features of a training, which nothing removes meanwhile; None where the plan keeps none.

    root: `features_dir`. identity: the training's (fingerprint.py).
    Raises UserError where nothing can be written there.
    """
    if not plan.features_bytes:
        yield None
        return
    folder = root / _digest(plan, identity)
    try:
        lock = locked(folder, fcntl.LOCK_SH)
        os.utime(folder)
    except OSError as error:
        raise _cannot_keep(folder, plan, error) from None
    with lock:
        yield folder


def _digest(plan: Plan, identity: Mapping[str, str]) -> str:
    facts = {name: value for name, value in identity.items() if name not in ("plan", "attempt")}
    settings = asdict(plan)
    names = ("answer_format", "precision", "quantization", "attn", "loss", "max_length", "images")
    chosen = {name: settings[name] for name in names}
    chosen["pictures at once"] = plan.schedule.micro_batch  # a GPU may round a matrix product by its size
    return hashlib.sha256(json.dumps([facts, chosen], sort_keys=True).encode()).hexdigest()[:16]


def use_features(trainer: RecipeTrainer, collator: ConversationCollator, folder: Path, *, limit_gb: float) -> None:
    """Have the trainer's batches made of the features in `folder`, once those that are missing have been computed.

    Each process of a training computes its share. limit_gb: of all features of the repository, in GB; the longest
    unused of others go.
    Raises UserError where they cannot be written.
    """
    count, plan = len(collator.records), trainer.plan
    starts = range(0, count, PART_SAMPLES)
    rank, world = trainer.args.process_index, trainer.args.world_size
    missing = [start for start in starts[rank::world] if not _is_whole(_part(folder, start))]
    try:
        for done, start in enumerate(missing, start=1):
            numbers = range(start, min(start + PART_SAMPLES, count))
            _write_part(_computed(trainer, collator, numbers), _part(folder, start))
            if rank == 0:
                log.info("features of frozen parts: %d/%d", min(done * world, len(starts)), len(starts))
    except OSError as error:
        raise _cannot_keep(folder, plan, error) from None
    trainer.accelerator.wait_for_everyone()
    if rank == 0:
        if not missing:
            log.info("features of frozen parts: found in %s", folder)
        _thin_out(folder.parent, round(limit_gb * 1e9))
    trainer.data_collator = FeatureCollator(folder, collator)


class FeatureCollator:
    """Batches as a ConversationCollator makes them, with FEATURES in place of pixels, read from files."""

    def __init__(self, folder: Path, collator: ConversationCollator) -> None:
        self.folder, self.collator = folder, collator
        self.lengths = collator.lengths

    def __call__(self, examples: Sequence[Mapping[str, int]]) -> dict[str, torch.Tensor]:
        """examples: rows of a dataset with the column `sample`."""
        samples = [self._sample(int(example["sample"])) for example in examples]
        return self.collator.as_planned(padded(samples, self.collator.pad_token_id))

    def _sample(self, number: int) -> dict[str, torch.Tensor]:
        file = _opened(_part(self.folder, number // PART_SAMPLES * PART_SAMPLES))
        prefix = f"{number}."
        names = (name for name in list(file.keys()) if name.startswith(prefix))
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


@cache
def _opened(path: Path) -> Any:
    """Mapped into memory; a data-loader worker maps it for itself."""
    return safe_open(path, framework="pt")


@torch.no_grad()
def _computed(
    trainer: RecipeTrainer, collator: ConversationCollator, numbers: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The samples' tensors, each named NUMBER.NAME; so many pictures at once as the training has samples."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    at_once = trainer.plan.schedule.micro_batch
    tensors: dict[str, torch.Tensor] = {}
    for first in range(0, len(numbers), at_once):
        some = numbers[first : first + at_once]
        samples = [collator.one_a_row([{"sample": number}]) for number in some]
        shown = [sample for sample in samples if "pixel_values" in sample]
        features: Iterator[torch.Tensor] = iter(())
        if shown:
            pictures = {name: torch.cat([each[name] for each in shown]) for name in ("pixel_values", "image_grid_thw")}
            with trainer.compute_loss_context_manager():
                outputs = base.get_image_features(**on_device(trainer, pictures))
            features = iter(outputs.pooler_output)  # one tensor a picture
        for number, sample in zip(some, samples, strict=True):
            if sample.pop("pixel_values", None) is not None:
                sample[FEATURES] = torch.cat([next(features) for _ in sample["image_grid_thw"]]).cpu()
            tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in sample.items()}
    return tensors


def _part(folder: Path, start: int) -> Path:
    return folder / f"part-{start:06d}.safetensors"


def _write_part(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raises OSError, as on a full disk."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")  # another training may make the same one
    digest = aside.with_suffix(".sha256")
    try:
        save_file(tensors, aside)
        digest.write_text(file_digest(aside) + "\n", encoding="utf-8")
        digest.replace(path.with_suffix(".sha256"))
        aside.replace(path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        aside.unlink(missing_ok=True)
        digest.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether a part is there, undamaged."""
    try:
        whole = file_digest(path) == path.with_suffix(".sha256").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return False
    if not whole:
        log.warning("%s is damaged; its features are computed anew", path)
    return whole


def _thin_out(root: Path, limit_bytes: int) -> None:
    """Remove what is read by no training, the longest unused first, until all that is left takes at most so much."""
    sizes = {folder: sum(path.stat().st_size for path in folder.iterdir()) for folder in root.iterdir()}
    for folder in sorted(sizes, key=lambda folder: folder.stat().st_mtime_ns):
        if sum(sizes.values()) <= limit_bytes:
            return
        with suppress(OSError), open_lock(folder) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            del sizes[folder]


def _cannot_keep(folder: Path, plan: Plan, error: OSError) -> UserError:
    return UserError(
        f"{folder} cannot hold the features of the frozen parts, {bytes_text(plan.features_bytes)} at most: {error}; "
        f"make room, or have each step compute them: profiles.{plan.profile}.memory.features_gb: 0"
    )
