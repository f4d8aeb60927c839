"""What a workspace is made of, and that every command in it comes to an end."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

from tools.faults import workspaces
from tools.faults.workspaces import Workspace, clone_checkout, make_environment, tiny_params, workspace_in

SLEEP = ["-c", "import time; time.sleep(600)"]


def test_what_hangs_is_ended_whoever_waits_for_it_and_whatever_else_it_was_given(tmp_path: Path) -> None:
    workspace = Workspace(folder=tmp_path, environment={"PYTHON": sys.executable}, limit_s=1)
    codes = []

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        other = workspace.start([sys.executable, *SLEEP], subprocess.DEVNULL)
        codes.extend([process.wait(), other.wait()])

    ended = workspace.run(*SLEEP, meanwhile=meanwhile)
    assert ended.code is None
    assert codes == [-9, -9]
    assert workspace.run("-c", "raise SystemExit(3)").code == 3


def test_a_process_that_has_ended_meanwhile_was_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, *SLEEP])
    seen = psutil.Process(process.pid)
    process.kill()
    process.wait()
    monkeypatch.setattr(Workspace, "processes", lambda _: iter([seen]))
    assert Workspace(folder=tmp_path, environment={}).wait_for_the_rest(0) == ()


def test_a_clone_holds_what_the_checkout_holds_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.setattr(workspaces, "ROOT", checkout)

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *arguments], cwd=checkout, check=True)

    git("init", "--quiet")
    for name in ("same", "changed", "staged", "moved", "removed", "unstaged"):
        (checkout / name).write_text(name)
    (checkout / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    for name in ("changed", "staged", "added", "untracked", "ignored"):
        (checkout / name).write_text("now")
    git("add", "staged", "added")
    git("mv", "moved", "to")
    git("rm", "--quiet", "removed")
    (checkout / "unstaged").unlink()
    clone_checkout(tmp_path / "clone")
    held = {path.name: path.read_text() for path in (tmp_path / "clone").iterdir() if path.is_file()}
    now = dict.fromkeys(("changed", "staged", "added", "untracked"), "now")
    assert held == {".gitignore": "ignored\n", "same": "same", "to": "moved", **now}


def test_dvc_heeds_nothing_that_a_person_has_set_for_all_their_clones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in {
        "home/.config/dvc/config": "[cache]\n    dir = /shared\n",
        "workspace/.dvc/config": "[core]\n    no_scm = true\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    workspace = workspace_in(tmp_path / "workspace", make_environment(tmp_path))
    asked = workspace.dvc("cache", "dir")
    assert asked.code == 0
    assert asked.said.split()[-1] == str(tmp_path / "workspace/.dvc/cache")


def test_a_workspace_is_of_the_tiny_profile_and_nobody_is_told(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("profile: full  # of ours\ntracking:\n  wandb: true\nkept: 1\n")
    with tiny_params(tmp_path) as params:
        params["kept"] = 2
    written = YAML(typ="safe").load(tmp_path / "params.yaml")
    assert written == {"profile": "tiny", "tracking": {"wandb": False}, "kept": 2}
