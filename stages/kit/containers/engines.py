"""Where a stage runs: the seam between the launcher and what starts processes or containers."""

from collections.abc import Mapping
from typing import Protocol

from stages.kit.containers.process import ProcessEngine
from stages.kit.containers.stage_run import StageRun
from stages.kit.errors import UserError


class Engine(Protocol):
    """Runs stages, each in a process that did not exist before."""

    def run(self, stage_run: StageRun) -> int:
        """Run it to its end, leave nothing running; return the exit code, 128 + n where signal n ended it."""
        ...


ENGINES: Mapping[str, type[Engine]] = {"process": ProcessEngine}

DEFAULT_ENGINE = "process"


def choose_engine(name: str) -> Engine:
    """The engine of that name. Raises UserError where there is none."""
    if name not in ENGINES:
        raise UserError(
            f"BAKEOFF_ENGINE is {name!r}; the engines are {', '.join(sorted(ENGINES))}. "
            f"Set one of them, or: unset BAKEOFF_ENGINE"
        )
    return ENGINES[name]()
