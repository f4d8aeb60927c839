"""The engine apptainer, with a client that notes what it is asked for. The real one: tests/smoke."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stages.core.errors import UserError
from stages.kit.launcher.apptainer import IMAGES_DIR, ApptainerEngine, digest_path, sif_path
from stages.kit.launcher.container import NotUsable
from stages.kit.launcher.engines import choose_engine
from stages.kit.launcher.images import image_references
from stages.kit.launcher.pipeline import declared_stages, stage_of_command
from stages.kit.launcher.process import ProcessEngine
from stages.kit.launcher.stage_run import Ended, StageRun
from tests import ROOT
from tests.kit.launcher.small_checkout import small_checkout

# Says that it is ready where FAKE_READY is set, and ends with FAKE_CODE.
CLIENT = f"""#!{sys.executable}
import json, os, pathlib, re, sys

(pathlib.Path(__file__).parent / "asked").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
(ready,) = (found[1] for arg in sys.argv if (found := re.search("source=([^,]+),target=/run/bakeoff/ready", arg)))
pathlib.Path(ready).write_text(os.environ.get("FAKE_READY", ""))
sys.exit(int(os.environ.get("FAKE_CODE", "0")))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = small_checkout(tmp_path / "a workspace")
    shutil.copy(ROOT / "dvc.yaml", workspace)
    return workspace


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH, with an apptainer in it."""
    folder = tmp_path / "clients"
    folder.mkdir()
    (folder / "apptainer").write_text(CLIENT)
    (folder / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "checkout/.venv"))
    return folder


@pytest.fixture
def sif(workspace: Path) -> Path:
    return make_sif(workspace, image_references(workspace, "cpu")[0])


def make_sif(checkout: Path, reference: str) -> Path:
    path = sif_path(checkout / IMAGES_DIR, reference)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    digest_path(path).write_text(f"0123  {path.name}\n")
    return path


def run(workspace: Path, **more: Any) -> Ended:
    declared = stage_of_command(declared_stages(workspace), "plan", ["r1-llm-only"])
    settings = {"caller": {}, "workspace_dir": workspace, **more}
    stage_run = StageRun(stage="plan", args=("r1-llm-only",), declared=declared, **settings)
    return ApptainerEngine.find(workspace, "cpu").run(stage_run)


def asked(clients: Path) -> tuple[list[str], dict[str, str]]:
    """The client's arguments and its environment."""
    arguments, environment = json.loads((clients / "asked").read_text())
    return arguments, environment


def test_a_stage_is_sealed(clients: Path, workspace: Path, sif: Path) -> None:
    run(workspace)
    arguments, _ = asked(clients)
    assert {"--containall", "--cleanenv", "--no-home", "--no-eval", "--no-privs", "--net"} <= set(arguments)
    assert {("--network", "none"), ("--pwd", str(workspace))} <= set(pairwise(arguments))
    assert not {"--bind", "-B", "--writable", "--writable-tmpfs", "--fakeroot", "--keep-privs", "--nv"} & set(arguments)
    command = ["python", "-m", "stages.kit.launcher.inside", "plan", "r1-llm-only"]
    assert arguments[arguments.index(str(sif)) :][1:] == ["env", "HOME=/tmp", *command]


def test_tmp_is_scratch_of_the_launcher_and_gone_with_the_stage(clients: Path, workspace: Path, sif: Path) -> None:
    run(workspace)
    (scratch,) = (Path(value) for option, value in pairwise(asked(clients)[0]) if option == "--workdir")
    assert scratch.is_relative_to(workspace / "data/.outputs")
    assert not scratch.exists()


def test_named_variables_pass_in_the_clients_environment_and_none_that_could_undo_the_seal(
    clients: Path, workspace: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = {"LANG": "C.UTF-8", "HF_TOKEN": "hf_secret", "APPTAINER_BIND": "/home", "APPTAINERENV_AWS_KEY": "secret"}
    caller |= {"SINGULARITY_NV": "1", "APPTAINER_CACHEDIR": "/scratch"}
    for name, value in caller.items():
        monkeypatch.setenv(name, value)
    run(workspace, caller=os.environ, network=True, variables={"HF_HOME": "/hub"})
    arguments, environment = asked(clients)
    assert "--net" not in arguments
    assert not any("secret" in argument for argument in arguments)
    assert environment["APPTAINERENV_HF_TOKEN"] == "hf_secret"
    assert environment["APPTAINERENV_HF_HOME"] == "/hub"
    assert environment["APPTAINERENV_BAKEOFF_IMAGE"] == "sha256:0123"
    assert environment["APPTAINER_CACHEDIR"] == "/scratch"
    assert not {"APPTAINER_BIND", "APPTAINERENV_AWS_KEY", "SINGULARITY_NV", "APPTAINERENV_HOME"} & environment.keys()


def test_what_root_could_change_of_the_machine_is_read_only_with_what_is_mounted_there(
    clients: Path, workspace: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ("/", "/proc", "/sys", "/sys/kernel/debug", "/proc/sys/fs/binfmt_misc")
    mounted = [SimpleNamespace(mountpoint=path) for path in places]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounted)
    run(workspace)
    arguments, _ = asked(clients)
    assert ("--no-mount", "bind-paths,hostfs,sys") in set(pairwise(arguments))
    found = [argument for argument in arguments if re.search("target=/(proc|sys)", argument)]
    assert all(value.endswith(",readonly") for value in found)
    settings, inside = (f"type=bind,source={path},target={path},readonly" for path in ("/proc/sys", places[-1]))
    assert found.index(settings) < found.index(inside)
    assert not any("debug" in value for value in found)


def test_only_across_nodes_and_where_it_downloads_a_stage_has_the_machines_network(
    clients: Path, workspace: Path, sif: Path
) -> None:
    for more, alone in (({}, True), ({"num_nodes": 2}, False), ({"network": True}, False)):
        run(workspace, **more)
        arguments, _ = asked(clients)
        assert ("--net" in arguments) == alone
        assert ("type=bind,source=/etc/hosts,target=/etc/hosts,readonly" in arguments) != alone


@pytest.mark.parametrize("gpus", [(), ("GPU-a", "GPU-b")])
def test_gpus_are_seen_where_some_are_leased(clients: Path, workspace: Path, sif: Path, gpus: tuple[str, ...]) -> None:
    run(workspace, gpus=gpus)
    arguments, environment = asked(clients)
    assert ("--nv" in arguments) == bool(gpus)
    assert environment["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == ",".join(gpus)


@pytest.mark.parametrize("code", [1, 255])
def test_apptainers_own_failure_is_told_from_a_stage_that_ends_with_the_same_code(
    clients: Path, workspace: Path, sif: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("FAKE_CODE", str(code))
    with pytest.raises(UserError, match=r"apptainer could not start the container.*user namespaces"):
        run(workspace)
    monkeypatch.setenv("FAKE_READY", "ready")
    assert run(workspace).code == code


def test_an_image_that_is_missing_is_named_and_so_is_one_of_other_locks(clients: Path, workspace: Path) -> None:
    with pytest.raises(NotUsable, match=r"no image .*/cpu-[0-9a-f]{12}\.sif; build it with: make image ENGINE=apptain"):
        ApptainerEngine.find(workspace, "cpu")
    sif = make_sif(workspace, "bakeoff:cpu-0123456789ab")
    with pytest.raises(NotUsable, match=r"\(there is cpu-0123456789ab\.sif, built from other locks\)"):
        ApptainerEngine.find(workspace, "cpu")
    digest_path(sif.rename(sif_path(workspace / IMAGES_DIR, image_references(workspace, "cpu")[0]))).unlink(True)
    with pytest.raises(NotUsable, match=r"sif\.sha256 is missing"):
        ApptainerEngine.find(workspace, "cpu")


def test_a_clone_and_a_git_worktree_find_the_image_beside_the_venv_that_they_use(
    clients: Path, workspace: Path, tmp_path: Path
) -> None:
    sif = make_sif(tmp_path / "checkout", image_references(workspace, "cpu")[1])
    engine = ApptainerEngine.find(workspace, "cpu")
    assert (engine.sif_path, engine.image) == (sif, (image_references(workspace, "cpu")[1], "sha256:0123"))


def test_auto_takes_it_after_docker_and_podman_and_before_a_process(clients: Path, workspace: Path) -> None:
    said: list[str] = []
    assert isinstance(choose_engine("auto", workspace_dir=workspace, target="cpu", say=said.append), ProcessEngine)
    make_sif(workspace, reference := image_references(workspace, "cpu")[0])
    assert isinstance(choose_engine("auto", workspace_dir=workspace, target="cpu", say=said.append), ApptainerEngine)
    assert said[1] == f"engine apptainer, image {reference} (docker is not installed; podman is not installed)"
    (clients / "apptainer").unlink()
    with pytest.raises(NotUsable, match="apptainer is not installed"):
        choose_engine("apptainer", workspace_dir=workspace, target="cpu", say=said.append)


# In a process of its own: what it forbids, it forbids for good.
FORBIDDEN = """
import ctypes, errno, platform, subprocess, threading
from stages.kit.launcher.system_calls import CLONE_NEWUSER, FORBIDDEN, forbid_system_calls

forbid_system_calls()
numbers, libc = FORBIDDEN[platform.machine()], ctypes.CDLL(None, use_errno=True)
for name, number in numbers.items():
    argument = CLONE_NEWUSER if name in ("clone", "unshare") else 0
    assert libc.syscall(number, argument, 0, 0, 0, 0, 0) == -1, name
    assert ctypes.get_errno() == (errno.ENOSYS if name == "clone3" else errno.EPERM), name
assert libc.unshare(0) == 0
threading.Thread(target=print, args=("a thread",)).start()
subprocess.run(["/bin/echo", "a process"], check=True)
"""


def test_forbidden_system_calls_fail_and_threads_and_processes_start() -> None:
    ended = subprocess.run([sys.executable, "-c", FORBIDDEN], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert set(ended.stdout.splitlines()) == {"a thread", "a process"}
