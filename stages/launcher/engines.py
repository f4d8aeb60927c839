"""The engines that run stages, and the choice of one."""

from __future__ import annotations

from pathlib import Path

from stages.core.errors import UserError
from stages.evaluation.vllm.environment import installed
from stages.launcher.apptainer import ApptainerEngine
from stages.launcher.container import NoImage, NotUsable, SealedEngine
from stages.launcher.docker import ContainerEngine
from stages.launcher.images import BELOW_VLLM, below
from stages.launcher.messages import say
from stages.launcher.process import ProcessEngine

Engine = SealedEngine | ProcessEngine
"""`name` is the one that records have, `image` that of its containers, None without; `run` runs a stage to its end."""
CONTAINER_ENGINES: dict[str, type[ContainerEngine | ApptainerEngine]] = {
    "docker": ContainerEngine,
    "podman": ContainerEngine,
    "apptainer": ApptainerEngine,
}
"""Engines with containers by the names of their programs, in the order in which `auto` tries them. `find(name,
workspace, an image's target)` gives the engine or raises NotUsable."""
ENGINES = (*CONTAINER_ENGINES, "process", "auto")


def choose_engine(name: str, *, workspace_dir: Path, target: str) -> Engine:
    """The engine of that name; for auto the first one that can run stages of this checkout. A container is logged, and
    an engine that only lacks its image, with the command that builds it.

    target: the image that a container would need.
    Raises UserError if there is no such engine, if the engine cannot run the stage, and if it is a process without vLLM
    and the stage needs it. For auto, a stage with vLLM is sealed wherever the others are.
    """
    if name not in ENGINES:
        raise UserError(
            f"BAKEOFF_ENGINE is {name!r}; the engines are {', '.join(ENGINES)}. "
            f"Set one of them, or: unset BAKEOFF_ENGINE"
        )
    if name in CONTAINER_ENGINES:
        return CONTAINER_ENGINES[name].find(name, workspace_dir, target)
    reasons = []
    for candidate, kind in CONTAINER_ENGINES.items() if name == "auto" else ():
        try:
            engine = kind.find(candidate, workspace_dir, below(target))
        except NoImage as reason:
            reasons.append(str(reason))
        except NotUsable:
            continue  # said before each stage, it would be noise
        else:
            engine = engine if target == below(target) else kind.find(candidate, workspace_dir, target)
            say(f"engine {candidate}, image {engine.image[0]}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return engine
    if reasons:
        say(f"engine process, without a container: {'; '.join(reasons)}")
    if target in BELOW_VLLM:
        installed(below(target))  # or a UserError with the command
    return ProcessEngine()
