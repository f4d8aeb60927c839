"""Two runs that are compared: here of a pipeline of two stages that only wait, and write."""

import os
import sys
from pathlib import Path

import pytest

from tests.faults.judge import Wrong
from tests.faults.repeat import run_killed, run_undisturbed
from tests.faults.workspaces import CannotRun, Workspace

STAGE = """
import sys, time
from pathlib import Path
name = sys.argv[1]
with Path("starts").open("a") as file:
    file.write(f"{name}\\n")
time.sleep(2)
Path("data", name).write_text(name)
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    folder = tmp_path / "workspace"
    command = f"exec {sys.executable} -m stages.train"
    stages = [
        f"  {name}:\n    cmd: {command} {name}\n    outs: [data/{name}]\n    deps: [{dep}]\n"
        for name, dep in {"one": "stages/__init__.py", "two": "data/one"}.items()
    ]
    files = {
        ".dvc/config": "[core]\n    no_scm = true\n",
        "dvc.yaml": f"stages:\n{''.join(stages)}",
        "stages/__init__.py": "",
        "stages/train.py": STAGE,
        "data/.gitignore": "",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    own = {"DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_NO_ANALYTICS": "1", "PYTHON": sys.executable}
    return Workspace(folder=folder, environment={"PATH": os.environ["PATH"], **own}, limit_s=60)


def starts(workspace: Workspace) -> list[str]:
    return (workspace.folder / "starts").read_text().split()


def test_the_stages_of_an_undisturbed_run_are_seen_in_their_order(workspace: Workspace) -> None:
    seconds = run_undisturbed(workspace, "two")
    assert list(seconds) == ["train one", "train two"]
    assert all(each > 0 for each in seconds.values())
    assert starts(workspace) == ["one", "two"]


def test_all_is_killed_in_the_stage_that_was_drawn_and_the_target_comes_about(workspace: Workspace) -> None:
    said: list[str] = []
    moments = [("train one", 0.1), ("train two", 0.5), ("train two", 1e9)]
    run_killed(workspace, "two", moments, said.append)
    # The third time there is no later stage to be killed in either.
    assert starts(workspace) == ["one", "one", "two", "two"]
    assert ["never came" in line for line in said] == [False, False, True, False]
    assert (workspace.folder / "data/two").read_text() == "two"
    assert not list(workspace.processes())


def test_a_pipeline_that_fails_is_no_repetition(workspace: Workspace) -> None:
    (workspace.folder / "stages/train.py").write_text("raise SystemExit(3)")
    with pytest.raises(CannotRun, match="itself fails"):
        run_undisturbed(workspace, "two")
    with pytest.raises(Wrong, match="ended with"):
        run_killed(workspace, "two", [], lambda _: None)
