"""Makes the image that stages run in, unless it is there already.

docker and podman keep their images; Apptainer's is a file, .bakeoff/images/TARGET-HASH.sif, made from one of theirs.
Reads docker/images.yaml, docker/Dockerfile and the locks. A package index is needed for the wheelhouse only, and a
network in the build for all but cpu: a compiler is Debian's.

Run     make image TARGET=cpu ENGINE=docker
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from stages.core.errors import UserError
from stages.core.lineage import file_digest
from stages.launcher import images
from stages.launcher.apptainer import IMAGES_DIR, digest_path, sif_path
from stages.launcher.docker import Client
from stages.launcher.engines import CONTAINER_ENGINES
from stages.launcher.images import SOURCE_DATE_EPOCH
from tools.image.wheelhouse import WheelPlatform, make_wheelhouse, wheelhouse_digest

WORKSPACE_DIR = Path(__file__).resolve().parents[2]
MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
"""A machine's name in wheels, by its names in engines and operating systems."""
BUILD_ENVIRONMENT = {
    "DOCKER_BUILDKIT": "1",
    # A signed statement of when and where an image was built would make each build another image.
    "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
}
COMPRESSION = ("--mksquashfs-args", "-comp zstd -Xcompression-level 1")
"""Compression of a SIF: takes a quarter of gzip's time, and the file is not larger."""


@click.command(help=__doc__)
@click.option("--engine", envvar="ENGINE", type=click.Choice(list(CONTAINER_ENGINES)), help="Default: the first found.")
@click.option("--target", envvar="TARGET", required=True, type=click.Choice(images.TARGETS), help="The image.")
def main(engine: str | None, target: str) -> None:
    program = next(filter(shutil.which, [engine] if engine else CONTAINER_ENGINES), None)
    if program is None:
        raise UserError(
            f"no {engine or ' or '.join(CONTAINER_ENGINES)} is on the PATH; install one (Apptainer: apptainer.org; "
            "Debian: apt install apptainer)"
        )
    if program == "apptainer":
        make_sif(target)
    else:
        build_image(Client(program), target)


def build_image(client: Client, target: str) -> str:
    """Build the image of this tree with docker or podman, unless it is there. Returns its name."""
    if problem := client.problem():
        raise UserError(
            f"{client.program} does not respond: {problem.rstrip(' ?.')}. Start it, or name another: ENGINE=podman"
        )
    reference, base = images.image_reference(WORKSPACE_DIR, target), images.read_base(WORKSPACE_DIR)
    if client.image_id(reference):
        say(f"{reference} is built already")
        return reference
    command: tuple[str, ...] = ("build",)
    if client.is_podman:
        command = ("build", "--timestamp", SOURCE_DATE_EPOCH, "--pull=never")
    elif client.succeeds("buildx", "version"):  # since version 23 docker's client builds with this plugin only
        command = ("buildx", "build", "--load")
    machine = client.info.get("Architecture") or client.info.get("host", {}).get("arch", "an unknown machine")
    if machine not in MACHINES:
        raise UserError(f"containers run on {machine} here; the locked packages are published for x86_64 and aarch64")
    if not client.image_id(base.reference):
        say(f"pulling {base.image}")
        if not client.show("pull", "--quiet", base.reference):
            raise UserError(
                f"{base.image} is not on this machine and cannot be pulled, for the reason above; build {reference} on "
                "another machine and load it here: docker save, docker load"
            )
    platform = WheelPlatform(python=base.python, glibc=base.glibc, machine=MACHINES[machine])
    for name in packages_of(target):
        torch = images.cpu_torch(WORKSPACE_DIR) if images.below(target) == "cpu" else None
        own = (name, "llamacpp") if name in ("cpu", "cuda") else (name,)
        locks = [WORKSPACE_DIR / f"docker/{lock}.lock" for lock in (*own, "installer")]
        made = make_wheelhouse(wheelhouse_dir(name), locks, torch, platform)
        say(f"the wheelhouse of {name} for {machine} {'is complete' if made else 'was complete already'}")
    say(f"building {reference} on {base.image}")
    if not client.show(*command, *build_options(target, base, reference), str(WORKSPACE_DIR), **BUILD_ENVIRONMENT):
        raise UserError(f"{reference} was not built, for the reason above")
    say(f"{reference} is built")
    return reference


def packages_of(target: str) -> list[str]:
    """The targets of an image's packages: vLLM's have those of the one below too."""
    return list(dict.fromkeys((images.below(target), target)))


def wheelhouse_dir(target: str) -> Path:
    """The wheelhouse's folder, in which docker/Dockerfile finds it."""
    return WORKSPACE_DIR / ".bakeoff/wheelhouse" / target


def build_options(target: str, base: images.Base, reference: str) -> list[str]:
    """Options of the build: the base, and the image's labels."""
    inputs = images.image_inputs(WORKSPACE_DIR, target)
    arguments = {"PYTHON_IMAGE": base.reference, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
    if "cuda_devel" in inputs:
        arguments |= {"FLASH_ATTN": "true", "CUDA_DEVEL_IMAGE": inputs["cuda_devel"]}
    labels = {
        "org.opencontainers.image.title": f"bakeoff {target}",
        "org.opencontainers.image.version": reference.rpartition(":")[2],
        "org.opencontainers.image.base.name": base.image,
        "org.opencontainers.image.base.digest": base.digest,
        "bakeoff.inputs": json.dumps(inputs, sort_keys=True),
        "bakeoff.wheelhouse": " ".join(wheelhouse_digest(wheelhouse_dir(name)) for name in packages_of(target)),
    }
    return [
        *("--file", str(WORKSPACE_DIR / "docker/Dockerfile"), "--target", target, "--tag", reference),
        *(("--network", "none") if target == "cpu" else ()),
        *(option for name, value in arguments.items() for option in ("--build-arg", f"{name}={value}")),
        *(option for name, value in labels.items() for option in ("--label", f"{name}={value}")),
    ]


def make_sif(target: str) -> None:
    """Make Apptainer's image of this tree from the image of docker or podman, which is built first, unless it is there.

    Raises UserError if neither of them works here.
    """
    path = sif_path(WORKSPACE_DIR / IMAGES_DIR, images.image_reference(WORKSPACE_DIR, target))
    if path.is_file():
        say(f"{path} is built already")
        return
    clients = [Client(name) for name in CONTAINER_ENGINES if name != "apptainer" and shutil.which(name)]
    client = next((client for client in clients if client.problem() is None), None)
    if client is None:
        raise UserError(
            f"an image for Apptainer is made from one of docker or podman, and neither works here. On a machine with "
            f"one of them: make image ENGINE=apptainer TARGET={target}. Then copy {IMAGES_DIR}/{target}-* here"
        )
    reference = build_image(client, target)
    say(f"making {path} from {client.program}'s image")
    path.parent.mkdir(parents=True, exist_ok=True)
    # On the disk of the images: it takes more room than they do.
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        made = Path(name, path.name)
        if not client.show("save", "--output", f"{name}/image.tar", reference):
            raise UserError(f"{client.program} could not save {reference}, for the reason above")
        # Relative: a colon in a path would end it.
        command = ["apptainer", "build", *COMPRESSION, str(made), "docker-archive:image.tar"]
        own = {"APPTAINER_TMPDIR": name, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
        if subprocess.run(command, cwd=name, env=os.environ | own, check=False).returncode != 0:
            raise UserError(f"{path} was not built, for the reason above")
        digest_path(path).write_text(f"{file_digest(made)}  {path.name}\n", encoding="utf-8")
        made.rename(path)  # it appears when both are complete
    say(f"{path} is built, {path.stat().st_size / 1e9:.1f} GB")


def say(text: str) -> None:
    """Print a line to standard error, like pip and the engine."""
    print(f"image: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(prog_name="python -m tools.image")
