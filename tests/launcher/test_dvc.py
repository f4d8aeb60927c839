"""The launcher under a real dvc: names from params.yaml, and the files that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.documents import write_yaml
from tests.launcher.small_checkout import commit, run, small_checkout

STAGE = """
import pathlib, sys

pathlib.Path("data/bases").mkdir(parents=True, exist_ok=True)
pathlib.Path("data/bases", sys.argv[1] + ".txt").write_text("made")
"""

PIPELINE = """
stages:
  base:
    foreach: [vlm, llm]
    do:
      cmd: exec docker/run base
      outs: ["data/bases/${item}.txt"]
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = small_checkout(tmp_path / "a workspace", pipeline=PIPELINE, base=STAGE)
    run(workspace, "git", "init", "--quiet")
    run(workspace, "dvc", "init", "--quiet")
    commit(workspace)
    return workspace


def dvc(workspace: Path, *args: str, code: int = 0, **environment: str) -> str:
    environment = {"DVC_SITE_CACHE_DIR": str(workspace / ".dvc/tmp/site"), **environment}
    return run(workspace, "dvc", *args, code=code, **environment)


def test_a_mistake_in_params_yaml_is_refused_by_its_path_before_a_stage_runs(workspace: Path) -> None:
    params = YAML(typ="safe").load(workspace / "params.yaml")
    params["recipes"]["x$(touch PWNED)"] = params["recipes"]["r1-llm-only"]
    params["profiles"]["tiny"]["datasets"]["visempar"]["reader"] = {"grup": "x"}
    write_yaml(params, workspace / "params.yaml")
    assert "recipes.'x$(touch PWNED)': expected a letter or digit, then" in dvc(
        workspace, "repro", "base@vlm", code=255
    )
    del params["recipes"]["x$(touch PWNED)"]
    write_yaml(params, workspace / "params.yaml")
    refused = dvc(workspace, "repro", "base@vlm", code=255)
    assert "profiles.tiny.datasets.visempar.reader.grup: unknown key" in refused
    assert not list(workspace.glob("PWNED*"))
    assert not (workspace / "data/bases/vlm.txt").exists()


def test_no_other_account_may_write_the_launchers_files_whatever_the_umask(workspace: Path) -> None:
    new = "find . -path ./.dvc -prune -o -newer dvc.yaml -perm -o+w ! -type l -print"
    command = ("bash", "-c", f"umask 000 && docker/run base vlm && {new}")
    assert run(workspace, *command, DVC_STAGE="base@vlm") == ""
    assert (workspace / "data/bases/vlm.txt").stat().st_mode & 0o020  # the group's rights are the person's choice
