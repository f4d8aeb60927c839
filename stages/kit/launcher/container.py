"""The engines with containers: a stage is a fresh, sealed container, started by the client of docker or podman."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from stages.core.dvc_cache import cache_dir
from stages.core.environment import TMP_DIR, container_environment
from stages.core.errors import UserError
from stages.core.given_files import CACHE_VARIABLE
from stages.core.provenance import Machine
from stages.core.signals import GRACE_S
from stages.kit.launcher.client import Client
from stages.kit.launcher.images import image_references
from stages.kit.launcher.mounts import Mount, make_places, mounts
from stages.kit.launcher.outputs import Outputs
from stages.kit.launcher.process import forwarded_signals
from stages.kit.launcher.stage_run import Ended, StageRun

HARDENING = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    # SELinux lets a container read a file only once it is relabelled, which would change the user's files.
    *("--security-opt", "label=disable"),
    # Room for the threads of eight training processes and their data loaders.
    *("--pids-limit", "8192"),
    # Shared memory carries batches from data-loader workers; /tmp holds compiled kernels, which have to run.
    *("--shm-size", "4g", "--tmpfs", f"{TMP_DIR}:rw,exec,nosuid,nodev,size=4g,mode=1777"),
    *("--ulimit", "core=0"),
)

READY_S = 10.0
"""How long a signal waits for the sign that the container handles it; a stage could remove that."""


class NotUsable(UserError):
    """This machine's engine cannot run a stage of this checkout; the message says why."""


def run_sealed(stage_run: StageRun, run: Callable[[list[Mount], Path], int]) -> Ended:
    """Run a stage on its declared inputs; where its exit code is 0, its outputs are in the workspace.

    run: starts the container with these mounts and returns the stage's exit code. When the container handles signals,
    it writes to the file that is given.
    """
    assert stage_run.declared is not None
    outputs = Outputs(stage_run.declared, stage_run.workspace_dir)
    try:
        with outputs.aside():
            found = mounts(stage_run, stage_run.declared, outputs)
            places = make_places(found, outputs)
            code = run(found, outputs.ready_path)
            if code == 0:
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


@dataclass(frozen=True, kw_only=True)
class ContainerEngine:
    client: Client
    reference: str
    """The image's name, made from the hash of what it is built from."""
    image_id: str
    """What is run: a name could be given to another image."""

    @classmethod
    def find(cls, program: str, workspace_dir: Path, target: str) -> ContainerEngine:
        """The engine, with the image of this checkout. Raises NotUsable where one of them is missing."""
        if not shutil.which(program):
            raise NotUsable(f"{program} is not installed")
        client = Client(program)
        references = image_references(workspace_dir, target)
        for reference in references:
            if image_id := client.image_id(reference):
                return cls(client=client, reference=reference, image_id=image_id)
        if problem := client.problem():
            raise NotUsable(f"{program} does not work here ({problem})")
        raise NotUsable(f"{program} has no image {references[0]}; build it with: make image TARGET={target}")

    @property
    def name(self) -> str:
        return "podman" if self.client.is_podman else "docker"

    @property
    def image(self) -> tuple[str, str]:
        return self.reference, self.image_id

    def run(self, stage_run: StageRun) -> Ended:
        """Run the stage to its end.

        The signals that ask to end go on to the stage, which decides how. When the launcher is killed, the first
        process of the container notices, and ends the stage.
        """
        return run_sealed(stage_run, lambda found, ready_path: self._run(stage_run, found, ready_path))

    def _run(self, stage_run: StageRun, found: list[Mount], ready_path: Path) -> int:
        assert stage_run.declared is not None
        stage = stage_run.declared.name
        name = f"bakeoff-{stage.replace('@', '-')}-{secrets.token_hex(4)}"
        terminal = stage_run.terminal and sys.stdout.isatty()
        # What the caller set is passed by name alone: a value would show in the machine's list of processes.
        passed, given = variables(stage_run, terminal=terminal)
        environment = [*passed, *(f"{key}={value}" for key, value in given.items()), f"BAKEOFF_IMAGE={self.image_id}"]
        command = [
            *(self.client.program, "run", "--rm", "--name", name, "--label", f"bakeoff.stage={stage}"),
            *("--label", f"bakeoff.workspace={stage_run.workspace_dir}", "--pull", "never", "--log-driver", "none"),
            *("--sig-proxy=false", "--stop-timeout", str(GRACE_S), *(("--tty",) if terminal else ())),
            *("--network", "bridge" if stage_run.network else "none", *HARDENING),
            # Processes that train together look each other up by this name, also without a network.
            *("--hostname", "localhost", "--workdir", str(stage_run.workspace_dir)),
            *(_podman_options(stage_run.gpus) if self.client.is_podman else self._docker_options(stage_run.gpus)),
            *(option for variable in environment for option in ("--env", variable)),
            *(option for mount in found for option in ("--mount", mount.option())),
            *(self.image_id, "python", "-m", "stages.kit.launcher.inside", *stage_run.command),
        ]
        with forwarded_signals() as signals:
            # Of its own process group: a Ctrl-C then reaches the stage once, from here.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
            signals.forward_to(_Container(client=self.client, name=name, process=process, ready_path=ready_path))
            code = process.wait()
            # The client may end before its container: killed, or with its terminal.
            if code != 0 and self.client.answers("kill", "--signal", "TERM", name):
                self.client.ask("wait", name)
        return signals.code_of_stage(code) if code >= 0 else 128 - code

    def _docker_options(self, gpus: tuple[str, ...]) -> list[str]:
        # A rootless Docker shows the caller as root inside, and everybody else as somebody foreign.
        rootless = "rootless" in self.client.ask("info", "--format", "{{.SecurityOptions}}").stdout
        user = ["--user", "0:0"] if rootless else ["--userns", "host", "--user", CALLER]
        return [*user, *(("--gpus", f'"device={",".join(gpus)}"') if gpus else ())]


CALLER = f"{os.getuid()}:{os.getgid()}"
"""What the stage writes belongs to the caller."""


def _podman_options(gpus: tuple[str, ...]) -> list[str]:
    # It would add writable folders (/run, /var/tmp), and the caller's proxies.
    plain = ["--read-only-tmpfs=false", "--http-proxy=false", "--user", CALLER]
    devices = [option for uuid in gpus for option in ("--device", f"nvidia.com/gpu={uuid}")]
    return [*plain, *(() if os.getuid() == 0 else ("--userns", "keep-id")), *devices]


@dataclass(frozen=True, kw_only=True)
class _Container:
    """A container as a receiver of signals."""

    client: Client
    name: str
    process: subprocess.Popen[bytes]
    """The client that shows what the stage prints."""
    ready_path: Path

    def send_signal(self, number: int) -> None:
        threading.Thread(target=self._send, args=(number,), daemon=True).start()

    def _send(self, number: int) -> None:
        """As soon as the container is there and its first process handles signals."""
        patience_ends = time.monotonic() + READY_S
        while self.process.poll() is None:
            ready = self.ready_path.exists() and self.ready_path.stat().st_size > 0
            if (ready or time.monotonic() > patience_ends) and self.client.answers(
                "kill", "--signal", str(int(number)), self.name
            ):
                return
            time.sleep(0.05)


def _machine(ready_path: Path) -> Machine | None:
    """The machine that the container wrote there; its stage could have written there too."""
    try:
        return TypeAdapter(Machine).validate_json(ready_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
