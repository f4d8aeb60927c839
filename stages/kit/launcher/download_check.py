"""Refuses to download a base of many GB for a run that this machine has no GPU for.

DVC does not tell a stage which targets were asked for, so they are read from DVC's command line. Whoever asks for
`base@...` and `prepare@...` alone only wants to download, as on a login node, and is let through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from stages.core.errors import UserError
from stages.core.params.schema import Params
from stages.kit.launcher.gpus import GpuState, leasable, read_gpus
from stages.kit.launcher.machine import cuda_of_torch
from stages.kit.launcher.pipeline import Pipeline

FETCHING = ("base", "prepare", "mix")
"""Stages that need no GPU, nor anything that a GPU has to make first."""
LARGE = ("hub", "random")
"""Kinds of sources whose download or making takes long."""


def refuse_download_without_gpus(
    source: str,
    params: Params,
    pipeline: Pipeline,
    *,
    command_line: Sequence[str],
    in_container: bool,
    visible: str | None,
    read_gpus: Callable[[], Sequence[GpuState]] = read_gpus,
    cuda_of_torch: Callable[[], str | None] = cuda_of_torch,
) -> None:
    """Raises UserError where the active profile wants GPUs that this machine does not have, whoever uses them now.

    source: of the stage that is about to start, e.g. `hub:OWNER/NAME@REVISION`; "" for none.
    command_line: of the DVC that started it.
    in_container: whether stages run in an image, which has its own torch.
    visible: CUDA_VISIBLE_DEVICES.
    """
    device = params.active.device
    if device.kind == "cpu" or source.partition(":")[0] not in LARGE or fetches_only(command_line):
        return
    try:
        leasable(read_gpus(), visible=visible, count=device.count, holder=f"profile {params.profile}")
    except UserError as error:
        reason = error.message
    else:
        if in_container or cuda_of_torch() is not None:
            return
        reason = (
            f"profile {params.profile} wants a GPU, and torch in .venv is a build for CPUs; "
            f"install the other one with: make setup TARGET=cuda"
        )
    raise UserError(
        f"{reason}\nSo nothing is fetched from {source}. To fetch only, as on a login node: "
        f"{fetch_command(params, pipeline, command_line)}"
    )


def fetches_only(command_line: Sequence[str]) -> bool:
    """Whether a command of DVC's asks for stages that fetch and prepare, and for nothing else.

    A target is `base@vlm` or `dvc.yaml:base@vlm`; a command without any means the whole pipeline.
    """
    targets = [found[1] for word in command_line if (found := re.fullmatch(r"(?:[^=]*:)?([a-z]+)@[\w-]+", word))]
    return bool(targets) and set(targets) <= set(FETCHING) and "--downstream" not in command_line


def fetch_command(params: Params, pipeline: Pipeline, command_line: Sequence[str]) -> str:
    """Fetches and prepares all that the profile has, as the person called DVC: by `repro`, or as an experiment."""
    active = params.active
    has = {f"base@{name}" for name in active.bases} | {f"prepare@{name}" for name in active.datasets}
    targets = " ".join(stage.name for stage in pipeline.stages if stage.name in has)
    command = "repro" if "repro" in command_line else f"exp run --temp -S profile={params.profile}"
    return f"dvc {command} {targets}"
