"""Which images stages run in: their pins, and the tag that follows from all that an image is built from.

The launcher finds an image by its tag alone, so whatever an image is built from is in its tag. Only what Debian has on
the day is there by name alone: the stand-in base, and what the images but cpu have beside it. Light to import: every
stage waits for it.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stages.core.documents import read_settings
from stages.core.lineage import file_digest

STAGE_TARGETS = ("cpu", "cuda")
"""Images that stages run in, by device."""
BELOW_VLLM = {"vllm": "cuda", "vllm-cpu": "cpu"}
"""Images that have vLLM too, in an environment of its own, and those that they are made from."""
TARGETS = (*STAGE_TARGETS, *BELOW_VLLM)

SOURCE_DATE_EPOCH = "1767225600"
"""2026-01-01: the date of all that is put into an image, so that two builds do not differ in when they ran."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """An image below the packages: one that stages can run on, or that flash-attn is compiled in."""

    image: str
    """For people: `python:3.12.14-slim-trixie`."""
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    python: str = ""
    """Its Python, e.g. "3.12.14": wheels are chosen for it before there is an image to ask."""
    glibc: str = ""
    """Its C library, e.g. "2.41": the newest that a wheel may ask for."""
    packages: tuple[str, ...] = ()
    """Debian's, where it is the stand-in, which is made of them for want of a registry."""

    def __post_init__(self) -> None:
        if not (self.digest or self.packages):
            raise ValueError("needs a digest, as `docker pull` prints it")

    @property
    def reference(self) -> str:
        """By its content, `python@sha256:...`: podman refuses a tag and a digest at once. The stand-in's is its tag."""
        return f"{self.image.rpartition(':')[0]}@{self.digest}" if self.digest else self.image

    @property
    def is_stand_in(self) -> bool:
        return bool(self.packages)


@dataclass(frozen=True, kw_only=True)
class Bases:
    python: Base
    stand_in: Annotated[Base, Field(alias="stand-in")]
    cuda_devel: Annotated[Base, Field(alias="cuda-devel")]
    """Where flash-attn is compiled."""


@dataclass(frozen=True, kw_only=True)
class Pins:
    """docker/images.yaml."""

    bases: Bases
    flash_attn: bool
    """Whether the images for GPUs have it."""


def read_pins(workspace_dir: Path) -> Pins:
    """Raises UserError where docker/images.yaml does not pin what it names."""
    return read_settings(Pins, workspace_dir / "docker/images.yaml")


def image_references(workspace_dir: Path, target: str) -> tuple[str, ...]:
    """The images that a stage of this tree may run in, the preferred one first: on the pinned base, on the stand-in."""
    pins = read_pins(workspace_dir)
    return tuple(
        image_reference(workspace_dir, target, pins, base) for base in (pins.bases.python, pins.bases.stand_in)
    )


def image_reference(workspace_dir: Path, target: str, pins: Pins, base: Base) -> str:
    """The name of the image of this tree for `target` on `base`, e.g. `bakeoff:cpu-3f9c0d12ab34`."""
    inputs = image_inputs(workspace_dir, target, pins, base)
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"bakeoff:{target}-{digest[:12]}{'-debian' if base.is_stand_in else ''}"


def image_inputs(workspace_dir: Path, target: str, pins: Pins, base: Base) -> dict[str, str]:
    """All that the image is built from: files by their digest, the rest as it is."""
    flash_attn = has_flash_attn(target, pins, base)
    files = ["Dockerfile", "install", f"{below(target)}.lock", "installer.lock"]
    files += ["flash-attn.lock"] if flash_attn else []
    files += ["check_triton.py"] if below(target) == "cuda" else []
    files += [f"{target}.lock"] if target in BELOW_VLLM else []
    files += ["torchvision_on_cpu.py"] if target == "vllm-cpu" else []
    inputs = {f"docker/{name}": file_digest(workspace_dir / "docker" / name) for name in files}
    inputs["date"] = SOURCE_DATE_EPOCH
    inputs["base"] = " ".join((base.reference, *base.packages))
    if flash_attn:
        inputs["cuda-devel"] = pins.bases.cuda_devel.reference
    if below(target) == "cpu":
        inputs["torch"] = cpu_torch(workspace_dir)
    return inputs


def below(target: str) -> str:
    """The image that it is or is made from, with a stage's own packages."""
    return BELOW_VLLM.get(target, target)


def has_flash_attn(target: str, pins: Pins, base: Base) -> bool:
    """Whether the image has flash-attn. The stand-in's never: what it is compiled in comes from a registry too."""
    return pins.flash_attn and below(target) == "cuda" and not base.is_stand_in


def cpu_torch(workspace_dir: Path) -> str:
    """torch's CPU build, the one package outside the locks, e.g. "2.13.0+cpu"."""
    project = tomllib.loads((workspace_dir / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = (name.removeprefix("torch==") for name in project["dependencies"] if name.startswith("torch=="))
    return f"{version}+cpu"
