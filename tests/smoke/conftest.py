"""A workspace in which stages run in real containers, and a second one for stages that misbehave.

ENGINE chooses docker, podman or apptainer, else it is the first that there is. Its image of this checkout has to be
there: `make smoke` sees to it.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.core.params import load_params
from stages.launcher.engines import CONTAINER_ENGINES
from stages.planning.resolve import resolve_plan
from tests.documents import write_yaml
from tests.launcher.small_checkout import Command, commit, run, wait_until
from tests.stage_runs import ANSWER_TOKENS, small_params
from tests.workspaces import clone_checkout

ENGINE = os.environ.get("ENGINE") or next(filter(shutil.which, CONTAINER_ENGINES), "docker")

COMMAND = ("docker/run", "train", "r1-llm-only")
SECRETS = {"HF_TOKEN": "hf_smokesmokesmokesmokesmokesmokesmoke", "AWS_SECRET_ACCESS_KEY": "awssmokesmokesmokesmoke"}


def client(*args: str) -> str:
    """The output of the engine's client."""
    return subprocess.run([ENGINE, *args], check=True, capture_output=True, text=True).stdout.strip()


def containers(below: Path) -> list[str]:
    """The stages' containers, running or not, of workspaces below a folder: the machine may have others."""
    if ENGINE == "apptainer":  # it keeps no list: their first processes, to which their workspaces are mounted
        return [str(process.pid) for process in psutil.process_iter() if is_first_process(process, below)]
    listed = client("ps", "--all", "--format", "{{.ID}} {{.Labels}}").splitlines()
    return [line.split(" ", 1)[0] for line in listed if f"bakeoff.workspace={below}" in line.replace(":", "=")]


def is_first_process(process: psutil.Process, below: Path) -> bool:
    """Whether it is the first process of a container with a workspace below a folder."""
    with suppress(psutil.Error, OSError):
        mounted = Path(f"/proc/{process.pid}/mountinfo").read_text(encoding="utf-8")
        return process.cmdline()[1:3] == ["-m", "stages.launcher.inside"] and f" {below}" in mounted
    return False


def environment(**more: str) -> dict[str, Any]:
    """The environment of a person with secrets, with this test's Python environment activated."""
    dropped = ("PYTHONPATH", "DVC_ROOT", "DVC_STAGE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    return {
        **kept,
        **SECRETS,
        "PATH": path,
        "VIRTUAL_ENV": sys.prefix,
        "BAKEOFF_ENGINE": ENGINE,
        "DVC_NO_ANALYTICS": "1",
        **more,
    }


def dvc(workspace: Path, *args: str, **more: str) -> str:
    """Runs dvc to its end; the test fails with the output if it fails."""
    return run(workspace, sys.executable, "-m", "dvc", *args, **environment(**more))


def train(workspace: Path, code: str, *before: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A train stage of this code, in a container. before: a command that starts the launcher."""
    (workspace / "stages/train.py").write_text(code)
    return subprocess.run(
        [*before, *COMMAND], cwd=workspace, env=environment(**more), capture_output=True, text=True, check=False
    )


def copy_of_checkout(place: Path) -> Path:
    """A clone of this checkout, uncommitted changes included, with less of everything; all of it is committed."""
    clone_checkout(place)
    write_yaml(small_params(root="", max_new_tokens=ANSWER_TOKENS), place / "params.yaml")
    (place / "dvc.lock").unlink(missing_ok=True)
    commit(place)
    return place


EVALUATED = ("evaluate@r3-two-stage", "baseline@base-vlm")
"""Stages of `finished`. With all before them and a comparison, they are every kind of stage for images."""


@pytest.fixture(scope="session")
def on_the_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """`dvc repro` of these recipes as processes of this machine, in a workspace of its own. It is still at work."""
    workspace = copy_of_checkout(tmp_path_factory.mktemp("smoke") / "on the host")
    command = (sys.executable, "-m", "dvc", "repro", EVALUATED[0])
    running = Command(workspace, *command, env=environment(BAKEOFF_ENGINE="process", OMP_NUM_THREADS="2"))
    yield running
    with suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def finished(on_the_host: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace after all stages of r2 and r3 ran in containers, two at once. Not to be changed."""
    workspace = copy_of_checkout(tmp_path_factory.mktemp("smoke") / "a workspace")
    run(workspace, sys.executable, "-m", "tools.run", *EVALUATED, "--jobs", "2", **environment())
    dvc(workspace, "repro", "--single-item", "compare@detection")
    return workspace


@pytest.fixture(scope="session")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a train stage that each test replaces."""
    workspace = copy_of_checkout(tmp_path_factory.mktemp("smoke") / "playground")
    for path in ("data/bases/vlm/config.json", "data/prepared/nutrition-tables/train.parquet"):
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text("{}")
    plan = resolve_plan(load_params(workspace / "params.yaml"), "r1-llm-only", train_samples=16)
    plan.write(workspace / "data/runs/r1-llm-only/plan.yaml")
    return workspace


@pytest.fixture
def limit_memory(tmp_path: Path) -> Iterator[Callable[[str], object]]:
    """Gives a running container 256 MB. Apptainer, which has no such limit, as Slurm would: by a cgroup."""
    if ENGINE != "apptainer":
        yield lambda container: client("update", "--memory", "256m", "--memory-swap", "256m", container)
        return
    root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not root.exists():
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
    if not os.access(root, os.W_OK):
        pytest.skip("memory is limited by cgroups, which only root can make")
    group = root / f"bakeoff-{tmp_path.name}"

    def limit_memory(container: str) -> None:
        group.mkdir()
        (group / limit).write_text("256M")
        first = psutil.Process(int(container))
        for process in (first, *first.children(recursive=True)):
            (group / "cgroup.procs").write_text(str(process.pid))

    yield limit_memory
    group.rmdir()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every test leaves no container, whatever it does."""
    yield
    wait_until(lambda: containers(tmp_path_factory.getbasetemp()) == [])
