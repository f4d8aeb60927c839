"""Refuses to download a base of many GB for a run that this machine has no GPU for.

DVC does not tell a stage which targets were asked for, so they are read from DVC's command line. Whoever asks for
`base@...` and `prepare@...` alone only wants to download, as on a login node, and is let through.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stages.core.errors import UserError
from stages.core.params.schema import Params
from stages.kit.launcher.gpus import read_gpus
from stages.kit.launcher.leases import leasable
from stages.kit.launcher.machine import cuda_of_torch
from stages.kit.launcher.pipeline import DeclaredStage

FETCHING = {"base", "prepare"}
"""Stages that need no GPU, nor anything that a GPU has to make first."""
LARGE = ("hub", "random")
"""Kinds of sources whose download or making takes long."""


def refuse_download_without_gpus(
    source: str,
    params: Params,
    stages: Sequence[DeclaredStage],
    *,
    command_line: Sequence[str],
    in_container: bool,
    visible: str | None,
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
        if in_container or cuda_of_torch() is not None:
            return
        reason = (
            f"profile {params.profile} wants a GPU, and torch in .venv is a build for CPUs; "
            f"install the other one with: make setup TARGET=cuda"
        )
    except UserError as error:
        reason = error.message
    # All that the profile has, fetched in the way the person called DVC: by `repro`, or as an experiment.
    has = {f"base@{name}" for name in params.active.bases} | {f"prepare@{name}" for name in params.active.datasets}
    targets = " ".join(stage.name for stage in stages if stage.name in has)
    command = "repro" if "repro" in command_line else f"exp run --temp -S profile={params.profile}"
    raise UserError(
        f"{reason}\nSo nothing is fetched from {source}. To fetch only, as on a login node: dvc {command} {targets}"
    )


def fetches_only(command_line: Sequence[str]) -> bool:
    """Whether a command of DVC's asks for stages that fetch and prepare, and for nothing else.

    A target is `base@vlm` or `dvc.yaml:base@vlm`; a command without any means the whole pipeline.
    """
    targets = {found[1] for word in command_line if (found := re.fullmatch(r"(?:[^=]*:)?([a-z]+)@[\w-]+", word))}
    return bool(targets) and targets <= FETCHING and "--downstream" not in command_line
