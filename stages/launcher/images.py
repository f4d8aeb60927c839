"""The images that stages run in: their base, and the tag that follows from everything an image is built from.

The launcher finds an image by its tag alone. Only what Debian has on the day is not in it: the C compiler of the images
for GPUs. Imports nothing heavy: every stage waits for it.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stages.core.lineage import file_digest, json_digest, short
from stages.core.records import read_settings

STAGE_TARGETS = ("cpu", "cuda")
"""Images that stages run in, by device."""
BELOW_VLLM = {"vllm": "cuda", "vllm-cpu": "cpu"}
"""Images that also have vLLM, in an environment of its own, and the images that they are made from."""
TARGETS = (*STAGE_TARGETS, *BELOW_VLLM)
SOURCE_DATE_EPOCH = "1767225600"
"""2026-01-01: the date of every file in an image, so that two builds do not differ in their time."""
PINS_VARIABLE = "BAKEOFF_PINS"
"""Another file in place of docker/images.yaml, absolute: CI has one for machines without a container registry."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """docker/images.yaml: the image that all others are built on, and flash-attn by choice."""

    image: str
    """Its name, e.g. `python:3.12.14-slim-trixie`."""
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|local)$")]
    """The digest that `docker pull` prints; local: an image of this machine, by its name."""
    python: str
    """Its Python, e.g. "3.12.14": wheels are chosen for it before there is an image to ask."""
    glibc: str
    """Its C library, e.g. "2.41": the newest that a wheel may require."""
    flash_attn: bool = False
    """Whether the images for GPUs have flash-attn, compiled in `cuda_devel`."""
    cuda_devel: str = ""
    """The image that compiles flash-attn, by digest."""

    @property
    def reference(self) -> str:
        """`python@sha256:...`: podman refuses a tag and a digest at once."""
        return self.image if self.digest == "local" else f"{self.image.rpartition(':')[0]}@{self.digest}"


def read_base(workspace_dir: Path) -> Base:
    """Raises UserError if docker/images.yaml does not pin what it names."""
    return read_settings(Base, workspace_dir / os.environ.get(PINS_VARIABLE, "docker/images.yaml"))


def image_reference(workspace_dir: Path, target: str) -> str:
    """The name of the image of this tree for `target`, e.g. `bakeoff:cpu-3f9c0d12ab34`."""
    return f"bakeoff:{target}-{short(json_digest(image_inputs(workspace_dir, target)))}"


def image_inputs(workspace_dir: Path, target: str) -> dict[str, str]:
    """Everything that the image is built from: files by their digest, the rest as it is."""
    files = ["Dockerfile", "install", f"{below(target)}.lock", "installer.lock", "llamacpp.lock"]
    files += ["check_triton.py"] if below(target) == "cuda" else []
    files += [f"{target}.lock"] if target in BELOW_VLLM else []
    files += ["torchvision_on_cpu.py"] if target == "vllm-cpu" else []
    base = read_base(workspace_dir)
    flash_attn = base.flash_attn and below(target) == "cuda"
    files += ["flash-attn.lock"] if flash_attn else []
    inputs = {f"docker/{name}": file_digest(workspace_dir / "docker" / name) for name in files}
    torch = {"torch": cpu_torch(workspace_dir)} if below(target) == "cpu" else {}
    cuda = {"cuda_devel": base.cuda_devel} if flash_attn else {}
    return inputs | torch | cuda | {"date": SOURCE_DATE_EPOCH, "base": base.reference}


def below(target: str) -> str:
    """The image with the stages' own packages: the target itself, or the one that vLLM's is made from."""
    return BELOW_VLLM.get(target, target)


def cpu_torch(workspace_dir: Path) -> str:
    """The version of torch's CPU build, the one package outside the locks, e.g. "2.13.0+cpu"."""
    project = tomllib.loads((workspace_dir / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = (name.removeprefix("torch==") for name in project["dependencies"] if name.startswith("torch=="))
    return f"{version}+cpu"
