"""What two models, or two processors, make of the same probes: what a certificate rests on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from stages.kit.data.conversation import Conversation
from stages.kit.models.processors import Processor, encode


@torch.inference_mode()
def probe_logits(model: nn.Module, processor: Processor, probes: Sequence[Conversation]) -> list[torch.Tensor]:
    """For each probe the logits (T, vocabulary) in fp32, one by one, so that padding plays no part."""
    device = next(model.parameters()).device
    logits = []
    for probe in probes:
        inputs = {name: tensor.to(device) for name, tensor in encode(processor, [probe], padding_side="right").items()}
        logits.append(model(**inputs, use_cache=False).logits[0].float().cpu())
    return logits


def relative_deviation(merged: list[torch.Tensor], adapted: list[torch.Tensor], base: list[torch.Tensor]) -> float:
    """Root mean square of merged - adapted over that of adapted - base: 0 for a perfect merge, 1 for a lost one.

    Infinite or NaN where training moved no logit at all.
    """
    ours, wanted, before = torch.cat(merged), torch.cat(adapted), torch.cat(base)
    return ((ours - wanted).square().mean().sqrt() / (wanted - before).square().mean().sqrt()).item()


def weight_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bytes by name, in little memory."""
    return {
        name: hashlib.sha256(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()
        for name, parameter in model.named_parameters()
    }


def changed_modules(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Modules any of whose parameters differ, or are only on one side."""
    return {name.rpartition(".")[0] for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def same_inputs(
    ours: Processor,
    theirs: Processor,
    probes: Sequence[Conversation],
) -> bool:
    """Whether two processors make the same tensors of the probes."""
    for probe in probes:
        a, b = (encode(processor, [probe], padding_side="right") for processor in (ours, theirs))
        if a.keys() != b.keys() or any(not torch.equal(a[name], b[name]) for name in a):
            return False
    return True
