"""The engine apptainer, with a client that notes its arguments. The real one: tests/smoke."""

import json
import os
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stages.core.errors import UserError
from stages.kit.launcher.apptainer import IMAGES_DIR, SECCOMP, ApptainerEngine, digest_path, sif_path
from stages.kit.launcher.container import NotUsable
from stages.kit.launcher.engines import choose_engine
from stages.kit.launcher.images import image_reference
from stages.kit.launcher.pipeline import declared_stages, stage_of_command
from stages.kit.launcher.process import Ended, ProcessEngine, StageRun
from tests import ROOT
from tests.kit.launcher.small_checkout import small_checkout

# Reports that it is ready if FAKE_READY is set, and ends with FAKE_CODE.
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
    return make_sif(workspace, image_reference(workspace, "cpu"))


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


def test_stage_is_sealed_and_its_tmp_is_temporary(clients: Path, workspace: Path, sif: Path) -> None:
    run(workspace)
    arguments, _ = asked(clients)
    assert {"--containall", "--cleanenv", "--no-home", "--no-eval", "--no-privs", "--net"} <= set(arguments)
    assert {("--network", "none"), ("--pwd", str(workspace)), SECCOMP} <= set(pairwise(arguments))
    assert not {"--bind", "-B", "--writable", "--writable-tmpfs", "--fakeroot", "--keep-privs", "--nv"} & set(arguments)
    command = ["python", "-m", "stages.kit.launcher.inside", "plan", "r1-llm-only"]
    assert arguments[arguments.index(str(sif)) :][1:] == ["env", "HOME=/tmp", *command]
    (scratch,) = (Path(value) for option, value in pairwise(arguments) if option == "--workdir")
    assert scratch.is_relative_to(workspace / "data/.outputs")
    assert not scratch.exists()


def test_profile_forbids_user_namespaces_and_lets_threads_start() -> None:
    """A trace without a tracer fails with ENOSYS, upon which the C library uses clone instead of clone3."""
    profile = json.loads((ROOT / SECCOMP[1].removeprefix("seccomp:")).read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    rules = {name: rule for rule in profile["syscalls"] for name in rule["names"]}
    for name in ("clone", "unshare"):
        assert (rules[name]["action"], rules[name]["args"][0]["value"]) == ("SCMP_ACT_ERRNO", 0x10000000)
    assert rules["clone3"]["action"] == "SCMP_ACT_TRACE"
    assert {rules[name]["action"] for name in ("ptrace", "setns", "keyctl", "bpf")} == {"SCMP_ACT_ERRNO"}


def test_variables_pass_in_the_clients_environment_and_none_undoes_the_seal(
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
    expected = {"HF_TOKEN": "hf_secret", "HF_HOME": "/hub", "BAKEOFF_IMAGE": "sha256:0123"}
    assert environment.items() >= {f"APPTAINERENV_{name}": value for name, value in expected.items()}.items()
    assert environment["APPTAINER_CACHEDIR"] == "/scratch"
    assert not {"APPTAINER_BIND", "APPTAINERENV_AWS_KEY", "SINGULARITY_NV", "APPTAINERENV_HOME"} & environment.keys()


def test_kernel_settings_are_read_only_with_what_is_mounted_inside(
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


@pytest.mark.parametrize(
    ("more", "sealed"), [({}, True), ({"num_nodes": 2}, False), ({"network": True, "gpus": ("GPU-a", "GPU-b")}, False)]
)
def test_network_and_gpus_are_seen_by_the_stages_that_need_them(
    clients: Path, workspace: Path, sif: Path, more: dict[str, Any], sealed: bool
) -> None:
    run(workspace, **more)
    arguments, environment = asked(clients)
    assert ("--net" in arguments) == sealed
    assert ("type=bind,source=/etc/hosts,target=/etc/hosts,readonly" in arguments) != sealed
    assert ("--nv" in arguments) == bool(more.get("gpus"))
    assert environment["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == ",".join(more.get("gpus", ()))


@pytest.mark.parametrize("code", [1, 255])
def test_apptainers_own_failure_is_told_from_a_stage_with_the_same_code(
    clients: Path, workspace: Path, sif: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("FAKE_CODE", str(code))
    with pytest.raises(UserError, match=r"apptainer could not start the container.*user namespaces"):
        run(workspace)
    monkeypatch.setenv("FAKE_READY", "ready")
    assert run(workspace).code == code


def test_missing_image_is_named_with_one_of_other_locks(clients: Path, workspace: Path) -> None:
    with pytest.raises(NotUsable, match=r"no image .*/cpu-[0-9a-f]{12}\.sif; build it with: make image ENGINE=apptain"):
        ApptainerEngine.find(workspace, "cpu")
    sif = make_sif(workspace, "bakeoff:cpu-0123456789ab")
    with pytest.raises(NotUsable, match=r"\(there is cpu-0123456789ab\.sif, built from other locks\)"):
        ApptainerEngine.find(workspace, "cpu")
    digest_path(sif.rename(sif_path(workspace / IMAGES_DIR, image_reference(workspace, "cpu")))).unlink(True)
    with pytest.raises(NotUsable, match=r"sif\.sha256 is missing"):
        ApptainerEngine.find(workspace, "cpu")


def test_clone_finds_the_image_beside_its_venv(clients: Path, workspace: Path, tmp_path: Path) -> None:
    reference = image_reference(workspace, "cpu")
    sif = make_sif(tmp_path / "checkout", reference)
    engine = ApptainerEngine.find(workspace, "cpu")
    assert (engine.sif_path, engine.image) == (sif, (reference, "sha256:0123"))


def test_auto_takes_it_after_docker_and_podman_and_before_a_process(clients: Path, workspace: Path) -> None:
    lines: list[str] = []
    assert isinstance(choose_engine("auto", workspace_dir=workspace, target="cpu", say=lines.append), ProcessEngine)
    make_sif(workspace, reference := image_reference(workspace, "cpu"))
    assert isinstance(choose_engine("auto", workspace_dir=workspace, target="cpu", say=lines.append), ApptainerEngine)
    assert lines[1] == f"engine apptainer, image {reference} (docker is not installed; podman is not installed)"
