"""Damage to a workspace, and what `make verify` finds of it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.tools.verify.made_up import run
from tools.verify.__main__ import main
from tools.verify.findings import RESTORE, Finding
from tools.verify.verify import verify

TRAINED, MERGED, CERTIFICATE = (f"data/runs/r1/{name}" for name in ("trained", "merged", "merge.json"))
ADAPTER = f"{TRAINED}/adapter/adapter_model.safetensors"
RECORD = "data/provenance/detection/train@r1.json"
SOURCE = "data/source/config.json"
TRAIN_AGAIN = "dvc repro -f -s train@r1"


def cached(workspace: Path, path: Path | str) -> Path:
    digest = hashlib.md5((workspace / path).read_bytes(), usedforsecurity=False).hexdigest()
    return workspace / ".dvc/cache/files/md5" / digest[:2] / digest[2:]


def flip(path: Path, position: int = -1) -> None:
    """As an ageing disk does: size and time stay the same."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def found(workspace: Path) -> dict[str, Finding]:
    """By path, in their order."""
    return {finding.path: finding for finding in verify(workspace).in_order()}


def only_finding(workspace: Path) -> tuple[str, str, str]:
    """(path, problems, the command)."""
    (finding,) = verify(workspace).in_order()
    return finding.path, "; ".join(finding.problems), finding.fix


def fix(workspace: Path, command: str) -> None:
    """Follow the command to the letter, and look again."""
    run(workspace, command.replace(RESTORE, f"{sys.executable} -m tools.verify --restore"))
    assert found(workspace) == {}


def command_line(workspace: Path, *args: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        patch.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards
        return CliRunner().invoke(main, args)
