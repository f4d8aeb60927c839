"""Makes the SIF that Apptainer runs: from an image of docker or podman, or from a base and the wheelhouse.

Needs no root: the container in which the packages are installed writes to a folder of the caller.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.core.errors import UserError
from stages.core.lineage import file_digest
from stages.kit.launcher.apptainer import IMAGES_DIR, SEAL, digest_path
from stages.kit.launcher.container import Mount
from stages.kit.launcher.docker import Client
from stages.kit.launcher.images import SOURCE_DATE_EPOCH, Base

COMPRESSION = ("--mksquashfs-args", "-comp zstd -Xcompression-level 1")
"""Takes a quarter of gzip's time, and the file is not larger."""


def sif_of_image(client: Client, reference: str, path: Path) -> None:
    """Make it from the archive of an image of docker or podman. Raises UserError if one of them fails."""
    with scratch_dir(path.parent) as work_dir:
        if not client.show("save", "--output", str(work_dir / "image.tar"), reference):
            raise UserError(f"{client.program} could not save {reference}, for the reason above")
        # Relative: a colon in a path would end it.
        _make_sif("docker-archive:image.tar", path, work_dir)


def unpack_base(base: Base, work_dir: Path) -> None:
    """Put a base's files into `root` in the folder. Raises UserError if it cannot be pulled."""
    if not _apptainer("build", "--sandbox", "root", f"docker://{base.reference}", work_dir=work_dir):
        raise UserError(
            f"{base.image} cannot be pulled, for the reason above. Build the image on another machine, and copy "
            f"{IMAGES_DIR}/cpu-* here"
        )


def sif_of_base(docker_dir: Path, wheelhouse_dir: Path, path: Path, work_dir: Path) -> None:
    """Install the packages of target cpu on the base in `root`, as docker/Dockerfile does, and make the image from it.

    Raises UserError if Apptainer fails.
    """
    root_dir = work_dir / "root"
    mounts = [Mount(docker_dir, Path("/docker")), Mount(wheelhouse_dir, Path("/wheelhouse"))]
    places = [root_dir / mount.target.name for mount in mounts]
    for place in places:
        place.mkdir()
    installed = _apptainer(
        *("exec", "--writable", *SEAL, "--net", "--network", "none", "--workdir", str(work_dir)),
        *(option for mount in mounts for option in ("--mount", mount.option())),
        *("--env", f"SOURCE_DATE_EPOCH={SOURCE_DATE_EPOCH}", str(root_dir), "bash", "/docker/install", "cpu"),
        work_dir=work_dir,
    )
    if not installed:
        raise UserError("the packages were not installed, for the reason above")
    for folder in (root_dir / "image").iterdir():
        folder.rename(root_dir / folder.name)
    for place in (*places, root_dir / "image"):
        place.rmdir()
    settings_path = root_dir / ".singularity.d/env/90-environment.sh"
    settings_path.parent.mkdir(parents=True, exist_ok=True)
    variables = image_variables((docker_dir / "Dockerfile").read_text(encoding="utf-8"))
    settings_path.write_text("".join(f"export {shlex.quote(variable)}\n" for variable in variables), encoding="utf-8")
    _make_sif("root", path, work_dir)


def image_variables(dockerfile: str) -> list[str]:
    """`NAME=VALUE` for each variable that the Dockerfile sets for the image cpu."""
    stage = re.search(r"^FROM python AS runtime$(.*?)^FROM", dockerfile, re.MULTILINE | re.DOTALL)
    assert stage is not None
    instructions = re.findall(r"^ENV ((?:.*\\\n)*.*)", stage[1], re.MULTILINE)
    return shlex.split(" ".join(instruction.replace("\\\n", " ") for instruction in instructions))


@contextmanager
def scratch_dir(images_dir: Path) -> Iterator[Path]:
    """A temporary folder on the disk of the images: it takes more room than they do."""
    images_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=images_dir) as work_dir:
        yield Path(work_dir)


def _make_sif(source: str, path: Path, work_dir: Path) -> None:
    """Make a SIF and a file with its digest; it appears when both are complete."""
    made = work_dir / path.name
    if not _apptainer("build", *COMPRESSION, str(made), source, work_dir=work_dir):
        raise UserError(f"{path} was not built, for the reason above")
    digest_path(path).write_text(f"{file_digest(made)}  {path.name}\n", encoding="utf-8")
    made.rename(path)


def _apptainer(*args: str, work_dir: Path) -> bool:
    """Run one of its commands with its output shown; returns whether it succeeded."""
    assert shutil.which("apptainer")
    own = {"APPTAINER_TMPDIR": str(work_dir), "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
    return subprocess.run(["apptainer", *args], cwd=work_dir, env=os.environ | own, check=False).returncode == 0
