"""The engines with containers, with clients that note their arguments. The real ones: tests/smoke."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from stages.core.errors import UserError
from stages.core.params.schema import ContainerParams
from stages.core.provenance import Machine
from stages.launcher import engines, gpus, inside
from stages.launcher.apptainer import IMAGES_DIR, SECCOMP, ApptainerEngine, digest_path, sif_path
from stages.launcher.container import NotUsable
from stages.launcher.docker import ContainerEngine
from stages.launcher.engines import CONTAINER_ENGINES, Engine, choose_engine
from stages.launcher.gpus import Gpu
from stages.launcher.images import image_reference
from stages.launcher.process import Ended, this_machine
from tests import ROOT
from tests.launcher.small_checkout import PARAMS, request_of, small_checkout

INSIDE = ["python", "-m", "stages.launcher.inside", "027", "plan", "r1-llm-only"]

# Responds like docker, podman and apptainer. `run` and `exec` note arguments and environment, write FAKE_READY to the
# file that reports a container as ready, and wait for a `kill` if FAKE_WAITS is set, which fails before
# they wait.
CLIENT = f"""#!{sys.executable}
import json, os, pathlib, re, sys, time

here, words = pathlib.Path(__file__).parent, [word for word in sys.argv[1:] if word != "--silent"]
with (here / "asked").open("ab", buffering=0) as asked:
    asked.write(json.dumps([words, dict(os.environ)]).encode() + b"\\n")
error = os.environ.get("FAKE_ERROR")
if words[:2] == ["image", "inspect"]:
    sys.exit(error) if error else print("sha256:0123")
if words[0] == "ps" and error and "No such image" not in error:
    sys.exit(error)
if words[0] == "info":
    print(json.dumps({{"MemTotal": 16 * 10**9, "NCPU": 2}} | json.loads(os.environ.get("FAKE_INFO", "{{}}"))))
if words[0] == "kill":
    if (here / "killed").exists() or not (here / "waits").exists():
        sys.exit("Error: No such container")
    (here / "killed").write_text(str(os.getpgrp()))
if words[0] in ("run", "exec"):
    mounts = dict(re.findall(r"source=([^,]+),target=([^,]+)", arg)[0] for arg in words if arg.startswith("type=bind"))
    (ready,) = (pathlib.Path(source) for source, target in mounts.items() if target == "/run/bakeoff/ready")
    ready.write_text(os.environ.get("FAKE_READY", ""))
    if os.environ.get("FAKE_WAITS"):
        time.sleep(0.3)
        (here / "waits").touch()
        ready.write_text("ready")
        while not (here / "killed").exists():
            time.sleep(0.02)
    sys.exit(int(os.environ.get("FAKE_CODE", "0")))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = small_checkout(tmp_path / "a workspace")
    shutil.copy(ROOT / "dvc.yaml", workspace)
    return workspace


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH, without any client at first."""
    folder = tmp_path / "clients"
    folder.mkdir()
    monkeypatch.setattr(os, "umask", lambda _: 0o027)  # as the caller's
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "checkout/.venv"))  # images of apptainer are beside it
    return folder


def install(folder: Path, *clients: str) -> None:
    for name in clients:
        (folder / name).write_text(CLIENT)
        (folder / name).chmod(0o755)


def make_sif(checkout: Path, reference: str) -> Path:
    path = sif_path(checkout / IMAGES_DIR, reference)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    digest_path(path).write_text(f"0123  {path.name}\n")
    return path


@pytest.fixture
def docker(clients: Path) -> Path:
    install(clients, "docker")
    return clients


@pytest.fixture
def apptainer(clients: Path, workspace: Path) -> Path:
    """The clients, with an apptainer that has this tree's image."""
    install(clients, "apptainer")
    make_sif(workspace, image_reference(workspace, "cpu"))
    return clients


def run(workspace: Path, engine: str, stage: str = "plan", name: str = "r1-llm-only", **more: Any) -> Ended:
    request = request_of(workspace, stage, name, **more)
    return CONTAINER_ENGINES[engine].find(engine, workspace, "cpu").run(request)


def asked(clients: Path, verb: str) -> list[tuple[list[str], dict[str, str]]]:
    """Arguments and environment of the calls of the client."""
    calls = [json.loads(line) for line in (clients / "asked").read_text().splitlines()]
    return [(words, environment) for words, environment in calls if words[0] == verb]


def the_run(clients: Path, workspace: Path, engine: str, **changes: Any) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of the client for such a stage run."""
    run(workspace, engine, **changes)
    *_, last = asked(clients, "exec" if engine == "apptainer" else "run")
    return last


def options(call: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(call) if option == name]


def test_docker_seals_a_stage_and_runs_the_image_by_its_digest(docker: Path, workspace: Path) -> None:
    call, _ = the_run(docker, workspace, "docker", attempt=2)
    assert {"--rm", "--read-only"} <= set(call)
    assert options(call, "--network") == ["none"]
    assert options(call, "--cap-drop") == ["ALL"]
    assert "no-new-privileges" in options(call, "--security-opt")
    assert options(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert options(call, "--pull") == ["never"]
    for limit in ("--shm-size", "--tmpfs"):
        assert options(call, limit)
    assert not {"--privileged", "--volume", "-v", "--cap-add", "--tty", "-t", "--gpus", "--device"} & set(call)
    assert call[call.index("sha256:0123") :][1:] == [*INSIDE, "--attempt", "2"]
    assert "BAKEOFF_IMAGE=sha256:0123" in options(call, "--env")
    assert f"type=tmpfs,target={workspace},readonly" in options(call, "--mount")


def test_apptainer_seals_a_stage_and_its_tmp_is_temporary(
    apptainer: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = ("/", "/proc", "/sys", "/sys/kernel/debug", "/proc/sys/fs/binfmt_misc")
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [SimpleNamespace(mountpoint=path) for path in mounted])
    call, _ = the_run(apptainer, workspace, "apptainer")
    assert {"--containall", "--cleanenv", "--no-home", "--no-eval", "--no-privs", "--net"} <= set(call)
    pairs = {("--network", "none"), ("--pwd", str(workspace)), ("--no-mount", "bind-paths,hostfs,sys"), SECCOMP}
    assert pairs <= set(pairwise(call))
    assert not {"--bind", "-B", "--writable", "--writable-tmpfs", "--fakeroot", "--keep-privs", "--nv"} & set(call)
    sif = sif_path(workspace / IMAGES_DIR, image_reference(workspace, "cpu"))
    assert call[call.index(str(sif)) :][1:] == ["env", "HOME=/tmp", *INSIDE]
    (scratch,) = map(Path, options(call, "--workdir"))
    assert scratch.is_relative_to(workspace / ".bakeoff/stages/plan@r1-llm-only")
    assert not scratch.exists()
    assert f"type=bind,source={scratch / 'workspace'},target={workspace},readonly" in call
    # Settings of the kernel are read-only, with what is mounted inside.
    found = [argument for argument in call if re.search("target=/(proc|sys)", argument)]
    assert all(value.endswith(",readonly") and "debug" not in value for value in found)
    settings, inside = (f"type=bind,source={path},target={path},readonly" for path in ("/proc/sys", mounted[-1]))
    assert found.index(settings) < found.index(inside)


GPUS = tuple(Gpu(index=index, uuid=f"GPU-{letter}", name="H100", minor=index) for index, letter in enumerate("ab"))
CALLER = {"LANG": "C.UTF-8", "HF_TOKEN": "hf_secret", "HTTPS_PROXY": "http://me:secret@proxy", "AWS_KEY": "secret"}


def test_docker_gets_the_callers_variables_by_name_alone(docker: Path, workspace: Path) -> None:
    caller = {**CALLER, "TRITON_CACHE_DIR": "/mine", "HF_HOME": str(workspace / "hub")}
    call, _ = the_run(docker, workspace, "docker", stage="base", name="vlm", network=True, caller=caller)
    assert options(call, "--network") == ["bridge"]
    assert not any("secret" in argument for argument in call)
    environment = options(call, "--env")
    assert {"HF_TOKEN", "HTTPS_PROXY", "LANG", f"HF_HOME={workspace / 'hub'}", "PYTHONHASHSEED=0"} <= set(environment)
    assert not {"AWS_KEY", "TRITON_CACHE_DIR"} & set(environment)


def test_apptainer_gets_variables_in_its_environment_and_none_undoes_the_seal(
    apptainer: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = {**CALLER, "APPTAINER_BIND": "/home", "APPTAINERENV_AWS_KEY": "secret", "SINGULARITY_NV": "1"}
    hub = str(workspace / "hub")
    for name, value in (caller | {"APPTAINER_CACHEDIR": "/scratch", "HF_HOME": hub}).items():
        monkeypatch.setenv(name, value)
    call, environment = the_run(apptainer, workspace, "apptainer", network=True, caller=os.environ)
    assert not any("secret" in argument for argument in call)
    expected = {"HF_TOKEN": "hf_secret", "HF_HOME": hub, "BAKEOFF_IMAGE": "sha256:0123"}
    assert environment.items() >= {f"APPTAINERENV_{name}": value for name, value in expected.items()}.items()
    assert environment["APPTAINER_CACHEDIR"] == "/scratch"
    assert not {"APPTAINER_BIND", "APPTAINERENV_AWS_KEY", "SINGULARITY_NV", "APPTAINERENV_HOME"} & environment.keys()


@pytest.mark.parametrize(
    ("more", "sealed"), [({}, True), ({"num_nodes": 2}, False), ({"network": True, "gpus": GPUS}, False)]
)
def test_apptainer_shows_network_and_gpus_to_stages_that_need_them(
    apptainer: Path, workspace: Path, more: dict[str, Any], sealed: bool
) -> None:
    more["caller"] = {"HF_HOME": str(workspace / "hub")}
    call, environment = the_run(apptainer, workspace, "apptainer", **more)
    assert ("--net" in call) == sealed
    assert ("type=bind,source=/etc/hosts,target=/etc/hosts,readonly" in call) != sealed
    assert ("--nv" in call) == bool(more.get("gpus"))
    assert environment["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == ("GPU-a,GPU-b" if "gpus" in more else "")


def test_docker_and_podman_give_gpus_by_their_uuids(
    docker: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [docker / name for name in ("nvidia1", "nvidiactl", "nvidia7")]
    for path in files:
        path.touch()
    monkeypatch.setattr(gpus, "DEVICES_DIR", docker)
    call, _ = the_run(docker, workspace, "docker", gpus=GPUS)
    assert options(call, "--gpus") == ['"device=GPU-a,GPU-b"']
    assert options(call, "--device") == [str(path) for path in files[:2]], "or systemd takes them away"
    names = [f"nvidia.com/gpu={gpu.uuid}" for gpu in GPUS]
    listed = [{"Source": "cdi", "ID": name} for name in names]
    monkeypatch.setenv("FAKE_INFO", json.dumps({"DiscoveredDevices": listed}))
    call, _ = the_run(docker, workspace, "docker", gpus=GPUS)
    assert options(call, "--device") == names
    assert "--gpus" not in call
    install(docker, "podman")
    monkeypatch.setenv("FAKE_INFO", json.dumps({"host": {}}))
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    call, _ = the_run(docker, workspace, "podman", gpus=GPUS[:1])
    assert options(call, "--device") == ["nvidia.com/gpu=GPU-a"]
    assert options(call, "--userns") == ["keep-id"]
    assert {"--http-proxy=false", "--read-only-tmpfs=false"} <= set(call)
    assert "--gpus" not in call


def test_podman_under_dockers_name_and_rootless_docker_are_recognized(
    docker: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_INFO", json.dumps({"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}))
    call, _ = the_run(docker, workspace, "docker")
    assert options(call, "--user") == ["0:0"], "root is the caller"
    monkeypatch.setenv("FAKE_INFO", json.dumps({"host": {}}))  # the package podman-docker has a script of that name
    assert ContainerEngine.find("docker", workspace, "cpu").name == "podman"
    call, _ = the_run(docker, workspace, "docker")
    assert "--read-only-tmpfs=false" in call


def test_docker_limits_processes_and_memory_by_the_machine_or_a_setting(
    docker: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limits(**own: Any) -> list[str]:
        params = replace(PARAMS, containers=ContainerParams(**own))
        call, _ = the_run(docker, workspace, "docker", params=params)
        return [*options(call, "--pids-limit"), *(word for word in call if word.startswith("--memory"))]

    assert limits() == ["2048", "--memory=15000000000b", "--memory-swap=15000000000b"]
    assert limits(processes=99, memory_gb=2.5) == ["99", "--memory=2500000000b", "--memory-swap=2500000000b"]
    monkeypatch.setenv("FAKE_INFO", json.dumps({"host": {"cpus": 256, "memTotal": 32 * 10**9}}))
    assert limits() == ["8192", "--memory=30000000000b", "--memory-swap=30000000000b"], "by podman's facts"
    monkeypatch.delenv("FAKE_INFO")
    with pytest.raises(UserError, match=r"containers\.memory_gb in params\.yaml is 64; docker has 16\.0 GB here"):
        limits(memory_gb=64.0)


@pytest.mark.parametrize("code", [1, 255])
def test_apptainers_own_failure_is_told_from_a_stage_with_the_same_code(
    apptainer: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("FAKE_CODE", str(code))
    with pytest.raises(UserError, match=r"apptainer could not start the container.*user namespaces"):
        run(workspace, "apptainer")
    monkeypatch.setenv("FAKE_READY", "ready")
    assert run(workspace, "apptainer").code == code


def test_machine_that_the_container_reports_is_passed_on(
    docker: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = this_machine(os.environ)
    for written, read in ((json.dumps(asdict(machine)), machine), ("ready", None), ('{"python": 3}', None)):
        monkeypatch.setenv("FAKE_READY", written)
        assert run(workspace, "docker") == Ended(code=0, machine=read)


@pytest.mark.parametrize("filtered", [True, False])
def test_first_process_reports_the_machine_takes_the_callers_umask_and_refuses_to_run_without_a_filter(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filtered: bool
) -> None:
    (workspace / "stages/plan.py").write_text("import sys; open('made', 'w'); sys.exit(3)")
    monkeypatch.chdir(workspace)
    for name, text in (("STATUS", f"\nSeccomp:\t{2 * filtered}\n"), ("LAUNCHER_LOCK", ""), ("READY", "")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(inside, name, tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["inside", "027", "plan", "r1"])
    before = os.umask(0o022)
    try:
        with pytest.raises(SystemExit, match="3" if filtered else "no seccomp filter"):
            inside.main()
    finally:
        os.umask(before)
    assert not filtered or (workspace / "made").stat().st_mode & 0o777 == 0o640
    reported = (tmp_path / "READY").read_text()
    assert (TypeAdapter(Machine).validate_json(reported) == this_machine(os.environ)) if filtered else not reported


def choose(workspace: Path, name: str, target: str = "cpu") -> tuple[Engine, str]:
    """The engine, and the line that is logged."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "say", lines.append)
        engine = choose_engine(name, workspace_dir=workspace, target=target)
    return engine, "".join(lines)


NO_IMAGE, NO_DAEMON = "Error: No such image: bakeoff:cpu", "Cannot connect to the Docker daemon at unix:///x."


@pytest.mark.parametrize(
    ("clients_there", "error", "name", "reasons"),
    [
        (("docker", "podman", "apptainer"), "", "docker", []),
        (("podman", "apptainer"), "", "podman", []),
        (("docker", "apptainer"), NO_IMAGE, "apptainer", ["docker has no image bakeoff:cpu-"]),
        (("docker",), NO_IMAGE, "process", ["without a container", "make image TARGET=cpu"]),
        (("docker",), NO_DAEMON, "process", None),
    ],
)
def test_auto_takes_the_first_engine_with_this_trees_image_and_names_images_that_are_missing(
    clients: Path,
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    clients_there: tuple[str, ...],
    error: str,
    name: str,
    reasons: list[str] | None,
) -> None:
    install(clients, *clients_there)
    make_sif(workspace, image_reference(workspace, "cpu"))
    monkeypatch.setenv("FAKE_ERROR", error)
    engine, line = choose(workspace, "auto")
    assert engine.name == name
    if reasons is None:
        assert line == "", "before each stage it would be noise"
        return
    assert line.startswith(f"engine {name}, ")
    assert all(reason in line for reason in reasons)
    assert "is not installed" not in line
    assert engine.image is None or f"image {image_reference(workspace, 'cpu')}" in line


def test_auto_leaves_no_stage_unsealed_if_the_others_are_sealed(clients: Path, workspace: Path) -> None:
    install(clients, "apptainer")
    make_sif(workspace, image_reference(workspace, "cpu"))
    with pytest.raises(NotUsable, match=r"apptainer has no image .*vllm-cpu"):
        choose(workspace, "auto", "vllm-cpu")


def test_engine_chosen_by_name_is_that_or_none(docker: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ERROR", NO_IMAGE)
    install(docker, "apptainer")
    no_sif = r"no image .*/cpu-[0-9a-f]{12}\.sif; build it with: make image ENGINE=apptainer TARGET=cpu"
    for name, reason in (
        ("docker", r"bakeoff:cpu-.*make image TARGET=cpu"),
        ("podman", "podman is not installed"),
        ("apptainer", no_sif),
    ):
        with pytest.raises(NotUsable, match=reason):
            choose(workspace, name)
    assert choose(workspace, "process")[1] == ""


def test_clone_finds_apptainers_image_beside_its_venv(clients: Path, workspace: Path, tmp_path: Path) -> None:
    install(clients, "apptainer")
    reference = image_reference(workspace, "cpu")
    sif = make_sif(tmp_path / "checkout", reference)
    engine = ApptainerEngine.find("apptainer", workspace, "cpu")
    assert (engine.sif_path, engine.image) == (sif, (reference, "sha256:0123"))


def test_signal_goes_to_the_container_once_and_when_it_is_handled(docker: Path, workspace: Path) -> None:
    """Before its first process handles signals, the kernel would drop them. Every signal: test_process.py."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "stages.launcher.launch", "plan", "r1-llm-only"],
        cwd=workspace,
        env={"PATH": str(docker), "BAKEOFF_ENGINE": "docker", "FAKE_WAITS": "1", "FAKE_CODE": "75"},
    )
    while not (docker / "asked").exists() or not asked(docker, "run"):
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait() == 75
    (kill,) = (call for call, _ in asked(docker, "kill") if call[2] == str(int(signal.SIGHUP)))
    assert kill[3] == options(asked(docker, "run")[0][0], "--name")[0]
    # A closing terminal signals the launcher's whole group, more than once: it must not end the command that passes
    # the signal on.
    assert (docker / "killed").read_text() != str(os.getpgrp())


def test_container_runs_only_declared_stages(docker: Path, workspace: Path) -> None:
    with pytest.raises(UserError, match="runs `docker/run plan r9`; there are: docker/run plan r1-llm-only"):
        run(workspace, "docker", "plan", "r9")
