"""Where Triton keeps what it compiles: below .bakeoff, so that a kernel is compiled once and not in every stage."""

import hashlib
import json
import sys
from pathlib import Path

from stages.kit.launcher.machine import installed_packages


def triton_dir(image: tuple[str, str] | None, repository_dir: Path) -> Path:
    """A folder for each image, and without one for each set of packages of this interpreter.

    image: name and digest.
    """
    if image is not None:
        name = image[1].removeprefix("sha256:")[:12]
    else:
        packages = [sys.version, installed_packages(sys.path)]
        name = f"process-{hashlib.sha256(json.dumps(packages).encode()).hexdigest()[:12]}"
    return repository_dir / ".bakeoff/triton" / name
