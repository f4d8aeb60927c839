"""Kills at random moments of a pipeline: the same command, typed again, ends with the same bytes.

KILLS=20 .venv/bin/python -m pytest -n 0 -s tests/test_kills.py     so many of each recipe, in about half an hour
"""

import os
import random
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from stages.launcher.pipeline import declared_stages
from tests.workspaces import (
    Meanwhile,
    Workspace,
    build_reference,
    chain_of,
    copy_folder,
    require_clean_end,
    require_same_end,
    workspace_in,
)

KILLS = int(os.environ.get("KILLS", "0"))
LATEST_S = float(os.environ.get("LATEST_S", "15"))
"""A kill comes within this time: about what a stage takes."""

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.skipif(KILLS == 0, reason="takes half an hour: KILLS=20"),
    pytest.mark.timeout(0),
]


def kill(workspace: Workspace, draw: random.Random) -> Meanwhile:
    """End all processes at once, as a power failure does, or one of them, after a random time."""
    delay, everything = draw.uniform(0, LATEST_S), draw.random() < 0.5

    def meanwhile(process: "subprocess.Popen[bytes]") -> None:
        until = time.monotonic() + delay
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.01)
        if everything:
            workspace.kill_all()
        elif running := list(workspace.processes()):
            with suppress(psutil.NoSuchProcess):
                draw.choice(running).kill()

    return meanwhile


def forget_damaged_lock(workspace: Workspace) -> None:
    """Remove the file that a kill left empty, as docs/memory.md says: DVC itself does not recover from that."""
    path = workspace.folder / ".dvc/tmp/rwlock"
    if path.is_file() and not path.read_bytes():
        path.unlink()


@pytest.mark.parametrize("recipe", ["r1-llm-only", "amr-baseline"])
def test_a_stage_that_was_killed_ends_with_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    reference, draw, kills = build_reference(tmp_path / "reference", recipe), random.Random(recipe), 0
    written = {stage.name: stage.written for stage in declared_stages(reference / "finished")}
    stages = chain_of(recipe)[1:]
    states = [*(reference / "before" / stage for stage in stages), reference / "finished"]
    after = dict(zip(stages, states[1:], strict=True))
    while kills < KILLS:
        stage = draw.choice([*stages, *[f"train@{recipe}"] * 3])
        workspace = workspace_in(tmp_path / "workspace")
        copy_folder(reference / "before" / stage, workspace.folder)
        for _ in range(5):
            forget_damaged_lock(workspace)
            killed = workspace.dvc("repro", stage, meanwhile=kill(workspace, draw))
            if killed.code == 0:
                break
            kills += 1
            print(f"{recipe}: kill {kills}, in {stage}", flush=True)
        forget_damaged_lock(workspace)
        ended = workspace.dvc("repro", stage)
        require_clean_end(ended)
        assert ended.code == 0, killed.output + ended.output
        require_same_end(workspace.folder, after[stage], written[stage])
        assert workspace.dvc("status", "-q", stage).code == 0
        shutil.rmtree(workspace.folder)
        shutil.rmtree(workspace.folder.with_name("workspace.tmp"))
