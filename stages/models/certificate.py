"""The merge certificate: a merged folder, reloaded from disk, equals the base with its trained weights applied.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError
from stages.core.lineage import Lineage, short, verified_lineage
from stages.core.params.schema import Params, made_by
from stages.core.records import STRICT_OR_NAN, StageFile, obtain, rebuild

log = logging.getLogger(__name__)

# Limit of how far merging may move the logits, as a share of how far training moved them: 0 is a perfect merge, 1 lost
# all that was trained. Merging changes the order of additions (fp32), and rounds the merged weights once more (fp16: 11
# bits of mantissa, bf16: 8, where a rank of 64 changes a weight by little more than its rounding).
TOLERANCE = {"fp32": 1e-2, "fp16": 1e-1, "bf16": 5e-1}


@dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class QuantizationCost:
    """The effect of merging an adapter that was trained on quantized weights into the unquantized ones."""

    logit_deviation: float | None
    """On the probes, merged against adapter on quantized base, as a share of what training changed there; None if
    training changed nothing."""
    samples: int
    """Validation samples that both models completed."""
    batch_size: int
    """Generation batch size; in 16-bit arithmetic completions depend on it."""
    same_completions: int
    """Number of samples with equal completions."""
    trained: dict[str, float | int | str]
    """The task's metrics of the model as it was trained, on quantized weights."""
    merged: dict[str, float | int | str]

    def __str__(self) -> str:
        same = f"{self.same_completions} of {self.samples} completions are the same"
        if self.logit_deviation is None:
            return same
        return f"{same}, logits off by {self.logit_deviation:.2g} of what training changed"


@dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class MergeCertificate(StageFile):
    recipe: str
    merged_digest: str
    """Content digest of the merged folder, with or without its weights (models.keep_merged)."""
    weights_digest: str
    """Combined digest of the certified parameters (merge.weight_digests)."""
    logit_deviation: float
    """On the probes, merged and reloaded against adapter on base, as a share of adapter on base against base alone."""
    tolerance: float
    probes: int
    changed_modules: Annotated[int, Field(ge=0)]
    unexpected_modules: list[str]
    """Modules that changed, though not trained."""
    unchanged_modules: list[str]
    """Modules that were trained, but equal the base's."""
    processor_parity: bool
    precision: str
    """Precision of the weights that were merged, compared and evaluated."""
    trained_quantization: str
    """Quantization of the frozen weights in training; an adapter on nf4 weights is merged into unquantized ones."""
    quantization_cost: QuantizationCost | None = None
    """None if nothing was quantized."""

    def __str__(self) -> str:
        deviation = f"logits off by {self.logit_deviation:.1e} of what training changed (tolerance {self.tolerance:g})"
        return f"{self.changed_modules} modules changed, {deviation}"

    def problems(self) -> list[str]:
        found = []
        if not 0 <= self.logit_deviation <= self.tolerance:  # a NaN is a problem too
            found.append(
                f"logits deviate by {self.logit_deviation:.2g} of what training changed, not 0 to {self.tolerance:g}"
            )
        if self.probes < 1:
            found.append("nothing was compared: there were no probes")
        if self.unexpected_modules:
            found.append(f"modules changed that were not trained: {', '.join(self.unexpected_modules[:5])}")
        if self.unchanged_modules and (self.precision == "fp32" or not self.changed_modules):
            found.append(f"modules were trained, but did not change: {', '.join(self.unchanged_modules[:5])}")
        if not self.processor_parity:
            found.append("the processor makes other inputs than the base's")
        return found


def require_certified(path: Path, digest: str, problems: Sequence[str], lineage: Lineage, *, stage: str) -> None:
    """Raises UserError unless the certificate in `path` certifies exactly the content that `lineage` records.

    digest, problems: of the certificate. stage: the one that made both, such as merge@r4-joint.
    """
    fix = rebuild(stage)
    if digest != lineage.digest:
        raise UserError(
            f"{path} certifies {short(digest)}, but the folder holds {short(lineage.digest)}; rebuild it with: {fix}"
        )
    if problems:
        made = stage.partition("@")[0]
        raise UserError(f"{path} records a failed {made}: {'; '.join(problems)}; rebuild it with: {fix}")


def certified_model(params: Params, name: str) -> tuple[Path, Lineage]:
    """The model to evaluate, and its lineage: a baseline's base, or a recipe's merged model.

    Raises UserError if the folder is missing or has changed, and for a merged model unless its certificate certifies
    it.
    """
    if name in params.exports:
        raise UserError(
            f"{name} is an export of {params.exports[name].recipe}: give that recipe; llama.cpp runs the file"
        )
    if name in params.baselines:
        if answers := params.baselines[name].answers:
            raise UserError(f"{name} has no model: it is the file {answers}")
        return made_model(params.baselines[name].base)
    folder, lineage = made_model(f"runs/{name}/merged")
    path, stage = folder.with_name("merge.json"), f"merge@{name}"
    certificate = MergeCertificate.read(path, fix=rebuild(stage))
    require_certified(path, certificate.merged_digest, certificate.problems(), lineage, stage=stage)
    return folder, lineage


def made_model(place: str) -> tuple[Path, Lineage]:
    """The folder of a model, and its lineage. Raises UserError if it is missing or has changed.

    place: below data/, such as `bases/NAME`, `runs/RECIPE/merged` or `exports/NAME`.
    """
    folder, stage = Path("data") / place, made_by(place)
    if not folder.is_dir():
        raise UserError(f"{folder} is not there; {obtain(stage)}")
    lineage = verified_lineage(folder, fix=rebuild(stage))
    log.info("model %s, content %s", folder, short(lineage.digest))
    return folder, lineage
