"""Where a stage runs: the seam between the launcher and what starts processes or containers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from stages.core.errors import UserError
from stages.kit.evaluation.vllm.environment import installed
from stages.kit.launcher.apptainer import ApptainerEngine
from stages.kit.launcher.container import NotUsable
from stages.kit.launcher.docker import ContainerEngine
from stages.kit.launcher.images import BELOW_VLLM, below
from stages.kit.launcher.process import ProcessEngine
from stages.kit.launcher.stage_run import Ended, StageRun


class Engine(Protocol):
    """Runs stages, each in a process that did not exist before."""

    @property
    def name(self) -> str:
        """As BAKEOFF_ENGINE has it."""
        ...

    @property
    def image(self) -> tuple[str, str] | None:
        """The image of its containers: name and digest. None: no container, and nothing takes the network away."""
        ...

    def run(self, stage_run: StageRun) -> Ended:
        """Run it to its end, leave nothing running."""
        ...


CONTAINER_ENGINES: dict[str, Callable[[Path, str], Engine]] = {
    "docker": partial(ContainerEngine.find, "docker"),
    "podman": partial(ContainerEngine.find, "podman"),
    "apptainer": ApptainerEngine.find,
}
"""In the order in which `auto` tries them: each takes (workspace, an image's target), and raises NotUsable."""

ENGINES = (*CONTAINER_ENGINES, "process", "auto")

DEFAULT_ENGINE = "auto"


def has_image(find: Callable[[Path, str], Engine], workspace_dir: Path, target: str) -> bool:
    try:
        find(workspace_dir, target)
    except NotUsable:
        return False
    return True


def choose_engine(name: str, *, workspace_dir: Path, target: str, say: Callable[[str], None]) -> Engine:
    """The engine of that name; for auto the first that can run a stage of this checkout, which it says.

    target: which image a container would need.
    Raises UserError where there is no such engine, where it was asked for by name and cannot run the stage, and where
    it is a process that vLLM is not installed for.
    """
    if name not in ENGINES:
        raise UserError(
            f"BAKEOFF_ENGINE is {name!r}; the engines are {', '.join(ENGINES)}. "
            f"Set one of them, or: unset BAKEOFF_ENGINE"
        )
    if name in CONTAINER_ENGINES:
        return CONTAINER_ENGINES[name](workspace_dir, target)
    reasons = []
    for candidate, find in CONTAINER_ENGINES.items() if name == "auto" else ():
        try:
            engine = find(workspace_dir, target)
        except NotUsable as reason:
            if target in BELOW_VLLM and has_image(find, workspace_dir, below(target)):
                raise  # where the other stages are sealed, this one is not to go without
            reasons.append(str(reason))
        else:
            image = engine.image[0] if engine.image else "none"
            say(f"engine {candidate}, image {image}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return engine
    if reasons:
        say(f"engine process, without a container: {'; '.join(reasons)}")
    if target in BELOW_VLLM:
        installed(below(target))  # or a UserError names the command
    return ProcessEngine()
