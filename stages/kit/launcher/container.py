"""The engines with containers: a stage is a fresh, sealed container, started by the client of docker or podman."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter

from stages.core.dvc_cache import cache_dir
from stages.core.environment import TMP_DIR, container_environment
from stages.core.errors import UserError
from stages.core.given_files import CACHE_VARIABLE
from stages.core.provenance import Machine
from stages.core.signals import GRACE_S
from stages.kit.launcher.client import Client
from stages.kit.launcher.images import image_references
from stages.kit.launcher.mounts import make_places, mounts
from stages.kit.launcher.outputs import Outputs, outputs_aside
from stages.kit.launcher.pipeline import DeclaredStage
from stages.kit.launcher.process import forwarded_signals
from stages.kit.launcher.stage_run import Ended, StageRun

CLIENTS = ("docker", "podman")

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
"""How long a signal waits for the sign that it will be heard; a stage could remove that."""


class NotUsable(UserError):
    """This machine's docker or podman cannot run a stage of this checkout; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ContainerEngine:
    client: Client
    reference: str
    """The image's name, made from the hash of what it is built from."""
    image_id: str
    """What is run: a name could be given to another image."""

    sealed: ClassVar[bool] = True

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
        """Run the stage to its end; where its exit code is 0, its outputs are in the workspace.

        The signals that ask to end go on to the stage, which decides how. Killed, the launcher is missed by the
        first process of the container, which then ends the stage.
        """
        workspace_dir = stage_run.workspace_dir
        stage = stage_run.pipeline.require(stage_run.call)
        try:
            with outputs_aside(stage, workspace_dir) as outputs:
                found = mounts(stage_run, stage, outputs)
                places = make_places(found, outputs)
                options = (option for mount in found for option in ("--mount", mount.option()))
                code = self._run_container(stage_run, stage, outputs, options)
                if code == 0:
                    outputs.take(places)
                machine = _told(outputs.ready_path)
        except OSError as error:  # no space, no permission, a read-only file system
            raise UserError(f"the outputs of {stage.name} cannot be handled: {error}") from error
        return Ended(code=code, machine=machine)

    def _run_container(
        self, stage_run: StageRun, stage: DeclaredStage, outputs: Outputs, mount_options: Iterable[str]
    ) -> int:
        name = f"bakeoff-{stage.name.replace('@', '-')}-{secrets.token_hex(4)}"
        terminal = stage_run.terminal and sys.stdout.isatty()
        command = [
            *(self.client.program, "run", "--rm", "--name", name, "--label", f"bakeoff.stage={stage.name}"),
            *("--label", f"bakeoff.workspace={stage_run.workspace_dir}", "--pull", "never", "--log-driver", "none"),
            *("--sig-proxy=false", "--stop-timeout", str(GRACE_S), *(("--tty",) if terminal else ())),
            *("--network", "bridge" if stage_run.network else "none", *HARDENING),
            # Processes that train together look each other up by this name, also without a network.
            *("--hostname", "localhost", "--workdir", str(stage_run.workspace_dir)),
            *(self._options_of_podman(stage_run) if self.client.is_podman else self._options_of_docker(stage_run)),
            *_environment_options(stage_run, terminal=terminal),
            *("--env", f"BAKEOFF_IMAGE={self.image_id}"),
            *mount_options,
            *(self.image_id, "python", "-m", "stages.kit.launcher.inside", *stage_run.command),
        ]
        with forwarded_signals() as signals:
            # Of its own process group: a Ctrl-C then reaches the stage once, from here.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
            container = _Container(client=self.client, name=name, process=process, ready_path=outputs.ready_path)
            signals.forward_to(container)
            code = process.wait()
            if code != 0:
                container.outlive_client()
        return signals.code_of_stage(code) if code >= 0 else 128 - code

    def _options_of_docker(self, stage_run: StageRun) -> list[str]:
        # A rootless Docker shows the caller as root inside, and everybody else as somebody foreign.
        rootless = "rootless" in self.client.ask("info", "--format", "{{.SecurityOptions}}").stdout
        user = ["--user", "0:0"] if rootless else ["--userns", "host", *_caller()]
        return [*user, *(("--gpus", f'"device={",".join(stage_run.gpus)}"') if stage_run.gpus else ())]

    def _options_of_podman(self, stage_run: StageRun) -> list[str]:
        gpus = [option for uuid in stage_run.gpus for option in ("--device", f"nvidia.com/gpu={uuid}")]
        # It would add writable folders (/run, /var/tmp), and the caller's proxies.
        plain = ["--read-only-tmpfs=false", "--http-proxy=false"]
        return [*plain, *(() if os.getuid() == 0 else ("--userns", "keep-id")), *_caller(), *gpus]


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
            heard = self.ready_path.exists() and self.ready_path.stat().st_size > 0
            if (heard or time.monotonic() > patience_ends) and self.client.answers(
                "kill", "--signal", str(int(number)), self.name
            ):
                return
            time.sleep(0.05)

    def outlive_client(self) -> None:
        """Wait for the end of a container whose client ended before it: killed, or its terminal closed."""
        if self.client.answers("kill", "--signal", "TERM", self.name):
            self.client.ask("wait", self.name)


def _told(ready_path: Path) -> Machine | None:
    """What the container told of itself; its stage could have written there too."""
    try:
        return TypeAdapter(Machine).validate_json(ready_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _environment_options(stage_run: StageRun, *, terminal: bool) -> list[str]:
    """What the caller set is passed by name alone: a value would show in the machine's list of processes."""
    passed, given = container_environment(
        stage_run.stage, stage_run.caller, network=stage_run.network, terminal=terminal
    )
    given[CACHE_VARIABLE] = str(cache_dir(stage_run.workspace_dir))
    if stage_run.hub_dir is not None:
        given["HF_HOME"] = str(stage_run.hub_dir)
    if stage_run.triton_dir is not None:
        given["TRITON_CACHE_DIR"] = str(stage_run.triton_dir)
    variables = [*passed, *(f"{name}={value}" for name, value in given.items())]
    return [option for variable in variables for option in ("--env", variable)]


def _caller() -> tuple[str, str]:
    """What the stage writes belongs to the caller."""
    return ("--user", f"{os.getuid()}:{os.getgid()}")
