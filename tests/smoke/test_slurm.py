"""Stages as steps of a real Slurm: `.ci/with-slurm .venv/bin/python -m pytest -m engine tests/smoke/test_slurm.py`.

The stage runs until there is a file `go`, so that each moment can be waited for.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from stages.core.lineage import folder_digest
from stages.launcher.gpus import Gpu
from tests import ROOT
from tests.documents import write_yaml
from tests.launcher.small_checkout import (
    CALLER,
    Command,
    commit,
    notes,
    run,
    set_gpus,
    small_checkout,
    wait_until,
)
from tests.stage_runs import ANSWER_TOKENS, small_params
from tests.workspaces import Meanwhile, Workspace, clone_checkout, copy_folder, workspace_in

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "SLURM_CONF" not in os.environ or not shutil.which("srun"),
        reason="no Slurm is up; start one with .ci/with-slurm COMMAND",
    ),
]

STAGE = """
import os, pathlib, signal, sys, time

def note(text):
    with open("notes", "a") as file:
        print(text, file=file)

saving = False

def save(number, frame):
    global saving
    if not saving:  # Slurm signals the launcher too, which passes it on: it comes twice, as one request to end
        saving = True
        note(f"saves on {signal.Signals(number).name}")
        sys.exit(128 + number)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
note(f"begin {os.environ.get('HF_TOKEN')} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
print("the stage speaks", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
if os.path.exists("fail"):
    sys.exit(7)
pathlib.Path("data/trained").mkdir()
note("end")
"""
PIPELINE = """
stages:
  train:
    cmd: exec docker/run train r1-llm-only
    params: [seed]
    outs: [data/trained, data/provenance/train.json]
"""
STEPS = {"BAKEOFF_PLACE": "slurm", "SLURM_CONF": os.environ.get("SLURM_CONF", "")}
RECIPE = "r1-llm-only"
ENVIRONMENT: dict[str, Any] = CALLER | STEPS | {"HF_TOKEN": "hf_smokesmokesmokesmokesmokesmokesmoke"}


def jobs() -> dict[str, str]:
    """State of each job of this cluster that has not ended, by its number."""
    lines = subprocess.run(["squeue", "--noheader", "--format=%i %T"], check=True, capture_output=True, text=True)
    return dict(line.split() for line in lines.stdout.splitlines())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test leaves no job, whatever it does. In place of the fixture that looks for containers."""
    yield
    for _ in range(300):  # the job of a stage that has just ended takes a moment to end too
        if not (left := jobs()):
            return
        time.sleep(0.1)
    subprocess.run(["scancel", *left], check=True)
    wait_until(lambda: jobs() == {})
    pytest.fail(f"left behind: {left}")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """With one stage, train, which DVC runs."""
    workspace = small_checkout(tmp_path / "a workspace", pipeline=PIPELINE, train=STAGE)
    set_params(workspace)
    with (workspace / ".gitignore").open("a") as ignored:
        ignored.write("/go\n/fail\n")
    run(workspace, "git", "init", "--quiet")
    run(workspace, "dvc", "init", "--quiet")
    commit(workspace)
    return workspace


def set_params(workspace: Path, *options: str, **changes: Any) -> None:
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    own = ["--mem=1G", *options]
    raw |= {"slurm": {"cpu": own, "gpu": own, "save_seconds": 10}, **changes}
    write_yaml(raw, workspace / "params.yaml")


def repro(workspace: Path) -> Command:
    """`dvc repro train`, typed in the workspace."""
    return Command(workspace, "dvc", "repro", "train", env=ENVIRONMENT)


def launcher_of(command: Command) -> psutil.Process:
    (launcher,) = psutil.Process(command.process.pid).children()
    return launcher


def go(workspace: Path) -> None:
    (workspace / "go").touch()


def occupied(workspace: Path) -> str:
    """The number of a job that has both nodes."""
    sleep = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300"]
    number = subprocess.run(sleep, check=True, capture_output=True, text=True).stdout.strip()
    wait_until(lambda: jobs()[number] == "RUNNING")
    return number


def test_step_shows_its_output_and_dvc_stores_its_results(workspace: Path) -> None:
    command = repro(workspace)
    command.until("the stage speaks")
    ((number, state),) = jobs().items()
    assert state == "RUNNING"
    shown = subprocess.run(["scontrol", "show", "job", number], check=True, capture_output=True, text=True).stdout
    assert "hf_smoke" not in shown + " ".join(launcher_of(command).cmdline())
    go(workspace)
    assert command.ended() == 0, command.output
    assert notes(workspace) == ["begin None None", "end"]
    assert '"engine": "process"' in (workspace / "data/provenance/train.json").read_text()
    assert "up to date" in run(workspace, "dvc", "status", "train")


def test_stage_fails_with_its_own_code_and_an_impossible_request_with_slurms_reason(workspace: Path) -> None:
    go(workspace)
    (workspace / "fail").touch()
    run(workspace, "docker/run", "train", "r1-llm-only", code=7, **ENVIRONMENT)
    set_params(workspace, "--partition=nowhere")
    output = run(workspace, "docker/run", "train", "r1-llm-only", code=1, **ENVIRONMENT)
    assert "Invalid partition name" in output


def test_stage_computes_on_the_gpu_that_slurm_assigned(workspace: Path) -> None:
    """Slurm's first GPU of a node is 0 whoever else has leased a GPU 0; the driver knows it by its UUID."""
    set_params(workspace, profile="qwen2-vl-2b", gpu=24)
    gpus = (Gpu(index=index, uuid=f"GPU-{index}", name="H100", used_bytes=0, total_bytes=2**36) for index in (0, 1))
    named = set_gpus(workspace, *gpus)["FAKE_NVML"]
    fake = workspace / "pynvml.py"
    fake.write_text(fake.read_text().replace('os.environ["FAKE_NVML"]', repr(named)))
    go(workspace)
    run(workspace, "docker/run", "train", "r1-llm-only", **ENVIRONMENT)
    assert notes(workspace) == ["begin None GPU-0", "end"]


@pytest.mark.parametrize("how", ["Ctrl-C", "closed terminal", "dvc killed"])
def test_stage_that_was_asked_to_end_saves_and_the_same_command_resumes(workspace: Path, how: str) -> None:
    command = repro(workspace)
    command.until("the stage speaks")
    if how == "dvc killed":
        command.process.kill()
    else:
        os.killpg(command.process.pid, signal.SIGINT if how == "Ctrl-C" else signal.SIGHUP)
    assert command.ended() != 0
    wait_until(lambda: notes(workspace) == ["begin None None", "saves on SIGUSR1"])
    wait_until(lambda: jobs() == {})
    go(workspace)
    run(workspace, "dvc", "repro", "train", **ENVIRONMENT)
    assert notes(workspace)[2:] == ["begin None None", "end"]


@pytest.mark.parametrize("what", ["launcher", "srun"])
def test_no_step_is_left_by_a_killed_launcher(workspace: Path, what: str) -> None:
    command = repro(workspace)
    command.until("the stage speaks")
    launcher = launcher_of(command)
    (launcher if what == "launcher" else launcher.children()[0]).kill()
    assert command.ended() != 0
    wait_until(lambda: jobs() == {})
    assert "end" not in notes(workspace)


def test_ctrl_c_withdraws_a_waiting_request(workspace: Path) -> None:
    before = occupied(workspace)
    waiting = repro(workspace)
    waiting.until("queued and waiting for resources")
    launcher_of(waiting).send_signal(signal.SIGINT)
    assert waiting.ended() != 0
    assert set(jobs()) == {before}
    subprocess.run(["scancel", before], check=True)


def test_stage_saves_before_its_time_limit(workspace: Path) -> None:
    """Slurm's own limit of a minute, and its signal 20 to 50 seconds after the start."""
    set_params(workspace, "--partition=short", "--time=1")
    command = repro(workspace)
    assert command.ended() != 0
    assert notes(workspace) == ["begin None None", "saves on SIGUSR1"]


def test_stages_are_steps_of_the_allocation_that_they_are_started_in(workspace: Path) -> None:
    """A script for sbatch, as docs/servers.md shows it."""
    log = workspace.with_name("log")
    sbatch = ["sbatch", "--parsable", "--nodes=1", "--cpus-per-task=8", "--mem=2G", f"--output={log}"]
    number = subprocess.run(
        [*sbatch, "--wrap", "dvc repro train"],
        cwd=workspace,
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    wait_until(lambda: log.exists() and "the stage speaks" in log.read_text())
    assert list(jobs()) == [number]
    steps = subprocess.run(["squeue", "--steps", "--noheader"], check=True, capture_output=True, text=True).stdout
    assert f"{number}.0" in steps
    go(workspace)
    wait_until(lambda: jobs() == {})
    assert notes(workspace) == ["begin None None", "end"], log.read_text()
    assert "up to date" in run(workspace, "dvc", "status", "train")


def ask_to_end(workspace: Workspace) -> Meanwhile:
    """Send Slurm's signal for the end of the time while the training can save, and before it goes on."""

    def meanwhile(process: "subprocess.Popen[bytes]") -> None:
        # torchrun and a worker on each node
        while len(training := training_of(workspace)) < 4 or not all_have_it_in("SigCgt", training):
            assert process.poll() is None
            time.sleep(0.02)
        for each in training:
            each.suspend()
        (number,) = (number for number, state in jobs().items() if state == "RUNNING")
        subprocess.run(["scancel", "--signal=USR1", number], check=True)
        while not all_have_it_in("ShdPnd", training):
            time.sleep(0.02)
        for each in training:
            each.resume()

    return meanwhile


def training_of(workspace: Workspace) -> list[psutil.Process]:
    """The processes of the training in a workspace, launchers left out."""
    found = []
    for process in workspace.processes():
        with suppress(psutil.Error):  # it has just ended
            found += [process] if "stages.train" in process.cmdline() else []
    return found


def all_have_it_in(mask: str, processes: list[psutil.Process]) -> bool:
    """Whether SIGUSR1 is in a mask of all of them (proc(5)): SigCgt if it is handled, ShdPnd if it waits."""
    with suppress(OSError):  # one has just ended
        texts = [Path(f"/proc/{each.pid}/status").read_text() for each in processes]
        masks = [int(text.partition(f"{mask}:")[2].split()[0], 16) for text in texts]
        return all(each & 1 << (signal.SIGUSR1 - 1) for each in masks)
    return False


@pytest.mark.timeout(2400)
def test_a_training_over_two_nodes_leaves_the_bytes_of_two_processes_also_if_it_was_interrupted(tmp_path: Path) -> None:
    """Both nodes are this machine; its name may be known by an address of a network card."""
    prepared = workspace_in(tmp_path / "prepared")
    clone_checkout(prepared.folder)
    raw = small_params(root="", max_new_tokens=ANSWER_TOKENS)
    raw["checkpoints"].update(every_minutes=None, every_steps=2)
    raw["recipes"][RECIPE]["epochs"] = 2
    write_yaml(raw, prepared.folder / "params.yaml")
    inputs = prepared.dvc("repro", "base@vlm", "prepare@nutrition-tables")
    assert inputs.code == 0, inputs.output
    trained = {}
    for where, device in (("two nodes", {"nodes": 2}), ("two processes", {"count": 2})):
        workspace = workspace_in(tmp_path / where)
        copy_folder(prepared.folder, workspace.folder)
        raw["profiles"][raw["profile"]]["device"] = {"kind": "cpu", **device}
        raw["profiles"][raw["profile"]]["memory"]["placement"] = "ddp"
        write_yaml(raw, workspace.folder / "params.yaml")
        if where == "two nodes":
            workspace = replace(workspace, environment={**workspace.environment, **STEPS, "GLOO_SOCKET_IFNAME": "lo"})
            assert workspace.dvc("repro", f"train@{RECIPE}", meanwhile=ask_to_end(workspace)).code != 0
        ended = workspace.dvc("repro", f"train@{RECIPE}")
        assert ended.code == 0, ended.output
        assert ("resuming from step" in ended.output) == (where == "two nodes")
        run_dir = workspace.folder / "data/runs" / RECIPE
        trained[where] = folder_digest(run_dir / "trained"), (run_dir / "training/trace.csv").read_bytes()
    assert trained["two nodes"] == trained["two processes"]
