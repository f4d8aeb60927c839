"""Results of the pieces: a file that grows by a line of JSON each, and may be cut off in the middle of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stages.kit.launcher.process import installed_packages
from tools.gpu.pieces import Piece

DECIDING = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "flash-attn")
"""With other versions of these every result is another one."""

Status = Literal["done", "out of memory", "failed"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Result:
    piece: str
    status: Status
    """Only a failed piece is measured again: that memory ran out is a result."""
    data: dict[str, Any]
    """The answer of the step's job; empty where there is none."""
    problem: str
    seconds: float
    """With the start of its process."""
    date: str
    commit: str
    versions: dict[str, str]

    @property
    def is_well(self) -> bool:
        return self.status != "failed" and not any(value is False for value in self.data.values())


class Results:
    """Results of one device, with one set of versions. Others in the file stay there, and do not count."""

    def __init__(self, path: Path, *, measured_here: bool = True) -> None:
        """measured_here: with the versions that are installed; else with those of the file's last line."""
        self.path = path
        self.commit = _commit()
        self._lock = Lock()
        lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.is_file() else []
        found = [result for result in map(_parsed, lines) if result is not None]
        self.versions = found[-1].versions if found and not measured_here else installed_versions()
        self.by_piece = {result.piece: result for result in found if result.versions == self.versions}

    def todo(self, pieces: Sequence[Piece]) -> list[Piece]:
        """New pieces first, then failed ones."""
        failed = {key for key, result in self.by_piece.items() if result.status == "failed"}
        left = [piece for piece in pieces if piece.key in failed or piece.key not in self.by_piece]
        return sorted(left, key=lambda piece: piece.key in failed)

    def data(self, key: str) -> dict[str, Any] | None:
        """What a piece answered; None where it has not."""
        result = self.by_piece.get(key)
        return result.data if result is not None and result.status == "done" else None

    def keep(self, piece: Piece, status: Status, *, seconds: float, problem: str, data: Mapping[str, Any]) -> Result:
        """Several threads may."""
        result = Result(
            piece=piece.key,
            status=status,
            data=dict(data),
            problem=problem,
            seconds=round(seconds, 1),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=self.commit,
            versions=self.versions,
        )
        with self._lock:
            append_line(json.dumps(asdict(result)), self.path)
            self.by_piece[piece.key] = result
        return result


def append_line(text: str, path: Path) -> None:
    """Add a line, in place of an unfinished last one, and see it onto the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _parsed(line: bytes) -> Result | None:
    """None for a line of another version of this tool."""
    try:
        return TypeAdapter(Result).validate_json(line)
    except ValidationError:
        return None


def installed_versions() -> dict[str, str]:
    packages = installed_packages(sys.path)
    return {name: packages[name] for name in DECIDING if name in packages}


def _commit() -> str:
    """This checkout's, e.g. `bac7d8a`, or `bac7d8a+` where files are changed; empty without git."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
