"""What engines with containers share: a stage sees its declared inputs; its outputs are taken when it ended well."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread

from pydantic import TypeAdapter

from stages.core.dvc_cache import cache_dir
from stages.core.environment import container_environment
from stages.core.errors import UserError
from stages.core.given_files import CACHE_VARIABLE
from stages.core.provenance import Machine
from stages.kit.launcher.mounts import Mount, make_places, mounts
from stages.kit.launcher.outputs import Outputs
from stages.kit.launcher.process import forwarded_signals
from stages.kit.launcher.stage_run import Ended, StageRun

INSIDE = ("python", "-m", "stages.kit.launcher.inside")
"""The first process of a container; a stage's name and arguments follow."""

READY_S = 10.0
"""How long a signal waits for the sign that the container handles it; a stage could remove that."""


class NotUsable(UserError):
    """This machine's engine cannot run a stage of this checkout; the message says why."""


def run_sealed(stage_run: StageRun, run: Callable[[list[Mount], Outputs], int]) -> Ended:
    """Run a stage on its declared inputs; where its exit code is 0, its outputs are in the workspace.

    run: starts the container with these mounts and returns the stage's exit code.
    """
    assert stage_run.declared is not None
    outputs = Outputs(stage_run.declared, stage_run.workspace_dir, node=stage_run.node)
    try:
        with outputs.aside():
            found = mounts(stage_run, stage_run.declared, outputs)
            places = make_places(found, outputs)
            code = run(found, outputs)
            if code == 0 and stage_run.node == 0:
                outputs.take(places)
            return Ended(code=code, machine=_machine(outputs.ready_path))
    except OSError as error:  # no space, no permission, a read-only file system
        raise UserError(f"the outputs of {stage_run.declared.name} cannot be handled: {error}") from error


def run_client(
    command: Sequence[str],
    ready_path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    send: Callable[[int, subprocess.Popen[bytes]], bool],
    failed: Callable[[int], int],
) -> int:
    """Run the client of an engine, which shows what the stage prints; returns the stage's exit code.

    Signals that ask to end go on to the container as soon as it has written to `ready_path`, by which it says that it
    handles them. send: passes one on, given the client, and says whether the container was there to have it.
    failed: called where the client failed, with its code (128 + n after signal n); returns that of the stage.
    """
    with forwarded_signals() as signals:
        # Of its own process group: a Ctrl-C then reaches the stage once, from here.
        client = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)

        def forward(number: int) -> None:
            patience_ends = time.monotonic() + READY_S
            while client.poll() is None:
                ready = ready_path.exists() and ready_path.stat().st_size > 0
                if (ready or time.monotonic() > patience_ends) and send(number, client):
                    return
                time.sleep(0.05)

        signals.forward_to(lambda number: Thread(target=forward, args=(number,), daemon=True).start())
        code = client.wait()
        if code != 0:
            code = failed(code if code > 0 else 128 - code)
    return signals.code_of_stage(code)


def variables(stage_run: StageRun, *, terminal: bool) -> tuple[list[str], dict[str, str]]:
    """(names of the caller's variables that a container gets, further variables with their values)."""
    passed, given = container_environment(
        stage_run.stage,
        stage_run.caller,
        network=stage_run.network,
        terminal=terminal,
        num_nodes=stage_run.num_nodes,
    )
    return passed, {**given, **stage_run.variables, CACHE_VARIABLE: str(cache_dir(stage_run.workspace_dir))}


def _machine(ready_path: Path) -> Machine | None:
    """The machine that the container wrote there; its stage could have written there too."""
    try:
        return TypeAdapter(Machine).validate_json(ready_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
