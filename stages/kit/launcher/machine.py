"""The machine and the packages that a stage runs on, as the process that starts it sees them: on the host, or in the
container.

Read from names and files alone: asking torch, or the packages' metadata, would take as long as some stages do.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from stages.core.cpu import arithmetic, cpu_model
from stages.core.provenance import Machine
from stages.core.threads import usable_cores


def this_machine(environment: Mapping[str, str]) -> Machine:
    """environment: of the stage."""
    return Machine(
        python=platform.python_version(),
        packages=installed_packages(sys.path),
        cuda=cuda_of_torch(),
        system=platform.platform(),
        cpu=cpu_model(),
        arithmetic=arithmetic(environment),
        cores=usable_cores(),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    )


def installed_packages(search_path: Sequence[str]) -> dict[str, str]:
    """Version by name, normalised; of two that are installed the one that is imported.

    From the names of their `NAME-VERSION.dist-info` (packaging.python.org, Recording installed projects).
    """
    found: dict[str, str] = {}
    for folder in search_path:
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return dict(sorted(found.items()))


def cuda_of_torch() -> str | None:
    """The CUDA that torch was built with, as its version.py says; None for a build for CPUs, or where it is missing."""
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = re.search(r"^cuda\b[^=]*= *'([^']+)'", path.read_text(encoding="utf-8"), re.MULTILINE) if path else None
    return found[1] if found else None


def triton_dir(image: tuple[str, str] | None, repository_dir: Path) -> Path:
    """Where Triton keeps what it compiles, so that a kernel is compiled once and not in every stage.

    A folder for each image (name and digest), and without one for each set of packages of this interpreter.
    """
    if image is not None:
        name = image[1].removeprefix("sha256:")[:12]
    else:
        packages = [sys.version, installed_packages(sys.path)]
        name = f"process-{hashlib.sha256(json.dumps(packages).encode()).hexdigest()[:12]}"
    return repository_dir / ".bakeoff/triton" / name
