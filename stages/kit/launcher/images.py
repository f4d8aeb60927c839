"""Which images stages run in: their pins, and the tag that follows from all that an image is built from.

The launcher finds an image by its tag alone, without asking anybody what was built from what; so whatever an image is
built from is in its tag. Only what Debian has on the day is there by name alone: the stand-in base, and the compiler of
cuda. Light to import: it is on the way of every stage.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.errors import UserError

TARGETS = ("cpu", "cuda")

SOURCE_DATE_EPOCH = "1767225600"
"""2026-01-01: the date of all that is put into an image, so that two builds do not differ in when they ran."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Base:
    """An image that stages can run on, below the packages."""

    reference: str
    """By its content, `python@sha256:...`; the stand-in, which is made here, by its tag."""
    title: str
    """For people: `python:3.12.14-slim-trixie`."""
    python: str
    """Its Python, e.g. "3.12.14": wheels are chosen for it before there is an image to ask."""
    glibc: str
    """Its C library, e.g. "2.41": the newest that a wheel may ask for."""
    debian_packages: tuple[str, ...]
    """What it is made from where it is the stand-in, else ()."""

    @property
    def is_stand_in(self) -> bool:
        """Whether it was made from Debian's packages, for want of a registry."""
        return bool(self.debian_packages)


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What docker/images.yaml says."""

    python: Base
    stand_in: Base
    cuda_devel: str
    """Where flash-attn is compiled, by its content."""
    flash_attn: Mapping[str, bool]
    """Target to whether its image has flash-attn."""


def read_pins(workspace_dir: Path) -> Pins:
    """Raises UserError where docker/images.yaml does not pin what it names."""
    from ruamel.yaml import YAML  # not needed where no image is

    images = YAML(typ="safe", pure=True).load((workspace_dir / "docker/images.yaml").read_text(encoding="utf-8"))
    bases = images["bases"]
    return Pins(
        python=_base(bases["python"], _pinned(bases, "python")),
        stand_in=_base(bases["stand-in"], bases["stand-in"]["image"]),
        cuda_devel=_pinned(bases, "cuda-devel"),
        flash_attn={target: images["targets"][target]["flash_attn"] for target in TARGETS},
    )


def image_references(workspace_dir: Path, target: str) -> tuple[str, ...]:
    """The images that a stage of this tree may run in, the preferred one first: on the pinned base, on the stand-in."""
    pins = read_pins(workspace_dir)
    return tuple(image_reference(workspace_dir, target, pins, base) for base in (pins.python, pins.stand_in))


def image_reference(workspace_dir: Path, target: str, pins: Pins, base: Base) -> str:
    """The name of the image of this tree for `target` on `base`, e.g. `bakeoff:cpu-3f9c0d12ab34`."""
    inputs = image_inputs(workspace_dir, target, pins, base)
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"bakeoff:{target}-{digest[:12]}{'-debian' if base.is_stand_in else ''}"


def image_inputs(workspace_dir: Path, target: str, pins: Pins, base: Base) -> dict[str, str]:
    """All that the image is built from: files by their digest, the rest as it is."""
    flash_attn = has_flash_attn(target, pins, base)
    files = ["Dockerfile", "install", f"{target}.lock", "installer.lock", *(["flash-attn.lock"] if flash_attn else [])]
    files += ["check_triton.py"] if target == "cuda" else []
    inputs = {f"docker/{name}": _sha256(workspace_dir / "docker" / name) for name in files}
    inputs["date"] = SOURCE_DATE_EPOCH
    inputs["base"] = " ".join((base.reference, *base.debian_packages))
    if flash_attn:
        inputs["cuda-devel"] = pins.cuda_devel
    if target == "cpu":
        inputs["torch"] = cpu_torch(workspace_dir)
    return inputs


def has_flash_attn(target: str, pins: Pins, base: Base) -> bool:
    """Whether the image has flash-attn. The stand-in's never: what it is compiled in comes from a registry too."""
    return pins.flash_attn[target] and not base.is_stand_in


def cpu_torch(workspace_dir: Path) -> str:
    """torch's CPU build, the one package outside the locks, e.g. "2.13.0+cpu"."""
    project = tomllib.loads((workspace_dir / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = (name.removeprefix("torch==") for name in project["dependencies"] if name.startswith("torch=="))
    return f"{version}+cpu"


def _base(entry: Mapping[str, Any], reference: str) -> Base:
    assert isinstance(entry["glibc"], str), f"docker/images.yaml: glibc {entry['glibc']} needs quotes, or 2.40 is 2.4"
    return Base(
        reference=reference,
        title=entry["image"],
        python=entry["python"],
        glibc=entry["glibc"],
        debian_packages=tuple(entry.get("packages", ())),
    )


def _pinned(bases: Mapping[str, Any], name: str) -> str:
    """`name@digest`: the tag is for people, and podman refuses both at once."""
    digest = str(bases[name].get("digest"))
    if not _DIGEST.fullmatch(digest):
        raise UserError(
            f"docker/images.yaml: bases.{name}.digest is {digest}; sha256: and 64 hex digits were expected, "
            f"as `docker pull {bases[name]['image']}` prints them"
        )
    return f"{bases[name]['image'].rpartition(':')[0]}@{digest}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
