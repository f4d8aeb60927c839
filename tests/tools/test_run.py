"""Stages side by side through DVC and the launcher, on stages that a test writes itself."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

import tools.run
from stages.core.errors import UserError
from tests import ROOT
from tests.launcher.small_checkout import CALLER, copy_code, small_checkout
from tests.workspaces import Ended, Workspace, copy_folder, require_clean_end

pytestmark = pytest.mark.pipeline

PIPELINE = """
stages:
  base:
    cmd: exec docker/run base
    outs: [out/base]
  prepare:
    foreach: [a, b]
    do:
      cmd: exec docker/run prepare
      deps: [out/base]
      outs: ["out/prepare-${item}"]
  evaluate:
    foreach: [a]
    do:
      cmd: exec docker/run evaluate
      deps: ["out/prepare-${item}"]
      outs: ["out/evaluate-${item}"]
  compare:
    cmd: exec docker/run compare
    deps: [out/evaluate-a, out/prepare-b]
    outs: [out/compare]
"""

# Notes what happens to it, and follows orders/NAME.
STAGE = """
import os, signal, sys, time
from pathlib import Path

name = os.environ.get("DVC_STAGE", "-".join([Path(__file__).stem, *sys.argv[1:]])).replace("@", "-")
order = Path("orders", name)
order = order.read_text() if order.exists() else ""

def note(what):
    with open("notes", "a") as notes:
        print(name, what, file=notes)

def on_signal(number, frame):
    note(signal.Signals(number).name)
    global order
    if order == "stubborn":
        order = "wait"
    else:
        print(f"{name} is saved")
        sys.exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, on_signal)
note(f"starts with {os.environ.get('OMP_NUM_THREADS')}")
if order == "fail":
    print(f"the data of {name} is broken")
    sys.exit(3)
while order in ("wait", "stubborn"):
    time.sleep(0.02)
while order == "meet" and Path("notes").read_text().count("prepare") < 2:
    time.sleep(0.02)
Path("out").mkdir(exist_ok=True)
Path("out", name).write_text(name)
note("ends")
"""
NAMES = ["base", "prepare-a", "prepare-b", "evaluate-a", "compare"]


@pytest.fixture
def command() -> str:
    r"""The command that DVC starts a stage \1 by."""
    return r"docker/run \1"


without_launcher = pytest.mark.parametrize("command", [r"python stages/\1.py"])
"""For tests of what is run when: most of the time of a stage is the launcher's."""


@pytest.fixture
def workspace(tmp_path: Path, command: str) -> Workspace:
    """A pipeline that has not run yet."""
    kinds = dict.fromkeys(("base", "prepare", "evaluate", "compare"), STAGE)
    pipeline = re.sub(r"docker/run (\w+)", command, PIPELINE)
    folder = small_checkout(tmp_path / "a workspace", pipeline=pipeline, **kinds)
    copy_code(folder, "tools.run")
    for name, text in {".dvc/config": "[core]\n    no_scm = true\n", "orders/none": "", "notes": ""}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return Workspace(folder=folder, environment={**CALLER, "LANG": "C.UTF-8"})


def order(workspace: Workspace, **orders: str) -> None:
    for name, what in orders.items():
        (workspace.folder / "orders" / name.replace("_", "-")).write_text(what)


def notes(workspace: Workspace) -> list[str]:
    return (workspace.folder / "notes").read_text().splitlines()


def started(workspace: Workspace) -> list[str]:
    return [line.split()[0] for line in notes(workspace) if "starts" in line]


def wait_for(process: subprocess.Popen[bytes], workspace: Workspace, *wanted: str) -> None:
    while not set(wanted) <= {line.partition(" with")[0] for line in notes(workspace)}:
        assert process.poll() is None, notes(workspace)
        time.sleep(0.02)


def side_by_side(workspace: Workspace, *arguments: str) -> Ended:
    ended = workspace.python("-m", "tools.run", *arguments)
    require_clean_end(ended)
    return ended


def lock(workspace: Workspace) -> object:
    return YAML(typ="safe").load(workspace.folder / "dvc.lock")


@without_launcher
def test_side_by_side_leaves_what_a_serial_run_leaves_and_a_second_run_does_nothing(workspace: Workspace) -> None:
    serial = Workspace(folder=workspace.folder.with_name("serial"), environment=workspace.environment)
    copy_folder(workspace.folder, serial.folder)
    assert serial.dvc("repro").code == 0
    order(workspace, prepare_a="meet", prepare_b="meet")
    ran = side_by_side(workspace, "--jobs", "2")
    assert ran.code == 0, ran.output
    assert sorted(started(workspace)) == sorted(NAMES)
    happened = [line.partition(" with ")[0] for line in notes(workspace)]
    for before, after in (("base", "prepare-a"), ("prepare-a", "evaluate-a"), ("evaluate-a", "compare")):
        assert happened.index(f"{before} ends") < happened.index(f"{after} starts")
    for name in NAMES:
        assert (workspace.folder / "out" / name).read_bytes() == (serial.folder / "out" / name).read_bytes()
    assert lock(workspace) == lock(serial)
    for kind in ("base", *(f"prepare@{item}" for item in "ab"), "compare"):
        assert re.search(rf"^\d\d:\d\d:\d\d {kind} starts\n(.*\n)*\S+ {kind} done in \d+ s$", ran.output, re.MULTILINE)
    moved = Workspace(folder=workspace.folder.with_name("it was moved"), environment=workspace.environment)
    workspace.folder.rename(moved.folder)
    again = side_by_side(moved, "compare", "evaluate@a")
    assert (again.code, "5 up to date, 0 stages to run" in again.output) == (0, True), again.output
    forced = side_by_side(moved, "prepare@a", "--force", "--jobs", "1")
    assert forced.code == 0, forced.output
    assert started(moved)[len(NAMES) :] == ["base", "prepare-a"]


@without_launcher
def test_a_profile_is_written_into_params_yaml_before_its_stages_run(workspace: Workspace) -> None:
    params = workspace.folder / "params.yaml"
    before = params.read_text().splitlines()
    unknown = workspace.python("-m", "tools.run", "base", "--profile", "smollm")
    assert (unknown.code, params.read_text().splitlines()) == (1, before), unknown.output
    assert "profile" in unknown.output
    assert "smollm2-135m" in unknown.output
    assert side_by_side(workspace, "base", "--profile", "smollm2-135m").code == 0
    changed = [lines for lines in zip(before, params.read_text().splitlines(), strict=True) if len(set(lines)) > 1]
    assert changed == [("profile: tiny", "profile: smollm2-135m")]


@pytest.mark.parametrize("written", ['"profile": tiny', "profile:\n  tiny"])
def test_a_profile_that_is_written_in_another_form_stays(written: str, tmp_path: Path) -> None:
    (path := tmp_path / "params.yaml").write_text(
        text := (ROOT / "params.yaml").read_text().replace("\nprofile: tiny", f"\n{written}")
    )
    with pytest.raises(UserError, match="as a line of its own: profile: smollm2-135m"):
        tools.run.set_profile(path, "smollm2-135m")
    assert path.read_text() == text


@without_launcher
def test_only_stages_that_depend_on_a_failed_one_are_left_out(workspace: Workspace) -> None:
    order(workspace, prepare_b="fail")
    failed = side_by_side(workspace)
    assert failed.code == 255, "the code of `dvc repro`"
    assert sorted(started(workspace)) == ["base", "evaluate-a", "prepare-a", "prepare-b"]
    assert re.search(r"prepare@b FAILED after \d+ s; the end of .bakeoff/logs/prepare@b.log:", failed.output)
    assert "    the data of prepare-b is broken\n" in failed.output
    assert re.search(r"not started, as they depend on it: compare$", failed.output)
    order(workspace, prepare_b="")
    again = side_by_side(workspace)
    assert (again.code, "3 up to date, 2 stages to run" in again.output) == (0, True), again.output
    assert started(workspace)[4:] == ["prepare-b", "compare"]


def test_ctrl_c_reaches_each_running_stage_once_and_a_second_one_again(workspace: Workspace) -> None:
    order(workspace, prepare_a="wait", prepare_b="stubborn")

    def interrupt(process: subprocess.Popen[bytes]) -> None:
        wait_for(process, workspace, "prepare-a starts", "prepare-b starts")
        process.send_signal(signal.SIGINT)
        wait_for(process, workspace, "prepare-a SIGINT", "prepare-b SIGINT")
        time.sleep(2.5)  # a signal that comes sooner is the same request
        process.send_signal(signal.SIGTERM)

    ended = workspace.python("-m", "tools.run", "--jobs", "2", meanwhile=interrupt)
    require_clean_end(ended)
    assert ended.code == 130, ended.output
    *first, last = [line for line in notes(workspace) if "SIG" in line]
    assert (sorted(first), last) == (["prepare-a SIGINT", "prepare-b SIGINT"], "prepare-b SIGINT")
    assert re.search(r"prepare@a interrupted after \d+ s\n    prepare-a is saved\n", ended.output), ended.output
    assert set(started(workspace)) == {"base", "prepare-a", "prepare-b"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of a parent")
def test_killed_run_leaves_no_stage_and_no_other_run_starts_beside_one(workspace: Workspace) -> None:
    order(workspace, prepare_a="wait", prepare_b="wait")
    refused: list[str] = []
    orphans: list[psutil.Process] = []

    def kill(process: subprocess.Popen[bytes]) -> None:
        wait_for(process, workspace, "prepare-a starts", "prepare-b starts")
        command = [sys.executable, "-m", "tools.run", "base"]
        beside = subprocess.run(
            command, cwd=workspace.folder, env=dict(workspace.environment), capture_output=True, text=True, check=False
        )
        refused.append(f"{beside.returncode} {beside.stderr}")
        assert "`make run` is at work in this workspace already" in beside.stderr
        orphans.extend(psutil.Process(process.pid).children())
        process.kill()

    ended = workspace.python("-m", "tools.run", "--jobs", "2", meanwhile=kill)
    require_clean_end(ended)
    assert ended.code == -signal.SIGKILL
    assert refused[0].startswith("1 Error: ")
    assert {line for line in notes(workspace) if "SIG" in line} == {"prepare-a SIGTERM", "prepare-b SIGTERM"}
    _, left = psutil.wait_procs(orphans, timeout=60)  # for DVC one lives until init has reaped it
    assert (len(orphans), left) == (2, [])
    order(workspace, prepare_a="", prepare_b="")
    again = side_by_side(workspace, "prepare@a", "prepare@b")
    assert again.code == 0, again.output


def test_cores_are_shared_and_dvcs_refusal_is_shown(workspace: Workspace) -> None:
    plain = {name: value for name, value in workspace.environment.items() if name != "OMP_NUM_THREADS"}
    workspace = Workspace(folder=workspace.folder, environment=plain)
    assert side_by_side(workspace, "base", "--jobs", "999").code == 0
    assert notes(workspace)[0] == "base starts with 1"
    refused = side_by_side(workspace, "no-such")
    assert refused.code == 1
    assert re.search("Error: DVC refuses: .*no-such", refused.output, re.DOTALL)
    with (workspace.folder / "dvc.yaml").open("a") as pipeline:
        pipeline.write("  plan:\n    cmd: exec docker/run plan\n    deps: [data/prepared/mine, out]\n")
    refused = side_by_side(workspace, "plan")
    assert refused.code == 1
    assert "made by no stage of dvc.yaml:\n  data/prepared/mine, for plan\n" in refused.output


WAITING = """
import pathlib, time
print("step 1/9", flush=True)
while not pathlib.Path("seen").exists():
    time.sleep(0.02)
"""


def test_a_stage_that_takes_long_shows_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def say(line: str) -> None:
        if line.endswith("train: step 1/9"):
            Path("seen").touch()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tools.run, "REPORT_S", 0)
    monkeypatch.setattr(tools.run, "say", say)
    steps = {"train": tools.run.Step(frozenset())}
    assert tools.run.SideBySide(steps=steps, jobs=1, gpus=0, dvc=(sys.executable, "-c", WAITING)).run() == 0
