"""Merged models: trained weights merged into their base, certified by reloading, and loaded for evaluation."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.lineage import (
    Lineage,
    combined_digest,
    map_largest_first,
    read_lineage,
    require_base,
    short,
    true_base,
    write_lineage,
)
from stages.core.params.schema import DeviceParams
from stages.core.records import rebuild
from stages.data.conversation import Conversation
from stages.models.adapters import apply_recipe, load_trained, trained_modules
from stages.models.certificate import TOLERANCE, MergeCertificate
from stages.models.folders import has_weights, remove_weights
from stages.models.load import load_model, meta_model
from stages.models.prompts import Processor, encode, load_processor

if TYPE_CHECKING:
    from stages.planning.plan import Plan

MAX_SHARD_SIZE = "2GB"
"""Limit of one file of weights; a larger tensor is a shard of its own."""

log = logging.getLogger(__name__)


def merge_certified(
    plan: Plan,
    parents: dict[str, tuple[Path, Lineage]],
    folder: Path,
    processor: Processor,
    probes: Sequence[Conversation],
    *,
    load: Callable[[Path], PreTrainedModel],
    keep_weights: bool,
    trained_quantization: str,
) -> tuple[MergeCertificate, PreTrainedModel, torch.Tensor]:
    """Merge trained weights into their base, and write a standard Hugging Face folder with its lineage.

    parents: folder and lineage of the `base`, and of what was `trained` on it. keep_weights: False removes the weights
    from the folder once they are reloaded.
    Returns the certificate, the model reloaded from the folder, and its logits on the probes. Raises UserError if the
    model is not what was trained.
    """
    base = load(parents["base"][0])
    before, base_logits = weight_digests(base), probe_logits(base, processor, probes)
    trained = load_trained(base, parents["trained"][0]).eval()
    trained_logits = probe_logits(trained, processor, probes)
    merge_trained(trained).save_pretrained(folder, safe_serialization=True, max_shard_size=MAX_SHARD_SIZE)
    processor.save_pretrained(folder)
    if (tokenizer := parents["base"][0] / "tokenizer.json").exists():
        shutil.copyfile(tokenizer, folder / tokenizer.name)  # a saved one has the padding of its last batch
    del base, trained  # the next model needs their memory
    merged = load(folder)
    if not keep_weights:
        remove_weights(folder)
    lineage = write_lineage(folder, kind="merged", name=plan.name, parents=parents)
    logits, digests = probe_logits(merged, processor, probes), weight_digests(merged)
    changed = changed_modules(before, digests)
    expected = trained_modules(apply_recipe(meta_model(merged.config), plan.recipe))
    certificate = MergeCertificate(
        recipe=plan.name,
        merged_digest=lineage.digest,
        weights_digest=combined_digest(digests),
        logit_deviation=relative_deviation(logits, trained_logits, base_logits),
        tolerance=TOLERANCE[plan.memory.precision],
        probes=len(probes),
        changed_modules=len(changed),
        unexpected_modules=sorted(changed - expected),
        unchanged_modules=sorted(expected - changed),
        processor_parity=same_inputs(load_processor(folder, None), processor, probes),
        precision=plan.memory.precision,
        trained_quantization=trained_quantization,
    )
    if problems := certificate.problems():
        raise UserError(f"the merge of {plan.name} is not what was trained: {'; '.join(problems)}")
    return certificate, merged, logits


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
    lineage, base_dir, trained_dir = read_lineage(folder), true_base(folder), folder.with_name("trained")
    fix = rebuild(f"merge@{lineage.name}")
    trained, _ = require_base(trained_dir, base_dir, fix=fix)
    if trained != (wanted := lineage.parents["trained"].lineage):
        raise UserError(
            f"{folder} was merged from {short(wanted.digest)}, but {trained_dir} holds {short(trained.digest)}; "
            f"rebuild it with: {fix}"
        )
    log.info("%s has no weights: merging %s into %s again, in memory", folder, trained_dir, base_dir)
    base = load_model(base_dir, device=device, precision=precision, attn=attn)
    model = merge_trained(load_trained(base, trained_dir))
    found = combined_digest(weight_digests(model))
    certified = MergeCertificate.read(folder.with_name("merge.json"), fix=fix).weights_digest
    if found != certified:
        raise UserError(
            f"merging {trained_dir} into {base_dir} again gave weights {short(found)}, but {short(certified)} were "
            f"certified, perhaps on another kind of device; certify them here with: {fix}"
        )
    return model


@torch.inference_mode()
def probe_logits(model: nn.Module, processor: Processor, probes: Sequence[Conversation]) -> torch.Tensor:
    """The logits (tokens of all probes, vocabulary) in fp32, on the CPU. One probe after the other, without padding."""
    assert probes, "no conversation to measure on"
    device, logits = next(model.parameters()).device, []
    for probe in probes:
        inputs = encode(processor, [probe], padding_side="right")
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        logits.append(model(**inputs, use_cache=False).logits[0].float().cpu())
    return torch.cat(logits)


def relative_deviation(merged: torch.Tensor, adapted: torch.Tensor, base: torch.Tensor) -> float:
    """Root mean square of merged - adapted over that of adapted - base: 0 for a perfect merge, 1 for a lost one.

    Infinite or NaN if training changed no logit.
    """
    return (root_mean_square(merged - adapted) / root_mean_square(adapted - base)).item()


def root_mean_square(values: torch.Tensor) -> torch.Tensor:
    """Summed in parts that torch never splits among threads; else their number would change the last digit."""
    parts = values.square().flatten().split(2**14)  # threads share 2**15 (ATen/Parallel.h, GRAIN_SIZE)
    return (torch.stack([part.sum() for part in parts]).sum() / values.numel()).sqrt()


def weight_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bytes by name."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def digest(name: str) -> str:
        return hashlib.sha256(parameters[name].cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()

    return map_largest_first(digest, {name: parameter.nbytes for name, parameter in parameters.items()})


def changed_modules(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """Modules with a parameter of another digest, or on one side only."""
    return {name.rpartition(".")[0] for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def same_inputs(ours: Processor, theirs: Processor, probes: Sequence[Conversation]) -> bool:
    """Whether two processors make the same tensors of the probes."""
    for probe in probes:
        a, b = (encode(processor, [probe], padding_side="right") for processor in (ours, theirs))
        if a.keys() != b.keys() or any(not torch.equal(a[name], b[name]) for name in a):
            return False
    return True
