"""The build's certificate: reloaded from disk, each expert is in the mixture as it was, and where tokens go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from stages.kit.data.conversation import Conversation
from stages.kit.models.certificate import probe_logits
from stages.kit.models.mixture.merge import Change
from stages.kit.models.mixture.routing import Routing, measure_routing, routed_to
from stages.kit.models.processors import Processor
from stages.kit.publish import publish_text

# How far the logits of an expert may be from those of the mixture that is told to use this expert alone, as a share of
# the expert's. Only the order of additions differs; every bound is a small multiple of the dtype's rounding.
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The mixture on the probes of one expert. Deviations are root mean squares of differences between logits, as a
    share of the other model's own."""

    probes: int
    deviation: dict[str, float]
    """Of the mixture as it is, against the base and each expert, by name."""
    forced_deviation: float
    """Of the mixture with all tokens sent to this expert, against the expert: 0 where nothing was lost."""
    routing: Routing


@dataclass(frozen=True, kw_only=True)
class BuildCertificate:
    build: str
    built_digest: str
    """Content of the built folder that was certified."""
    precision: str
    """Of the arithmetic."""
    top_k: int
    router_init: str
    non_mlp: str
    changes: dict[str, Change]
    """How far each expert is from the base, in the MLPs and outside of them."""
    tolerance: float
    domains: dict[str, Domain]
    """By expert."""

    def problems(self) -> list[str]:
        """An expert that changed nothing but MLPs is in the mixture whole, or the merge is wrong. What others changed
        outside of them is lost or averaged, for all experts alike."""
        if self.non_mlp == "average" and any(change.outside for change in self.changes.values()):
            return []
        return [
            f"expert {name} alone deviates by {domain.forced_deviation:.2g} of its logits, more than {self.tolerance:g}"
            for name, domain in self.domains.items()
            if not self.changes[name].outside and not domain.forced_deviation <= self.tolerance  # NaN is a problem too
        ]


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


def write_build_certificate(certificate: BuildCertificate, path: Path) -> None:
    publish_text(json.dumps(asdict(certificate), indent=2) + "\n", path)
