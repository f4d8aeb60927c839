"""What engines with containers share: a stage sees its declared inputs; its outputs are taken when it ended well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from stages.core.dvc_cache import cache_dir
from stages.core.environment import container_environment
from stages.core.errors import UserError
from stages.core.given_files import CACHE_VARIABLE
from stages.core.provenance import Machine
from stages.kit.launcher.mounts import Mount, make_places, mounts
from stages.kit.launcher.outputs import Outputs
from stages.kit.launcher.stage_run import Ended, StageRun


class NotUsable(UserError):
    """This machine's engine cannot run a stage of this checkout; the message says why."""


def run_sealed(stage_run: StageRun, run: Callable[[list[Mount], Path], int]) -> Ended:
    """Run a stage on its declared inputs; where its exit code is 0, its outputs are in the workspace.

    run: starts the container with these mounts and returns the stage's exit code. When the container handles signals,
    it writes to the file that is given.
    """
    assert stage_run.declared is not None
    outputs = Outputs(stage_run.declared, stage_run.workspace_dir, node=stage_run.node)
    try:
        with outputs.aside():
            found = mounts(stage_run, stage_run.declared, outputs)
            places = make_places(found, outputs)
            code = run(found, outputs.ready_path)
            if code == 0 and stage_run.node == 0:
                outputs.take(places)
            return Ended(code=code, machine=_machine(outputs.ready_path))
    except OSError as error:  # no space, no permission, a read-only file system
        raise UserError(f"the outputs of {stage_run.declared.name} cannot be handled: {error}") from error


def variables(stage_run: StageRun, *, terminal: bool) -> tuple[list[str], dict[str, str]]:
    """(names of the caller's variables that a container gets, further variables with their values)."""
    passed, given = container_environment(
        stage_run.stage, stage_run.caller, network=stage_run.network, terminal=terminal
    )
    return passed, {**given, **stage_run.variables, CACHE_VARIABLE: str(cache_dir(stage_run.workspace_dir))}


def _machine(ready_path: Path) -> Machine | None:
    """The machine that the container wrote there; its stage could have written there too."""
    try:
        return TypeAdapter(Machine).validate_json(ready_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
