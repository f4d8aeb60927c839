"""The device that is measured."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.core.errors import UserError
from stages.kit.launcher.gpus import leased_gpus, read_gpus
from stages.kit.launcher.process import cuda_of_torch

log = logging.getLogger("stages")

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Device:
    kind: Kind
    name: str
    """As NVIDIA's driver has it, e.g. "NVIDIA H100 80GB HBM3"."""
    uuid: str = ""
    """Value of CUDA_VISIBLE_DEVICES; empty for none."""

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@contextmanager
def device_to_measure(kind: Kind, *, holder: str) -> Iterator[Device]:
    """The one GPU, empty and leased, or this CPU. Raises UserError where there is none, or torch cannot use it."""
    if kind == "cpu":
        yield Device(kind="cpu", name="CPU")
        return
    if not read_gpus():
        raise UserError("there is no NVIDIA GPU here; all of it on this CPU, with tiny models: make gpu ARGS=--dry-run")
    if cuda_of_torch() is None:
        raise UserError("torch is built for CPUs here; install the other build by: make setup TARGET=cuda")
    with leased_gpus(
        1,
        locks_dir=Path(".bakeoff/gpus"),
        holder=holder,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        say=lambda text: log.info("%s", text),
    ) as (gpu,):
        yield Device(kind="cuda", name=gpu.name, uuid=gpu.uuid)
