"""The certificate of an export: its weights, read back and dequantized, are the merged model's but for rounding.

Imports neither torch nor gguf.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError, bytes_text, join_truncated, pluralize
from stages.core.lineage import Lineage, read_lineage
from stages.core.params.schema import ExportParams, Params
from stages.core.records import STRICT_OR_NAN, StageFile, rebuild
from stages.models.certificate import made_model, require_certified

TOLERANCE = {"f16": 0.5, "q8_0": 0.57, "q4_0": 1.01, "nf4": 0.55, "int8": 0.57}
"""Largest deviation of a weight, in steps of the quantization (`deviation`). Rounding to the nearest is off by half of
one, and what scales a block is rounded too. q4_0 has 7 steps above zero and 8 below: its largest weights may be off by
one. nf4 is dequantized in the weights' own precision, where bf16 rounds scale, code and product."""


@dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class ExportCertificate(StageFile):
    export: ExportParams
    """Its entry in params.yaml when it was made."""
    exported_digest: str
    """Content digest of the export's folder."""
    size_bytes: Annotated[int, Field(ge=1)]
    """Size of the weights' files."""
    tensors: Annotated[int, Field(ge=1)]
    """Weights of the merged model, by name, each of which was compared."""
    deviation: float
    """Largest deviation of any weight, in steps."""
    tolerance: float
    wrong: list[str]
    """Tensors that are missing, unknown, of another shape or off by more."""

    def __str__(self) -> str:
        off = f"off by at most {self.deviation:.2f} steps of the quantization (tolerance {self.tolerance:g})"
        return f"{bytes_text(self.size_bytes)}, {pluralize(self.tensors, 'tensor')}, {off}"

    def problems(self) -> list[str]:
        if self.wrong:
            return [f"{pluralize(len(self.wrong), 'tensor')} differ from its own: {join_truncated(self.wrong, 5)}"]
        # A NaN is a problem too.
        return [] if self.deviation <= self.tolerance else [f"weights are off by {self.deviation:.2f} steps"]


def exported_model(params: Params, name: str) -> tuple[Path, Lineage, ExportCertificate]:
    """An export's folder, its lineage and its certificate.

    Raises UserError if the folder is missing or has changed, the certificate is not of its content, or params.yaml or
    the recipe's merged model has changed since.
    """
    export = params.export(name)
    folder, lineage = made_model(f"exports/{name}")
    path, stage = folder.with_name(f"{name}.json"), f"export@{name}"
    certificate = ExportCertificate.read(path, fix=rebuild(stage))
    require_certified(path, certificate.exported_digest, certificate.problems(), lineage, stage=stage)
    merged = read_lineage(Path("data/runs") / export.recipe / "merged")
    if certificate.export != export or lineage.parents["merged"].lineage.digest != merged.digest:
        found = f"{certificate.export.quantization} of {certificate.export.recipe}"
        raise UserError(
            f"{folder} is the {found} as it was, and params.yaml or that model has changed since; export and score it "
            f"again with: dvc repro exported@{name}"
        )
    return folder, lineage, certificate


def require_llama_cpp() -> None:
    """Raises UserError if the packages that write GGUF and run it are not installed."""
    if find_spec("xllamacpp") is None or find_spec("gguf") is None:
        raise UserError("llama.cpp is not installed; install it with: make setup EXTRAS=llamacpp")
