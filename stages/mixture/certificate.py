"""The build certificate: reloaded from disk, the mixture contains its experts unchanged; and its routing of tokens."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from stages.core.records import STRICT_OR_NAN, StageFile

# Limit of the deviation between an expert's logits and those of the mixture that uses this expert alone, as a share of
# the expert's. Only the order of additions differs; every limit is a small multiple of the dtype's rounding.
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class Change:
    """Distance of an expert from the base: the norm of the difference of their weights over the norm of the base's."""

    mlp: float
    outside: float
    """All other weights; a mixture has the base's, so this change is lost."""


@dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class Routing:
    """Routing of some tokens, averaged over tokens and the layers with a router."""

    load: tuple[float, ...]
    """Share of the routing weight by expert; they add up to 1. A token's weight goes to its top-k experts only."""
    entropy: float
    """Mean entropy of the routers' probabilities over all experts, divided by its maximum: 0 for a router that is sure
    of one expert, 1 for one that rates all alike."""


@dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class Domain:
    """The mixture on the probes of one expert's domain."""

    probes: int
    forced_deviation: float
    """The mixture with all tokens sent to this expert, against the expert: root mean square of the difference of their
    logits, as a share of the expert's own; 0 if nothing was lost."""
    routing: Routing


@dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class BuildCertificate(StageFile):
    build: str
    built_digest: str
    """Content digest of the built folder."""
    precision: str
    top_k: int
    changes: dict[str, Change]
    """Change by expert."""
    tolerance: float
    domains: dict[str, Domain]
    """Domain by expert."""

    def problems(self) -> list[str]:
        """The merge is wrong if an expert that changed only MLPs is not in the mixture whole."""
        return [
            f"expert {name} alone deviates by {domain.forced_deviation:.2g} of its logits, more than {self.tolerance:g}"
            for name, domain in self.domains.items()
            if not self.changes[name].outside and not domain.forced_deviation <= self.tolerance  # NaN is a problem too
        ]
