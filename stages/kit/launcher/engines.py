"""Where a stage runs: the seam between the launcher and what starts processes or containers."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from stages.core.errors import UserError
from stages.kit.launcher.container import CLIENTS, ContainerEngine, NotUsable
from stages.kit.launcher.process import ProcessEngine
from stages.kit.launcher.stage_run import Ended, StageRun

ENGINES = (*CLIENTS, "process", "auto")

DEFAULT_ENGINE = "auto"


class Engine(Protocol):
    """Runs stages, each in a process that did not exist before."""

    @property
    def name(self) -> str:
        """One of ENGINES, but not auto."""
        ...

    @property
    def image(self) -> tuple[str, str] | None:
        """What stages run in: its name, and its digest; None for no image."""
        ...

    @property
    def sealed(self) -> bool:
        """Whether it takes away the network from stages that need none."""
        ...

    def run(self, stage_run: StageRun) -> Ended:
        """Run it to its end, leave nothing running."""
        ...


def choose_engine(
    name: str, *, workspace_dir: Path, target: Literal["cpu", "cuda"], say: Callable[[str], None]
) -> Engine:
    """The engine of that name; for auto the first that can run a stage of this checkout, which it says.

    target: which image a container would need.
    Raises UserError where there is no such engine, or where it was asked for by name and cannot run the stage.
    """
    if name not in ENGINES:
        raise UserError(
            f"BAKEOFF_ENGINE is {name!r}; the engines are {', '.join(ENGINES)}. "
            f"Set one of them, or: unset BAKEOFF_ENGINE"
        )
    if name == "process":
        return ProcessEngine()
    if name in CLIENTS:
        return ContainerEngine.find(name, workspace_dir, target)
    reasons = []
    for client in CLIENTS:
        try:
            engine = ContainerEngine.find(client, workspace_dir, target)
        except NotUsable as reason:
            reasons.append(str(reason))
        else:
            say(f"engine {client}, image {engine.reference}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return engine
    say(f"engine process, without a container: {'; '.join(reasons)}")
    return ProcessEngine()
