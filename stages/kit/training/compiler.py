"""The C compiler that Triton needs at run time: it compiles the code that launches its kernels.

Run     python -m stages.kit.training.compiler   prints what is wrong and what to install, or nothing; docker/setup does
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_SOURCE = "#include <stdlib.h>\n#include <Python.h>\nPyObject *answer(void) { return PyLong_FromLong(42); }\n"


def compiler_problem() -> str | None:
    """Why Triton cannot compile for this Python, and what to install, in one line; None where it can.

    Tries what triton/runtime/build.py (3.7.1) does: CC, else gcc, else clang, with Python's own headers.
    """
    problem = _problem_of(os.environ.get("CC", shutil.which("gcc") or shutil.which("clang")))
    return problem and (
        f"{problem}; install what is missing: apt install gcc libc6-dev python3-dev (Debian, Ubuntu), "
        "dnf install gcc python3-devel (Fedora)"
    )


def _problem_of(compiler: str | None) -> str | None:
    if compiler is None:
        return "there is no C compiler (gcc or clang) on the PATH"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "probe.c").write_text(_SOURCE, encoding="utf-8")
        command = [compiler, "probe.c", "-O3", "-shared", "-fPIC", "-o", "probe.so", f"-I{headers}"]
        try:
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            return f"the C compiler {compiler!r} cannot be started ({error.strerror})"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    reason = next((line for line in lines if "error" in line), f"exit code {result.returncode}")
    return f"the C compiler {compiler} cannot compile for {sys.executable} ({reason})"


def main() -> None:
    if problem := compiler_problem():
        print(problem)


if __name__ == "__main__":
    main()
