"""Makes the SIF that Apptainer runs: of the image that docker or podman has, else of a base and the wheelhouse.

Nothing here needs root: a container in which the packages are installed writes to a folder of the caller's.
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
from stages.kit.launcher.apptainer import SEAL, digest_path
from stages.kit.launcher.docker import Client
from stages.kit.launcher.images import SOURCE_DATE_EPOCH, Base, Bases
from stages.kit.launcher.mounts import Mount

COMPRESSION = ("--mksquashfs-args", "-comp zstd -Xcompression-level 1")
"""A quarter of the time of gzip's, and not larger."""


def sif_of_image(client: Client, reference: str, path: Path) -> None:
    """Make it from the archive of an image of docker's or podman's. Raises UserError where one of them fails."""
    with scratch_dir(path.parent) as work_dir:
        if not client.show("save", "--output", str(work_dir / "image.tar"), reference):
            raise UserError(f"{client.program} could not save {reference}, for the reason above")
        # Relative: a colon in a path would end it.
        _make_sif("docker-archive:image.tar", path, work_dir)


def unpack_base(bases: Bases, stand_in_tar: Path, work_dir: Path) -> Base | None:
    """Put a base's files into `root` there: the pinned one's where it can be pulled, else the stand-in's.

    stand_in_tar: the stand-in's files. None where there is neither.
    """
    if _apptainer("build", "--sandbox", "root", f"docker://{bases.python.reference}", work_dir=work_dir):
        return bases.python
    if not stand_in_tar.is_file():
        return None
    (work_dir / "root").mkdir()
    # Devices are root's to make; a container gets its own.
    command = ["tar", "--extract", "--file", str(stand_in_tar), "--directory", "root", "--exclude=./dev/*"]
    subprocess.run(command, cwd=work_dir, check=True)
    return bases.stand_in


def sif_of_base(docker_dir: Path, wheelhouse_dir: Path, path: Path, work_dir: Path) -> None:
    """Install the packages of target cpu on the base in `root`, as docker/Dockerfile does, and make its image of it.

    Raises UserError where Apptainer fails.
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
    """`NAME=VALUE` of each variable that the image cpu sets."""
    stage = re.search(r"^FROM python AS runtime$(.*?)^FROM", dockerfile, re.MULTILINE | re.DOTALL)
    assert stage is not None
    instructions = re.findall(r"^ENV ((?:.*\\\n)*.*)", stage[1], re.MULTILINE)
    return shlex.split(" ".join(instruction.replace("\\\n", " ") for instruction in instructions))


def run_once(path: Path) -> None:
    """Raises UserError where a container of this SIF does not start here."""
    if not _apptainer(
        "exec", *SEAL, "--net", "--network", "none", str(path), "python", "--version", work_dir=path.parent
    ):
        raise UserError(
            f"{path} is built, but Apptainer cannot run it on this machine, for the reason above; it needs user "
            "namespaces, or an installation with setuid"
        )


@contextmanager
def scratch_dir(images_dir: Path) -> Iterator[Path]:
    """A folder for what comes and goes meanwhile, on the disk of the images: it takes more than they do."""
    images_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=images_dir) as work_dir:
        yield Path(work_dir)


def _make_sif(source: str, path: Path, work_dir: Path) -> None:
    """Make a SIF and note its digest; it appears when both are whole."""
    made = work_dir / path.name
    if not _apptainer("build", *COMPRESSION, str(made), source, work_dir=work_dir):
        raise UserError(f"{path} was not built, for the reason above")
    digest_path(path).write_text(f"{file_digest(made)}  {path.name}\n", encoding="utf-8")
    made.rename(path)


def _apptainer(*args: str, work_dir: Path) -> bool:
    """Run one of its commands in sight of the user; whether it succeeded."""
    assert shutil.which("apptainer")
    own = {"APPTAINER_TMPDIR": str(work_dir), "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
    return subprocess.run(["apptainer", *args], cwd=work_dir, env=os.environ | own, check=False).returncode == 0
