"""Outputs, weights and inputs of models and processors on the same probes, as certificates compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from stages.core.threads import map_largest_first
from stages.kit.data.conversation import Conversation
from stages.kit.models.processors import Processor, encode


def probe_inputs(
    model: nn.Module, processor: Processor, probes: Sequence[Conversation]
) -> Iterator[dict[str, torch.Tensor]]:
    """The model's inputs for one conversation after the other, so that padding plays no part."""
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

    Infinite or NaN where training moved no logit at all.
    """
    return (root_mean_square(merged - adapted) / root_mean_square(adapted - base)).item()


def root_mean_square(values: torch.Tensor) -> torch.Tensor:
    """Summed by parts that torch never shares out among threads, whose number would show in the last digit."""
    parts = values.square().flatten().split(2**14)  # threads share 2**15 (ATen/Parallel.h, GRAIN_SIZE)
    return (torch.stack([part.sum() for part in parts]).sum() / values.numel()).sqrt()


def weight_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bytes by name."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of_one(name: str) -> str:
        return hashlib.sha256(parameters[name].cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()

    return map_largest_first(of_one, {name: parameter.nbytes for name, parameter in parameters.items()})


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
