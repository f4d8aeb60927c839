"""Workspaces that DVC made, to damage."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.tools.verify.damaged import cached
from tests.tools.verify.made_up import make_workspace


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("made") / "a workspace")


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Path:
    """A moved copy to damage, in which nothing is linked."""
    return Path(shutil.copytree(made, tmp_path / "moved workspace"))


@pytest.fixture
def linked(workspace: Path) -> Path:
    """Workspace and cache are the same files: a bit that flips in one flips in the other."""
    for path in (workspace / "data").rglob("*"):
        if path.is_file() and "source" not in path.parts:
            same = cached(workspace, path)
            path.unlink()
            os.link(same, path)
    return workspace


@pytest.fixture
def unknown_to_dvc(workspace: Path) -> Path:
    shutil.rmtree(workspace / ".dvc")
    (workspace / "dvc.lock").unlink()
    return workspace
