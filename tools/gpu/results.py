"""Results of the pieces, a line of JSON each."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tools.gpu.pieces import Piece
from tools.lines import append_line, complete_lines

DECIDING = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "flash-attn")
"""With other versions of these every result is another one."""


EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Result:
    piece: str
    status: Literal["done", "out of memory", "failed", "unfinished"]
    data: dict[str, Any] = Field(default_factory=dict)
    """The answer of the step's job."""
    problem: str = ""
    seconds: float
    """With the start of its process."""
    date: str
    commit: str
    versions: dict[str, str]

    @property
    def is_final(self) -> bool:
        """Whether measuring again would be of no use; that memory ran out is a result."""
        return self.status in ("done", "out of memory")

    @property
    def is_well(self) -> bool:
        return self.status != "failed" and not any(value is False for value in self.data.values())


class Results:
    """Of one device, with the versions that are installed now. Others in the file stay there, and do not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self.versions = installed_versions()
        self.commit = commit()
        self.by_piece: dict[str, Result] = {}
        for line in complete_lines(path):
            try:
                result = TypeAdapter(Result).validate_json(line)
            except ValidationError:  # of another version of this tool
                continue
            if result.versions == self.versions:
                self.by_piece[result.piece] = result

    def todo(self, pieces: list[Piece]) -> list[Piece]:
        """New pieces first, then failed ones."""
        open_ = [piece for piece in pieces if piece.key not in self.by_piece or not self.by_piece[piece.key].is_final]
        return sorted(open_, key=lambda piece: piece.key in self.by_piece and not self._is_unfinished(piece))

    def keep(
        self, piece: Piece, status: str, *, seconds: float, problem: str = "", data: Mapping[str, Any] = EMPTY
    ) -> Result:
        """Several threads may."""
        result = TypeAdapter(Result).validate_python(
            {
                "piece": piece.key,
                "status": status,
                "data": dict(data),
                "problem": problem,
                "seconds": round(seconds, 1),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": self.commit,
                "versions": self.versions,
            }
        )
        with self._lock:
            append_line(json.dumps(asdict(result)), self.path)
            self.by_piece[piece.key] = result
        return result

    def _is_unfinished(self, piece: Piece) -> bool:
        return self.by_piece[piece.key].status == "unfinished"


def installed_versions() -> dict[str, str]:
    found = {}
    for name in DECIDING:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of this checkout, e.g. `bac7d8a`, or `bac7d8a+` where files are changed; empty without git."""
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return asked.stdout.strip()
