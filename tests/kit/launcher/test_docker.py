"""The engines docker and podman, with a client that notes its arguments. The real ones: tests/smoke."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from stages.core.errors import UserError
from stages.core.provenance import Machine
from stages.core.signals import ENDING
from stages.kit.launcher import inside
from stages.kit.launcher.container import NotUsable
from stages.kit.launcher.docker import ContainerEngine
from stages.kit.launcher.engines import CONTAINER_ENGINES, choose_engine
from stages.kit.launcher.images import image_reference
from stages.kit.launcher.pipeline import declared_stages, stage_of_command
from stages.kit.launcher.process import Ended, ProcessEngine, StageRun, this_machine
from tests import ROOT
from tests.kit.launcher.small_checkout import small_checkout

PLAN = Path("data/runs/r1-llm-only/plan.yaml")

# Responds like docker and podman. `run` notes its arguments, writes the output FAKE_WRITES, and waits for a `kill` if
# FAKE_WAITS is set.
CLIENT = f"""#!{sys.executable}
import json, os, pathlib, re, sys, time

here = pathlib.Path(__file__).parent
with (here / "asked").open("a") as asked:
    print(json.dumps(sys.argv), file=asked)
error = os.environ.get("FAKE_ERROR")
if sys.argv[1:3] == ["image", "inspect"]:
    sys.exit(error) if error else print("sha256:0123")
if sys.argv[1] == "version" and error and "No such image" not in error:
    sys.exit(error)
if sys.argv[1] == "info":
    print(os.environ.get("FAKE_SECURITY", "[name=seccomp]"))
if sys.argv[1] == "kill":
    if (here / "killed").exists():
        sys.exit("Error: No such container")
    (here / "killed").write_text(str(os.getpgrp()))
if sys.argv[1] == "run":
    mounts = dict(re.findall(r"source=([^,]+),target=([^,]+)", arg)[0] for arg in sys.argv if arg.startswith("type="))
    if path := os.environ.get("FAKE_WRITES"):
        above = [(target, source) for source, target in mounts.items() if path.startswith(target + "/")]
        target, source = max(above)
        pathlib.Path(source + path.removeprefix(target)).write_text("written")
    (ready,) = (pathlib.Path(source) for source, target in mounts.items() if target == "/run/bakeoff/ready")
    ready.write_text(os.environ.get("FAKE_REPORTS", ""))
    if os.environ.get("FAKE_WAITS"):
        time.sleep(0.3)
        (here / "waits").touch()
        ready.write_text("ready")
        while not (here / "killed").exists():
            time.sleep(0.02)
    sys.exit(int(os.environ.get("FAKE_CODE", "0")))
"""


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH, with a docker in it."""
    folder = tmp_path / "clients"
    folder.mkdir()
    install(folder, "docker")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "prefix", str(folder))  # images of apptainer lie beside it
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = small_checkout(tmp_path / "a workspace")
    shutil.copy(ROOT / "dvc.yaml", workspace)
    return workspace


def install(folder: Path, client: str) -> None:
    (folder / client).write_text(CLIENT)
    (folder / client).chmod(0o755)


def asked(clients: Path, verb: str) -> list[list[str]]:
    calls = [json.loads(line)[1:] for line in (clients / "asked").read_text().splitlines()]
    return [call for call in calls if call[0] == verb]


def options(call: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(call) if option == name]


def run(workspace: Path, stage: str = "plan", name: str = "r1-llm-only", client: str = "docker", **more: Any) -> Ended:
    declared = stage_of_command(declared_stages(workspace), stage, [name])
    settings = {"caller": {}, "workspace_dir": workspace, **more}
    stage_run = StageRun(stage=stage, args=(name,), declared=declared, **settings)
    return ContainerEngine.find(client, workspace, "cpu").run(stage_run)


def the_run(clients: Path, workspace: Path, **changes: Any) -> list[str]:
    """The arguments of the client for such a stage run."""
    run(workspace, **changes)
    (call,) = asked(clients, "run")
    return call


def test_stage_is_sealed_and_runs_in_the_image_by_its_digest(clients: Path, workspace: Path) -> None:
    call = the_run(clients, workspace, attempt=2)
    assert {"--rm", "--read-only"} <= set(call)
    assert options(call, "--network") == ["none"]
    assert options(call, "--cap-drop") == ["ALL"]
    assert "no-new-privileges" in options(call, "--security-opt")
    assert options(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert options(call, "--pull") == ["never"]
    for limit in ("--pids-limit", "--shm-size", "--tmpfs"):
        assert options(call, limit)
    assert not {"--privileged", "--volume", "-v", "--cap-add", "--tty", "-t", "--gpus", "--device"} & set(call)
    inside = ["python", "-m", "stages.kit.launcher.inside", "plan", "r1-llm-only", "--attempt", "2"]
    assert call[call.index("sha256:0123") :][1:] == inside
    assert "BAKEOFF_IMAGE=sha256:0123" in options(call, "--env")


def test_network_is_for_the_hub_and_no_value_of_the_caller_is_on_the_command_line(
    clients: Path, workspace: Path
) -> None:
    caller = {"HF_TOKEN": "hf_secret", "HTTPS_PROXY": "http://me:secret@proxy", "LANG": "C.UTF-8", "AWS_KEY": "secret"}
    variables = {"HF_HOME": "/hub"}
    call = the_run(clients, workspace, stage="base", name="vlm", network=True, variables=variables, caller=caller)
    assert options(call, "--network") == ["bridge"]
    assert not any("secret" in argument for argument in call)
    environment = options(call, "--env")
    assert {"HF_TOKEN", "HTTPS_PROXY", "LANG", "HF_HOME=/hub", "PYTHONHASHSEED=0"} <= set(environment)
    assert "AWS_KEY" not in environment


def test_gpus_are_given_by_their_uuids_and_triton_has_the_launchers_folder(clients: Path, workspace: Path) -> None:
    own = {"TRITON_CACHE_DIR": "/mine", "CC": "/mine/gcc"}
    variables = {"TRITON_CACHE_DIR": "/triton"}
    call = the_run(clients, workspace, gpus=("GPU-a", "GPU-b"), caller=own, variables=variables)
    assert options(call, "--gpus") == ['"device=GPU-a,GPU-b"']
    assert [value for value in options(call, "--env") if value.startswith(("TRITON", "CC"))] == [
        "TRITON_CACHE_DIR=/triton"
    ]


def test_podman_has_options_of_its_own(clients: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(clients, "podman")
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    call = the_run(clients, workspace, client="podman", gpus=("GPU-a",))
    assert options(call, "--device") == ["nvidia.com/gpu=GPU-a"]
    assert options(call, "--userns") == ["keep-id"]
    assert {"--http-proxy=false", "--read-only-tmpfs=false"} <= set(call)
    assert "--gpus" not in call


def test_podman_is_recognized_under_dockers_name(clients: Path, workspace: Path) -> None:
    """The package podman-docker installs such a script."""
    (clients / "docker").write_text(f"{CLIENT}\n# exec podman")
    assert "--read-only-tmpfs=false" in the_run(clients, workspace)


def test_full_disk_or_missing_right_is_reported(clients: Path, workspace: Path) -> None:
    shutil.rmtree(workspace / "data")
    (workspace / "data").write_text("no folder")
    with pytest.raises(UserError, match=r"the outputs of plan@r1-llm-only cannot be written: .*data"):
        run(workspace)


def test_in_a_rootless_docker_root_is_the_caller(
    clients: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECURITY", "[name=seccomp,profile=default name=rootless]")
    assert options(the_run(clients, workspace), "--user") == ["0:0"]


@pytest.mark.parametrize(("code", "taken"), [("0", True), ("3", False)])
def test_outputs_are_taken_if_the_stage_succeeds(
    clients: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, code: str, taken: bool
) -> None:
    (workspace / PLAN).unlink()
    monkeypatch.setenv("FAKE_WRITES", str(workspace / PLAN))
    monkeypatch.setenv("FAKE_CODE", code)
    assert run(workspace).code == int(code)
    assert (workspace / PLAN).exists() == taken


def test_machine_that_the_container_reports_is_passed_on(
    clients: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = this_machine(os.environ)
    for written, read in ((json.dumps(asdict(machine)), machine), ("ready", None), ('{"python": 3}', None)):
        monkeypatch.setenv("FAKE_REPORTS", written)
        assert run(workspace) == Ended(code=0, machine=read)


@pytest.mark.parametrize("filtered", [True, False])
def test_first_process_reports_the_machine_and_refuses_to_run_without_a_filter(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filtered: bool
) -> None:
    (workspace / "stages/plan.py").write_text("import sys; sys.exit(3)")
    monkeypatch.chdir(workspace)
    for name, text in (("STATUS", f"\nSeccomp:\t{2 * filtered}\n"), ("LAUNCHER_LOCK", ""), ("READY", "")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(inside, name, tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["inside", "plan", "r1"])
    with pytest.raises(SystemExit, match="3" if filtered else "no seccomp filter"):
        inside.main()
    reported = (tmp_path / "READY").read_text()
    assert (TypeAdapter(Machine).validate_json(reported) == this_machine(os.environ)) if filtered else not reported


def choose(workspace: Path, name: str) -> tuple[object, list[str]]:
    lines: list[str] = []
    return choose_engine(name, workspace_dir=workspace, target="cpu", say=lines.append), lines


def test_auto_takes_the_first_engine_with_this_trees_image(clients: Path, workspace: Path) -> None:
    engine, (line,) = choose(workspace, "auto")
    assert isinstance(engine, ContainerEngine)
    assert line == f"engine docker, image {image_reference(workspace, 'cpu')}"
    (clients / "docker").unlink()
    install(clients, "podman")
    engine, (line,) = choose(workspace, "auto")
    assert isinstance(engine, ContainerEngine)
    assert engine.client.program == "podman"
    assert "docker is not installed" in line


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("Error: No such image: bakeoff:cpu", "docker has no image bakeoff:cpu-"),
        ("Cannot connect to the Docker daemon at unix:///x. Is it running?", "Cannot connect to the Docker daemon"),
    ],
)
def test_auto_runs_a_process_without_a_usable_engine_and_gives_the_reason(
    clients: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, error: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_ERROR", error)
    engine, (line,) = choose(workspace, "auto")
    assert isinstance(engine, ProcessEngine)
    assert line.startswith("engine process, without a container: ")
    assert reason in line
    assert "podman is not installed" in line


def test_auto_leaves_no_stage_unsealed_if_the_others_are_sealed(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(_: Path, target: str) -> object:
        if target != "cpu":
            raise NotUsable(f"there is no image {target}")
        return object()

    monkeypatch.setitem(CONTAINER_ENGINES, "docker", find)
    with pytest.raises(NotUsable, match="there is no image vllm-cpu"):
        choose_engine("auto", workspace_dir=workspace, target="vllm-cpu", say=print)


def test_engine_chosen_by_name_is_that_or_none(clients: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ERROR", "Error: No such image: bakeoff:cpu")
    with pytest.raises(NotUsable, match=r"bakeoff:cpu-.*make image TARGET=cpu"):
        choose(workspace, "docker")
    with pytest.raises(NotUsable, match="podman is not installed"):
        choose(workspace, "podman")
    engine, lines = choose(workspace, "process")
    assert isinstance(engine, ProcessEngine)
    assert lines == []


@pytest.mark.parametrize("number", ENDING)
def test_signal_goes_to_the_container_once_and_when_it_is_handled(
    clients: Path, workspace: Path, number: signal.Signals
) -> None:
    """Before its first process handles signals, the kernel would drop them."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "stages.kit.launcher.launch", "plan", "r1-llm-only"],
        cwd=workspace,
        env={"PATH": str(clients), "BAKEOFF_ENGINE": "docker", "FAKE_WAITS": "1", "FAKE_CODE": "75"},
    )
    while not (clients / "asked").exists() or not asked(clients, "run"):
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(number)
    assert launcher.wait() == 75
    (kill,) = (call for call in asked(clients, "kill") if call[2] == str(int(number)))
    assert kill[3] == options(asked(clients, "run")[0], "--name")[0]
    assert (clients / "waits").exists()
    # A closing terminal signals the launcher's whole group, more than once: it must not end what passes it on.
    assert (clients / "killed").read_text() != str(os.getpgrp())


def test_container_runs_only_declared_stages(clients: Path, workspace: Path) -> None:
    command = [sys.executable, "-m", "stages.kit.launcher.launch", "plan", "r9"]
    environment = {"PATH": str(clients), "BAKEOFF_ENGINE": "docker"}
    refused = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "no stage of dvc.yaml runs `docker/run plan r9`; there are: docker/run plan r1-llm-only" in refused.stderr
