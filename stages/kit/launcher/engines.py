"""The engines that run stages, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from stages.core.errors import UserError
from stages.kit.evaluation.vllm.environment import installed
from stages.kit.launcher.apptainer import ApptainerEngine
from stages.kit.launcher.container import NotUsable
from stages.kit.launcher.docker import ContainerEngine
from stages.kit.launcher.images import BELOW_VLLM, below
from stages.kit.launcher.pipeline import Request
from stages.kit.launcher.process import Ended, Image, ProcessEngine


class Engine(Protocol):
    """Runs stages, each in a process of its own."""

    @property
    def name(self) -> str:
        """The name that records have."""

    @property
    def image(self) -> Image | None:
        """The image of its containers; None without containers."""

    def run(self, request: Request) -> Ended:
        """Run the stage to its end. Raises UserError if it cannot be started."""


CONTAINER_ENGINES: dict[str, type[ContainerEngine | ApptainerEngine]] = {
    "docker": ContainerEngine,
    "podman": ContainerEngine,
    "apptainer": ApptainerEngine,
}
"""Engines with containers by the names of their programs, in the order in which `auto` tries them. `find(name,
workspace, an image's target)` gives the engine or raises NotUsable."""
ENGINES = (*CONTAINER_ENGINES, "process", "auto")


def choose_engine(name: str, *, workspace_dir: Path, target: str, say: Callable[[str], None]) -> Engine:
    """The engine of that name; for auto the first one that can run a stage of this checkout, which it logs.

    target: the image that a container would need.
    Raises UserError if there is no such engine, if an engine chosen by name cannot run the stage, and if the engine is
    a process without vLLM and the stage needs it.
    """
    if name not in ENGINES:
        raise UserError(
            f"BAKEOFF_ENGINE is {name!r}; the engines are {', '.join(ENGINES)}. "
            f"Set one of them, or: unset BAKEOFF_ENGINE"
        )
    if name in CONTAINER_ENGINES:
        return CONTAINER_ENGINES[name].find(name, workspace_dir, target)
    reasons = []
    for candidate in CONTAINER_ENGINES if name == "auto" else ():
        try:
            engine = CONTAINER_ENGINES[candidate].find(candidate, workspace_dir, target)
        except NotUsable as reason:
            if target in BELOW_VLLM and _is_usable(candidate, workspace_dir, below(target)):
                raise  # the other stages are sealed here, so this one has to be
            reasons.append(str(reason))
        else:
            say(f"engine {candidate}, image {engine.image[0]}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return engine
    if reasons:
        say(f"engine process, without a container: {'; '.join(reasons)}")
    if target in BELOW_VLLM:
        installed(below(target))  # or a UserError with the command
    return ProcessEngine()


def _is_usable(name: str, workspace_dir: Path, target: str) -> bool:
    try:
        CONTAINER_ENGINES[name].find(name, workspace_dir, target)
    except NotUsable:
        return False
    return True
