"""Where a prepared dataset comes from: the stage that makes it, and the source that its stats.json names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict

from stages.core.documents import read_json
from stages.core.errors import UserError
from stages.core.params.load import load_params

STATS_FILE = "stats.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A dataset that a mix was made of."""

    source: str
    asked: int | None
    """Training samples to take of it at most; None for all."""

    __pydantic_config__ = ConfigDict(strict=True)


@dataclass(frozen=True, kw_only=True)
class Origin:
    source: str
    """As it was resolved."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Of a mix, by name."""

    __pydantic_config__ = ConfigDict(strict=True)


def read_origin(prepared_dir: Path, *, stage: str) -> Origin:
    """Raises UserError where the folder does not say it. stage: what prepares it, for the message."""
    return read_json(Origin, prepared_dir / STATS_FILE, mend=f"dvc repro -f -s {stage}")


def preparing_stage(prepared_dir: Path) -> str:
    """What writes the folder, as far as params.yaml says it."""
    try:
        return load_params().prepared_by(prepared_dir.name)
    except UserError:  # of another file than the one that is to be reported
        return f"prepare@{prepared_dir.name}"
