"""The merge certificate: a merged folder, reloaded from disk, is the base with what was trained put on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict
from torch import nn

from stages.kit.data.conversation import Conversation
from stages.kit.documents import read_json
from stages.kit.errors import UserError
from stages.kit.lineage import Lineage, short, verified_lineage
from stages.kit.models.processors import Processor, encode
from stages.kit.params import Params, made_by
from stages.kit.publish import publish_text

log = logging.getLogger(__name__)

# How far merging may move the logits, as a share of how far training moved them: 0 is a perfect merge, 1 one that lost
# all that was trained. Merging changes the order of additions (fp32), and rounds the merged weights once more (fp16: 11
# bits of mantissa, bf16: 8, where a rank of 64 changes a weight by little more than its rounding).
TOLERANCE = {"fp32": 1e-2, "fp16": 1e-1, "bf16": 5e-1}


@dataclass(frozen=True, kw_only=True)
class Certificate:
    recipe: str
    merged_digest: str
    """Content of the merged folder that was certified."""
    logit_deviation: float
    """On the probes, merged and reloaded against adapter on base, as a share of adapter on base against base alone."""
    tolerance: float
    probes: int
    changed_modules: int
    unexpected_modules: list[str]
    """Changed, though not trained."""
    unchanged_modules: list[str]
    """Trained, yet the same as in the base."""
    processor_parity: bool
    precision: str
    """Of the weights that were merged and compared, and of what is evaluated."""
    trained_quantization: str
    """Of the frozen weights in training; the adapter was trained on nf4 weights where it says so, and merged into the
    unquantized ones."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    def problems(self) -> list[str]:
        found = []
        if not self.logit_deviation <= self.tolerance:  # a NaN is a problem too
            found.append(
                f"logits deviate by {self.logit_deviation:.2g} of what training changed, more than {self.tolerance:g}"
            )
        if self.unexpected_modules:
            found.append(f"modules changed that were not trained: {', '.join(self.unexpected_modules[:5])}")
        if self.unchanged_modules and (self.precision == "fp32" or not self.changed_modules):
            found.append(f"modules were trained, but did not change: {', '.join(self.unchanged_modules[:5])}")
        if not self.processor_parity:
            found.append("the processor makes other inputs than the base's")
        return found


def write_certificate(certificate: Certificate, path: Path) -> None:
    publish_text(json.dumps(asdict(certificate), indent=2) + "\n", path)


def require_certificate(path: Path, merged: Lineage) -> None:
    """Raises UserError unless `path` certifies exactly the content that `merged` records."""
    command = f"dvc repro merge@{merged.name}"
    certificate, mend = read_json(Certificate, path, mend=command), f"rebuild it with: {command}"
    if certificate.merged_digest != merged.digest:
        raise UserError(
            f"{path} certifies {short(certificate.merged_digest)}, but the folder holds {short(merged.digest)}; {mend}"
        )
    if problems := certificate.problems():
        raise UserError(f"{path} records a failed merge: {'; '.join(problems)}; {mend}")


def certified_merge(recipe: str) -> tuple[Path, Lineage]:
    """The merged model of a recipe, and where it comes from.

    Raises UserError unless it is complete, unchanged, and what its certificate certifies.
    """
    folder = Path("data/runs") / recipe / "merged"
    lineage = verified_lineage(folder, mend=f"dvc repro -f -s merge@{recipe}")
    require_certificate(folder.parent / "merge.json", lineage)
    return folder, lineage


def certified_model(params: Params, name: str) -> tuple[Path, Lineage]:
    """The model to evaluate and where it comes from: a baseline's base, or a recipe's merged model.

    Raises UserError where the folder has changed, and for a recipe without the certificate that holds.
    """
    if name in params.baselines:
        base = params.baselines[name].base
        folder = Path("data") / base
        lineage = verified_lineage(folder, mend=f"dvc repro -f -s {made_by(base)}")
    else:
        folder, lineage = certified_merge(name)
    label = ", random weights" if lineage.of_random_weights() else ""
    log.info("evaluating %s, content %s%s", folder, short(lineage.digest), label)
    return folder, lineage


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
