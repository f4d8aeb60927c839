"""Whether Triton can compile here, with compilers that do and do not work."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from stages.kit.training.kernels import compiler_problem
from tests import ROOT

WITHOUT_HEADERS = """#!/bin/sh
echo 'In file included from x:' >&2
echo 'probe.c:2:10: fatal error: Python.h: No such file or directory' >&2
exit 1
"""

works_here = pytest.mark.skipif(compiler_problem() is not None, reason="this machine has no C compiler for its Python")


@pytest.fixture(autouse=True)
def no_choice_of_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)


def program(path: Path, script: str = WITHOUT_HEADERS) -> Path:
    path.write_text(script)
    path.chmod(0o755)
    return path


def test_without_any_compiler_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = compiler_problem()
    assert problem is not None
    assert "no C compiler" in problem
    assert "apt install gcc libc6-dev python3-dev" in problem
    assert "\n" not in problem


def test_a_compiler_without_pythons_headers_is_said_to_lack_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcc = program(tmp_path / "gcc")
    program(tmp_path / "clang", "#!/bin/sh\nexit 0\n")  # Triton does not come to it
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert f"{gcc} cannot compile for {sys.executable} (probe.c:2:10: fatal error: Python.h" in str(compiler_problem())


def test_clang_is_taken_where_there_is_no_gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path / "clang", "#!/bin/sh\nexit 0\n")
    assert compiler_problem() is None


def test_the_callers_own_compiler_is_the_one_that_has_to_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(program(tmp_path / "mine")))
    assert f"{tmp_path / 'mine'} cannot compile" in str(compiler_problem())
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    assert "cannot be started (No such file or directory)" in str(compiler_problem())


@works_here
def test_a_machine_that_compiles_has_no_problem() -> None:
    assert compiler_problem() is None


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it is for Linux")
@pytest.mark.parametrize("changes", [{}, {"CC": "/bin/false"}, {"CC": "gcc"}, {"CC": "no such"}, {"PATH": "/nowhere"}])
def test_triton_itself_comes_to_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    from triton.runtime.build import _build

    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "probe.c").write_text("#include <Python.h>\n")
    try:
        _build("probe", str(tmp_path / "probe.c"), str(tmp_path), [], [], [], [])
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        works = False
    else:
        works = True
    assert (compiler_problem() is None) == works


@works_here
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it is for Linux")
@pytest.mark.parametrize(("compiler", "code"), [("gcc", 0), ("/bin/false", 1)])
def test_the_build_of_the_cuda_image_fails_where_triton_cannot_compile(compiler: str, code: int) -> None:
    """Its last step compiles and loads Triton's own code, without a GPU."""
    result = subprocess.run(
        [sys.executable, ROOT / "docker/check_triton.py"],
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert ("Triton compiled and loaded cuda_utils" in result.stdout) == (code == 0)
