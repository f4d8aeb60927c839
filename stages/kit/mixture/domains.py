"""A mixture compared with what it was built from, on the probes of each of its experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from stages.kit.data.conversation import Conversation
from stages.kit.mixture.certificate import Domain
from stages.kit.mixture.routing import measure_routing, routed_to
from stages.kit.models.probes import probe_logits
from stages.kit.models.processors import Processor


def measure_domains(
    built_dir: Path,
    base_dir: Path,
    expert_dirs: Mapping[str, Path],
    probes: Mapping[str, Sequence[Conversation]],
    *,
    load: Callable[[Path], PreTrainedModel],
    processor: Processor,
) -> dict[str, Domain]:
    """Compare a mixture with what it was built from, on the probes of each expert. One model is held at a time.

    expert_dirs: by name, in the mixture's order. probes: conversations by the same names. load: of a folder.
    """
    mixture = load(built_dir).eval()
    ours, forced, routings = {}, {}, {}
    for index, name in enumerate(expert_dirs):
        ours[name] = probe_logits(mixture, processor, probes[name])
        routings[name] = measure_routing(mixture, processor, probes[name])
        with routed_to(mixture, index):
            forced[name] = probe_logits(mixture, processor, probes[name])
    del mixture
    deviation: dict[str, dict[str, float]] = {name: {} for name in expert_dirs}
    forced_deviation: dict[str, float] = {}
    for other, folder in {"base": base_dir, **{f"expert {name}": path for name, path in expert_dirs.items()}}.items():
        model = load(folder).eval()
        for name in expert_dirs:
            theirs = probe_logits(model, processor, probes[name])
            deviation[name][other] = logit_deviation(ours[name], theirs)
            if other == f"expert {name}":
                forced_deviation[name] = logit_deviation(forced[name], theirs)
        del model
    return {
        name: Domain(
            probes=len(probes[name]),
            deviation=deviation[name],
            forced_deviation=forced_deviation[name],
            routing=routings[name],
        )
        for name in expert_dirs
    }


def logit_deviation(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Root mean square of ours - theirs over that of theirs; each (T, vocabulary), one a probe."""
    one, other = torch.cat(list(ours)), torch.cat(list(theirs))
    return ((one - other).square().mean().sqrt() / other.square().mean().sqrt()).item()
