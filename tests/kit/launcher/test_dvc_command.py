"""The launcher under a real dvc: names from params.yaml, and what a failed experiment leaves."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.kit.launcher.dvc_command import params_left
from stages.kit.launcher.pipeline import item_of
from tests import ROOT
from tests.documents import write_yaml
from tests.kit.launcher.small_checkout import commit, copy_code, run, small_checkout

# It fails where the seed is 13, after DVC has removed what it made before.
STAGE = """
import pathlib, sys

if "seed: 13" in pathlib.Path("params.yaml").read_text():
    sys.exit("unlucky")
pathlib.Path("data/bases").mkdir(parents=True, exist_ok=True)
pathlib.Path("data/bases", sys.argv[1] + ".txt").write_text(str(pathlib.Path.cwd()))
"""

PIPELINE = """
stages:
  base:
    foreach: [vlm, llm]
    do:
      cmd: exec docker/run base
      params: [seed]
      outs: ["data/bases/${item}.txt"]
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = small_checkout(tmp_path / "a workspace", pipeline=PIPELINE, base=STAGE)
    copy_code(workspace, "stages.check")
    run(workspace, "git", "init", "--quiet")
    run(workspace, "dvc", "init", "--quiet")
    commit(workspace)
    return workspace


def dvc(workspace: Path, *args: str, code: int = 0, **environment: str) -> str:
    environment = {"DVC_SITE_CACHE_DIR": str(workspace / ".dvc/tmp/site"), **environment}
    return run(workspace, "dvc", *args, code=code, **environment)


def test_names_from_a_stranger_run_no_code_and_remove_nothing(workspace: Path) -> None:
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

    shutil.copy(ROOT / "dvc.yaml", workspace)
    said = dvc(workspace, "repro", code=255)
    assert "should match pattern" in said
    assert re.findall(r"Running stage '(.*?)'", said)[-1] == "check"
    assert not list(workspace.glob("PWNED*"))
    assert outside.exists()


def test_the_item_is_what_dvc_addresses_wherever_it_was_called() -> None:
    assert item_of("train@r1") == item_of("../dvc.yaml:train@r1") == ("r1",)
    assert item_of("check") == item_of("../a@b/dvc.yaml:check") == ()


def test_dvc_names_the_stages_that_the_launcher_runs_and_each_names_its_engine(workspace: Path) -> None:
    nowhere = "unix:///nowhere"
    said = dvc(workspace, "repro", BAKEOFF_ENGINE="auto", DOCKER_HOST=nowhere, CONTAINER_HOST=nowhere)
    assert {path.name for path in (workspace / "data/bases").glob("*.txt")} == {"vlm.txt", "llm.txt"}
    assert said.count("Running stage") == 2
    assert said.count("launcher: engine process") == 2


def test_a_failed_experiment_names_the_command_that_brings_everything_back(workspace: Path) -> None:
    dvc(workspace, "repro")
    commit(workspace)
    before = (workspace / "params.yaml").read_bytes()

    said = dvc(workspace, "exp", "run", "-S", "seed=13", code=255)
    assert (workspace / "params.yaml").read_bytes() != before
    failed = re.findall(r"failed to reproduce '(.*?)'", said)[0]
    assert not (workspace / f"data/bases/{failed.partition('@')[2]}.txt").exists()
    command = re.findall(r"Bring it back with: (.*)", said)[0]
    run(workspace, "bash", "-c", command)
    assert (workspace / "params.yaml").read_bytes() == before
    assert len(list((workspace / "data/bases").glob("*.txt"))) == 2
    assert run(workspace, "git", "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("arguments", "environment", "edited", "found"),
    [
        (("dvc", "exp", "run", "-S", "a=1"), {}, True, True),
        (("dvc", "exp", "run", "-Sa=1"), {}, True, True),
        (("dvc", "exp", "run", "--set-param=a=1"), {}, True, True),
        (("dvc", "exp", "run", "-S", "a=1"), {}, False, False),
        (("dvc", "exp", "run"), {}, True, False),  # a person has edited the file
        (("dvc", "exp", "run", "--temp", "-S", "a=1"), {"DVC_ROOT": "/elsewhere"}, True, False),  # in a clone
        (("dvc", "repro"), {"DVC_EXP_BASELINE_REV": None}, True, False),
    ],
)
def test_only_an_experiment_that_changed_the_file_itself_is_told_how_to_undo_it(
    arguments: tuple[str, ...], environment: dict[str, str | None], edited: bool, found: bool, tmp_path: Path
) -> None:
    (tmp_path / "params.yaml").write_text("a: 0")
    (tmp_path / "dvc.lock").write_text("stages:\n  base@vlm:\n    cmd: x\n")
    commit(tmp_path)
    (tmp_path / "params.yaml").write_text(f"a: {int(edited)}")
    caller = {"DVC_EXP_BASELINE_REV": "c0ffee", "DVC_ROOT": str(tmp_path), "DVC_STAGE": "base@vlm", **environment}
    set_ones = {name: value for name, value in caller.items() if value is not None}
    left = params_left(arguments, set_ones, tmp_path)
    assert (left is not None) is found
    if left:
        assert "git checkout params.yaml && dvc checkout base@vlm\n" in left
        never_ran = params_left(arguments, {**set_ones, "DVC_STAGE": "base@vl"}, tmp_path)
        assert never_ran is not None
        assert "with: git checkout params.yaml\n" in never_ran


def test_nobody_else_may_write_what_the_launcher_makes_whatever_the_umask(workspace: Path) -> None:
    new = "find . -path ./.dvc -prune -o -newer dvc.yaml -perm -o+w ! -type l -print"
    command = ("bash", "-c", f"umask 000 && docker/run base vlm && {new}")
    assert run(workspace, *command, DVC_STAGE="base@vlm") == ""
    assert (workspace / "data/bases/vlm.txt").stat().st_mode & 0o020  # the group's rights are the person's choice


def test_code_and_folders_that_everybody_may_write_to_are_named(workspace: Path) -> None:
    (workspace / ".bakeoff").mkdir(exist_ok=True)
    for path, mode in (("docker", 0o777), (".bakeoff", 0o1777), ("stages/base.py", 0o666), ("data", 0o775)):
        (workspace / path).chmod(mode)
    lines = run(workspace, "docker/run", "base", "vlm").splitlines()
    said = "launcher: every account of this machine can change what runs here; end that with: chmod"
    places = (f"o-w '{workspace}/docker'", f"o-w '{workspace}/.bakeoff'", f"-R o-w '{workspace}/stages'")
    assert lines == [f"{said} {place}" for place in places]
