"""Makes the images that stages run in: behind `make image`, `make wheelhouse` and `make base-image`.

docker and podman keep their images; Apptainer's is a file, .bakeoff/images/TARGET-HASH.sif.
Reads docker/images.yaml, docker/Dockerfile and the locks. A package index is needed for the wheelhouse only, and a
network in the build for all but cpu: a compiler is Debian's, and flash-attn's build wants one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from stages.core.errors import UserError
from stages.kit.launcher import images
from stages.kit.launcher.apptainer import IMAGES_DIR, sif_path
from stages.kit.launcher.docker import Client
from stages.kit.launcher.engines import CONTAINER_ENGINES
from stages.kit.launcher.images import SOURCE_DATE_EPOCH, Base, Pins
from tools.image.sif import run_once, scratch_dir, sif_of_base, sif_of_image, unpack_base
from tools.image.wheelhouse import WheelPlatform, make_wheelhouse, wheelhouse_digest

WORKSPACE_DIR = Path(__file__).resolve().parents[2]

MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
"""Names that engines and operating systems give a machine, to those of wheels."""

STAND_IN_TAR = "base.tar"
"""Beside Apptainer's images: the files of the stand-in."""

BUILD_ENVIRONMENT = {
    "DOCKER_BUILDKIT": "1",
    # A signed statement of when and where an image was built would make each build another image.
    "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
}


def known_machine(client: Client | None) -> str:
    """The machine of an engine's containers, or this one: x86_64 or aarch64.

    Raises UserError where the engine does not answer, or where the locks have no wheels for its machine.
    """
    if client is None:
        name = platform.machine()
    elif problem := client.problem():
        raise UserError(f"{client.program} does not answer: {problem}. Start it, or name another: ENGINE=podman")
    else:
        question = ("info", "{{.Host.Arch}}") if client.is_podman else ("version", "{{.Server.Arch}}")
        name = client.ask(question[0], "--format", question[1]).stdout.strip()
    if name.lower() not in MACHINES:
        raise UserError(f"containers run on {name} here; the locked packages are published for x86_64 and aarch64")
    return MACHINES[name.lower()]


def find_engine(program: str | None) -> Client | None:
    """The engine that is asked for, else the first there is; None is Apptainer. Raises UserError without it."""
    found = next(filter(shutil.which, [program] if program else CONTAINER_ENGINES), None)
    if found is None:
        raise UserError(
            f"no {program or 'docker, podman or apptainer'} is on the PATH. Install one (Apptainer: apptainer.org; "
            "Debian: apt install apptainer), or name it: make image ENGINE=/path/to/docker"
        )
    return None if found == "apptainer" else Client(found)


def find_builder(client: Client) -> tuple[Client, tuple[str, ...]]:
    """The client to build with, of those of that name on the PATH, and its command. Raises UserError without one.

    docker's client builds by itself before version 23, and with its plugin buildx since.
    """
    if client.is_podman:
        return client, ("build", "--timestamp", SOURCE_DATE_EPOCH, "--pull=never")
    paths = [shutil.which(client.program), *(shutil.which(client.program, path=path) for path in os.get_exec_path())]
    candidates = [Client(path) for path in dict.fromkeys(filter(None, paths))]
    for candidate in candidates:
        if candidate.answers("buildx", "version"):
            return candidate, ("buildx", "build", "--load")
        if int(candidate.ask("version", "--format", "{{.Client.Version}}").stdout.partition(".")[0]) < 23:
            return candidate, ("build",)
    raise UserError(
        f"{' and '.join(candidate.program for candidate in candidates)} cannot build: the plugin buildx is missing. "
        f"Install it (Debian: apt install docker-buildx; Docker's own packages: docker-buildx-plugin), "
        f"or: make image ENGINE=podman"
    )


def choose_base(client: Client, pins: Pins) -> Base:
    """The pinned base where the engine has it or can pull it, else the stand-in. Raises UserError without either."""
    python, stand_in = pins.bases.python, pins.bases.stand_in
    if client.image_id(python.reference):
        return python
    say(f"pulling {python.image}")
    if client.show("pull", "--quiet", python.reference):
        return python
    if client.image_id(stand_in.reference):
        say(f"using the stand-in {stand_in.image}: {python.image} is not here and cannot be pulled")
        return stand_in
    raise UserError(
        f"{python.image} is not on this machine and cannot be pulled, for the reason above. Load it "
        f"(docker load) or make a stand-in from Debian's packages: make base-image"
    )


def wheelhouse_dir(target: str) -> Path:
    """Where docker/Dockerfile finds the wheelhouse of `target`."""
    return WORKSPACE_DIR / ".bakeoff/wheelhouse" / target


def build_wheelhouse(target: str, pins: Pins, base: Base, machine: str) -> None:
    """Make the wheelhouse of `target`'s image on `base`."""
    folder = wheelhouse_dir(target)
    if target in images.BELOW_VLLM:
        build_wheelhouse(images.below(target), pins, base, machine)
    flash_attn = target in images.STAGE_TARGETS and images.has_flash_attn(target, pins, base)
    names = [target, "installer", *(["flash-attn"] if flash_attn else [])]
    locks = [WORKSPACE_DIR / f"docker/{name}.lock" for name in names]
    wheel_platform = WheelPlatform(python=base.python, glibc=base.glibc, machine=machine)
    cpu_torch = images.cpu_torch(WORKSPACE_DIR) if images.below(target) == "cpu" else None
    made = make_wheelhouse(folder, locks, cpu_torch, wheel_platform)
    sizes = [path.stat().st_size for path in folder.iterdir()]
    say(
        f"the wheelhouse of {target}, {len(sizes)} files, {sum(sizes) / 1e9:.1f} GB, for Python "
        f"{wheel_platform.python_minor} on {machine}, {'is complete' if made else 'was complete already'}"
    )


def build_options(target: str, pins: Pins, base: Base, max_jobs: int) -> list[str]:
    """Options of the build of `target`'s image on `base`: the pins, and the image's labels."""
    reference = images.image_reference(WORKSPACE_DIR, target, pins, base)
    arguments = {
        "PYTHON_IMAGE": base.reference,
        "CUDA_DEVEL_IMAGE": pins.bases.cuda_devel.reference,
        "FLASH_ATTN": str(int(images.has_flash_attn(target, pins, base))),
        "MAX_JOBS": str(max_jobs),
        "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
    }
    wheelhouses = dict.fromkeys((images.below(target), target))
    labels = {
        "org.opencontainers.image.title": f"bakeoff {target}",
        "org.opencontainers.image.version": reference.rpartition(":")[2],
        "org.opencontainers.image.base.name": base.image,
        "bakeoff.inputs": json.dumps(images.image_inputs(WORKSPACE_DIR, target, pins, base), sort_keys=True),
        "bakeoff.wheelhouse": " ".join(wheelhouse_digest(wheelhouse_dir(name)) for name in wheelhouses),
    }
    if not base.is_stand_in:
        labels["org.opencontainers.image.base.digest"] = base.reference.rpartition("@")[2]
    return [
        *("--file", str(WORKSPACE_DIR / "docker/Dockerfile"), "--target", target, "--tag", reference),
        *(("--network", "none") if target == "cpu" else ()),
        *(option for name, value in arguments.items() for option in ("--build-arg", f"{name}={value}")),
        *(option for name, value in labels.items() for option in ("--label", f"{name}={value}")),
    ]


def build_image(client: Client, target: str, max_jobs: int) -> str:
    """Build the image of this tree with docker or podman, unless it is there. Returns its name."""
    machine = known_machine(client)
    for reference in images.image_references(WORKSPACE_DIR, target):
        if client.image_id(reference):
            say(f"{reference} is built already")
            return reference
    builder, command = find_builder(client)
    pins = images.read_pins(WORKSPACE_DIR)
    base = choose_base(client, pins)
    build_wheelhouse(target, pins, base, machine)
    reference = images.image_reference(WORKSPACE_DIR, target, pins, base)
    say(f"building {reference} on {base.image}")
    options = build_options(target, pins, base, max_jobs)
    if not builder.show(*command, *options, str(WORKSPACE_DIR), **BUILD_ENVIRONMENT):
        without = "; without flash-attn: flash_attn: false in docker/images.yaml" if "FLASH_ATTN=1" in options else ""
        raise UserError(f"{reference} was not built, for the reason above{without}")
    size = int(client.ask("image", "inspect", "--format", "{{.Size}}", reference).stdout)
    say(f"{reference} is built, {size / 1e9:.1f} GB")
    return reference


def make_sif(target: str, max_jobs: int) -> None:
    """Make Apptainer's image of this tree, unless it is there.

    From the image of docker or podman, which is built for it where one of them works; else of the pinned base, pulled
    by Apptainer, or of the stand-in.
    """
    images_dir = WORKSPACE_DIR / IMAGES_DIR
    for reference in images.image_references(WORKSPACE_DIR, target):
        if (path := sif_path(images_dir, reference)).is_file():
            say(f"{path} is built already")
            return
    clients = [Client(name) for name in ("docker", "podman") if shutil.which(name)]
    if client := next((client for client in clients if client.problem() is None), None):
        reference = build_image(client, target, max_jobs)
        path = sif_path(images_dir, reference)
        say(f"making {path} from {client.program}'s image")
        sif_of_image(client, reference, path)
    else:
        path = make_sif_of_base(target, images_dir)
    run_once(path)
    say(f"{path} is built, {path.stat().st_size / 1e9:.1f} GB")


def make_sif_of_base(target: str, images_dir: Path) -> Path:
    """The same without docker and podman. Raises UserError where there is no base, and for cuda."""
    if target != "cpu":
        raise UserError(
            f"the image of {target} is built by docker or podman, as root would install its C compiler, and flash-attn "
            f"is compiled in another image. Where one of them is: make image ENGINE=apptainer TARGET={target}. "
            f"Then copy {IMAGES_DIR}/{target}-* here"
        )
    pins, machine = images.read_pins(WORKSPACE_DIR), known_machine(None)
    with scratch_dir(images_dir) as work_dir:
        say(f"pulling {pins.bases.python.image}")
        base = unpack_base(pins.bases, images_dir / STAND_IN_TAR, work_dir)
        if base is None:
            raise UserError(
                f"{pins.bases.python.image} cannot be pulled, for the reason above. Make a stand-in from Debian's "
                "packages: make base-image ENGINE=apptainer"
            )
        build_wheelhouse(target, pins, base, machine)
        path = sif_path(images_dir, images.image_reference(WORKSPACE_DIR, target, pins, base))
        say(f"making {path} on {base.image}")
        sif_of_base(WORKSPACE_DIR / "docker", wheelhouse_dir(target), path, work_dir)
    return path


@click.group()
def main() -> None:
    """Make the images that stages run in."""


engine_option = click.option(
    "--engine", envvar="ENGINE", help="docker, podman or apptainer; not given: the first there is."
)
target_option = click.option(
    "--target", envvar="TARGET", required=True, type=click.Choice(images.TARGETS), help="Whose packages."
)


@main.command()
@engine_option
@target_option
@click.option("--max-jobs", envvar="MAX_JOBS", default=4, help="Compilers at once, for flash-attn; 6 GB each.")
def image(engine: str | None, target: str, max_jobs: int) -> None:
    """Build the image of this tree, unless it is built already."""
    if client := find_engine(engine):
        build_image(client, target, max_jobs)
    else:
        make_sif(target, max_jobs)


@main.command()
@engine_option
@target_option
def wheelhouse(engine: str | None, target: str) -> None:
    """Fetch every package of an image, for a machine without a package index."""
    pins = images.read_pins(WORKSPACE_DIR)
    try:
        client = find_engine(engine)
        machine, base = known_machine(client), choose_base(client, pins) if client else pins.bases.python
    except UserError as error:
        if engine:
            raise
        machine, base = known_machine(None), pins.bases.python
        say(f"choosing wheels for {base.image}, as there is no engine to ask: {error.message}")
    build_wheelhouse(target, pins, base, machine)


@main.command("base-image")
@engine_option
def base_image(engine: str | None) -> None:
    """Make the stand-in for the pinned base, from Debian's packages, where no registry can be reached."""
    client = find_engine(engine)
    stand_in = images.read_pins(WORKSPACE_DIR).bases.stand_in
    suite = stand_in.reference.rpartition(":")[2]
    if not shutil.which("mmdebstrap"):
        raise UserError(
            "mmdebstrap is not installed (Debian, Ubuntu: apt install mmdebstrap). It needs root or unprivileged user "
            f"namespaces, and a mirror of Debian {suite}"
        )
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[known_machine(client)]
    images_dir = WORKSPACE_DIR / IMAGES_DIR
    images_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=images_dir) as work_dir:
        root_path = Path(work_dir, "root.tar")
        command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(stand_in.packages)}"]
        command += [f"--architectures={architecture}", suite, str(root_path)]
        say(" ".join(command))
        if subprocess.run(command, env=os.environ | {"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}, check=False).returncode:
            raise UserError("mmdebstrap failed, for the reason above. It needs root or unprivileged user namespaces")
        if client is None:
            root_path.rename(images_dir / STAND_IN_TAR)
        elif not client.show("import", str(root_path), stand_in.reference):
            raise UserError(f"{client.program} could not import what mmdebstrap made, for the reason above")
    say(f"{stand_in.reference} is made; next: make image")


def say(text: str) -> None:
    """A fact, on standard error, where pip and the engine speak too."""
    print(f"image: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(prog_name="python -m tools.image")
