"""The build's certificate: reloaded from disk, each expert is in the mixture as it was, and where tokens go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.core.documents import read_json

# Limit of the deviation between an expert's logits and those of the mixture that uses this expert alone, as a share of
# the expert's. Only the order of additions differs; every limit is a small multiple of the dtype's rounding.
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class Change:
    """How far one expert is from the base: the norm of the difference of their weights over the norm of the base's."""

    mlp: float
    outside: float
    """All other weights, of which a mixture has the base's: the change is lost."""


@dataclass(frozen=True, kw_only=True)
class RoutingByLayer:
    """Routing of one domain's tokens, expert by expert: layer by layer, and over all layers."""

    tokens: int
    weight_by_layer: list[list[float]]
    """(layers, experts): mean weight of the expert's output, 0 where it is not among the token's top k."""
    entropy_by_layer: list[float]
    """(layers,): mean over tokens of the entropy of the router's probabilities, divided by its maximum: 0 where it is
    sure of one expert, 1 where all are equal to it."""
    weight: list[float]
    entropy: float


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The mixture on the probes of one expert's domain. Deviations are root mean squares of differences between logits,
    as a share of the other model's own."""

    probes: int
    deviation: dict[str, float]
    """The mixture as it is, against the base and each expert, by name."""
    forced_deviation: float
    """The mixture with all tokens sent to this expert, against the expert: 0 where nothing was lost."""
    routing: RoutingByLayer


@dataclass(frozen=True, kw_only=True)
class BuildCertificate:
    build: str
    built_digest: str
    """Content of the built folder that was certified."""
    precision: str
    top_k: int
    changes: dict[str, Change]
    """By expert."""
    tolerance: float
    domains: dict[str, Domain]
    """By expert."""

    def problems(self) -> list[str]:
        """An expert that changed nothing but MLPs is in the mixture whole, or the merge is wrong."""
        return [
            f"expert {name} alone deviates by {domain.forced_deviation:.2g} of its logits, more than {self.tolerance:g}"
            for name, domain in self.domains.items()
            if not self.changes[name].outside and not domain.forced_deviation <= self.tolerance  # NaN is a problem too
        ]


def read_build_certificate(path: Path) -> BuildCertificate:
    """As it was written, whatever it certifies. Raises UserError where it is missing or damaged."""
    return read_json(BuildCertificate, path, fix=f"dvc repro build@{path.stem}")
