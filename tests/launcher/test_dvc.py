"""The launcher under a real dvc: names from params.yaml, and the files that it makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests import ROOT
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


def test_hostile_names_run_no_code_and_remove_nothing(workspace: Path) -> None:
    """A recipe that a shell would run, and predictions that lead out of the checkout."""
    outside = workspace.parent / "outside.txt"
    outside.write_text("mine")
    params = YAML(typ="safe").load(workspace / "params.yaml")
    params["recipes"]["x$(touch PWNED)"] = params["recipes"]["r1-llm-only"]
    away = "/".join([*[".."] * 40, *outside.with_suffix("").parts[1:]])
    params["predictions"][away] = next(iter(params["predictions"].values()))
    write_yaml(params, workspace / "params.yaml")
    trains = PIPELINE.replace("[vlm, llm]", "${recipes}").replace("${item}", "${key}").replace("base", "train")
    (workspace / "dvc.yaml").write_text(trains)
    assert "should match pattern" in dvc(workspace, "repro", "--single-item", "train@x$(touch PWNED)", code=255)

    for name in ("dvc.yaml", "stages"):
        run(workspace, "cp", "--recursive", str(ROOT / name), ".")
    output = dvc(workspace, "repro", code=255)
    assert "should match pattern" in output
    assert re.findall(r"Running stage '(.*?)'", output)[-1] == "check"
    assert not list(workspace.glob("PWNED*"))
    assert outside.exists()


def test_no_other_account_may_write_the_launchers_files_whatever_the_umask(workspace: Path) -> None:
    new = "find . -path ./.dvc -prune -o -newer dvc.yaml -perm -o+w ! -type l -print"
    command = ("bash", "-c", f"umask 000 && docker/run base vlm && {new}")
    assert run(workspace, *command, DVC_STAGE="base@vlm") == ""
    assert (workspace / "data/bases/vlm.txt").stat().st_mode & 0o020  # the group's rights are the person's choice
