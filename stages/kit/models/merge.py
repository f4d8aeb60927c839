"""Merged models: trained weights merged into their base, certified by reloading, and loaded for evaluation."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.lineage import combined_digest, read_lineage, require_base, short
from stages.core.params.schema import DeviceParams
from stages.core.threads import map_largest_first
from stages.kit.data.conversation import Conversation
from stages.kit.models.adapters import load_trained
from stages.kit.models.certificate import read_certificate
from stages.kit.models.folders import has_weights
from stages.kit.models.load import load_model
from stages.kit.models.prompts import Processor, encode

MAX_SHARD_SIZE = "2GB"
"""Limit of one file of weights; a larger tensor is a shard of its own."""

log = logging.getLogger(__name__)


def merge_trained(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Adds adapters to the weights they are attached to; refuses an adapter with NaNs."""
    return model.merge_and_unload(safe_merge=True) if isinstance(model, PeftModel) else model


def load_certified(folder: Path, *, device: DeviceParams, precision: str, attn: str) -> PreTrainedModel:
    """The model of a folder that `certified_model` accepted.

    Without weights in it (models.keep_merged), the trained weights are merged into its base again, in memory.
    Raises UserError if base, trained weights or result are not those that the merge was certified with.
    """
    if has_weights(folder):
        return load_model(folder, device=device, precision=precision, attn=attn)
    lineage = read_lineage(folder)
    rebuild = f"dvc repro -f -s merge@{lineage.name}"
    base_dir, trained_dir = (
        Path(os.path.normpath(folder / lineage.parents[role].path)) for role in ("base", "trained")
    )
    trained, _ = require_base(trained_dir, base_dir, fix=rebuild)
    if trained != lineage.parents["trained"].lineage:
        raise UserError(
            f"{folder} was merged from {short(lineage.parents['trained'].lineage.digest)}, but {trained_dir} holds "
            f"{short(trained.digest)}; rebuild it with: {rebuild}"
        )
    log.info("%s has no weights: merging %s into %s again, in memory", folder, trained_dir, base_dir)
    base = load_model(base_dir, device=device, precision=precision, attn=attn)
    model = merge_trained(load_trained(base, trained_dir))
    found = combined_digest(weight_digests(model))
    wanted = read_certificate(folder.with_name("merge.json"), lineage.name).weights_digest
    if found != wanted:
        raise UserError(
            f"merging {trained_dir} into {base_dir} again gave weights {short(found)}, but {short(wanted)} were "
            f"certified, perhaps on another kind of device; certify them here with: {rebuild}"
        )
    return model


def probe_inputs(
    model: nn.Module, processor: Processor, probes: Sequence[Conversation]
) -> Iterator[dict[str, torch.Tensor]]:
    """The model's inputs for one conversation after the other, without padding."""
    assert probes, "no conversation to measure on"
    device = next(model.parameters()).device
    for probe in probes:
        inputs = encode(processor, [probe], padding_side="right")
        yield {name: tensor.to(device) for name, tensor in inputs.items()}


@torch.inference_mode()
def probe_logits(model: nn.Module, processor: Processor, probes: Sequence[Conversation]) -> torch.Tensor:
    """The logits (tokens of all probes, vocabulary) in fp32, on the CPU."""
    each = probe_inputs(model, processor, probes)
    return torch.cat([model(**inputs, use_cache=False).logits[0].float().cpu() for inputs in each])


def relative_deviation(merged: torch.Tensor, adapted: torch.Tensor, base: torch.Tensor) -> float:
    """Root mean square of merged - adapted over that of adapted - base: 0 for a perfect merge, 1 for a lost one.

    Infinite or NaN if training changed no logit.
    """
    return (root_mean_square(merged - adapted) / root_mean_square(adapted - base)).item()


def root_mean_square(values: torch.Tensor) -> torch.Tensor:
    """Summed in parts that torch never splits among threads, whose number would show in the last digit."""
    parts = values.square().flatten().split(2**14)  # threads share 2**15 (ATen/Parallel.h, GRAIN_SIZE)
    return (torch.stack([part.sum() for part in parts]).sum() / values.numel()).sqrt()


def weight_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bytes by name."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def digest(name: str) -> str:
        return hashlib.sha256(parameters[name].cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()

    return map_largest_first(digest, {name: parameter.nbytes for name, parameter in parameters.items()})


def changed_modules(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """Modules any of whose parameters have other digests, or are only on one side."""
    return {name.rpartition(".")[0] for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def same_inputs(ours: Processor, theirs: Processor, probes: Sequence[Conversation]) -> bool:
    """Whether two processors make the same tensors of the probes."""
    for probe in probes:
        a, b = (encode(processor, [probe], padding_side="right") for processor in (ours, theirs))
        if a.keys() != b.keys() or any(not torch.equal(a[name], b[name]) for name in a):
            return False
    return True
