"""The engines that run stages, and the choice of one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from stages.core.errors import UserError
from stages.kit.evaluation.vllm.environment import installed
from stages.kit.launcher.apptainer import ApptainerEngine
from stages.kit.launcher.container import NotUsable
from stages.kit.launcher.docker import ContainerEngine
from stages.kit.launcher.images import BELOW_VLLM, below
from stages.kit.launcher.process import ProcessEngine

Engine = ContainerEngine | ApptainerEngine | ProcessEngine
"""Runs stages, each in a process of its own. `image`: name and digest of the image of its containers, or None."""
CONTAINER_ENGINES: dict[str, Callable[[Path, str], Engine]] = {
    "docker": partial(ContainerEngine.find, "docker"),
    "podman": partial(ContainerEngine.find, "podman"),
    "apptainer": ApptainerEngine.find,
}
"""In the order in which `auto` tries them. Each takes (workspace, an image's target), and raises NotUsable."""
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
        return CONTAINER_ENGINES[name](workspace_dir, target)
    reasons = []
    for candidate, find in CONTAINER_ENGINES.items() if name == "auto" else ():
        try:
            engine = find(workspace_dir, target)
        except NotUsable as reason:
            if target in BELOW_VLLM and _is_usable(find, workspace_dir, below(target)):
                raise  # the other stages are sealed here, so this one has to be
            reasons.append(str(reason))
        else:
            image = engine.image[0] if engine.image else "none"
            say(f"engine {candidate}, image {image}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return engine
    if reasons:
        say(f"engine process, without a container: {'; '.join(reasons)}")
    if target in BELOW_VLLM:
        installed(below(target))  # or a UserError with the command
    return ProcessEngine()


def _is_usable(find: Callable[[Path, str], Engine], workspace_dir: Path, target: str) -> bool:
    try:
        find(workspace_dir, target)
    except NotUsable:
        return False
    return True
