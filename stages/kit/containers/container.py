"""The engines with containers: a stage is a fresh, sealed container, started by the client of docker or podman."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stages.kit.containers.environment import TMP_DIR, container_environment
from stages.kit.containers.images import image_references
from stages.kit.containers.inside import GRACE_S, READY, UNWATCHED
from stages.kit.containers.mounts import input_paths, mounts
from stages.kit.containers.outputs import Outputs, claimed_outputs
from stages.kit.containers.pipeline import declared_stage
from stages.kit.containers.process import forwarded_signals
from stages.kit.containers.stage_run import StageRun
from stages.kit.errors import UserError

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


class NotUsable(UserError):
    """This machine's docker or podman cannot run a stage of this checkout; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ContainerEngine:
    client: str
    """docker or podman."""
    reference: str
    """The image's name, made from the hash of what it is built from."""
    image_id: str
    """What is run: a name could be given to another image."""
    user: tuple[str, ...]
    """The options that make the files of the stage the caller's."""

    sealed: ClassVar[bool] = True

    @classmethod
    def find(cls, client: str, workspace_dir: Path, target: str) -> ContainerEngine:
        """The engine, with the image of this checkout. Raises NotUsable where one of them is missing."""
        if not shutil.which(client):
            raise NotUsable(f"{client} is not installed")
        references = image_references(workspace_dir, target)
        for reference in references:
            found = _ask(client, "image", "inspect", "--format", "{{.Id}}", reference)
            if found.returncode == 0:
                return cls(client=client, reference=reference, image_id=found.stdout.strip(), user=_user(client))
            if "no such image" not in found.stderr.lower() and "image not known" not in found.stderr.lower():
                problem = (found.stderr.strip() or "no answer").splitlines()[-1]
                raise NotUsable(f"{client} does not work here ({problem})")
        raise NotUsable(f"{client} has no image {references[0]}; build it with: make image TARGET={target}")

    def run(self, stage_run: StageRun) -> int:
        """Run the stage to its end and return its exit code; where it is 0, its outputs are in the workspace.

        SIGINT, SIGTERM and SIGHUP go on to the stage, which decides how to end. Killed, the launcher is missed by the
        first process of the container, which then ends the stage.
        """
        declared = declared_stage(stage_run.workspace_dir, " ".join(("docker/run", stage_run.stage, *stage_run.args)))
        with claimed_outputs(stage_run.workspace_dir, declared, input_paths(stage_run, declared)) as outputs:
            code = self._run_container(stage_run, declared.name, outputs)
            if code == 0:
                outputs.take()
        return code

    def _run_container(self, stage_run: StageRun, stage_name: str, outputs: Outputs) -> int:
        name = f"bakeoff-{stage_name.replace('@', '-')}-{secrets.token_hex(4)}"
        terminal = stage_run.terminal and sys.stdout.isatty()
        command = [
            *(self.client, "run", "--rm", "--name", name, "--label", f"bakeoff.stage={stage_name}"),
            *("--label", f"bakeoff.workspace={stage_run.workspace_dir}"),
            *("--pull", "never", "--log-driver", "none", "--sig-proxy=false", "--stop-timeout", str(GRACE_S)),
            # podman would add writable folders: /run, /var/tmp.
            *(("--read-only-tmpfs=false",) if self.client == "podman" else ()),
            # Processes that train together look each other up by this name, also without a network.
            *("--hostname", "localhost"),
            *("--network", "bridge" if stage_run.network else "none", *HARDENING, *self.user, *self._gpus(stage_run)),
            *("--workdir", str(stage_run.workspace_dir), *(("--tty",) if terminal else ())),
            *_environment_options(stage_run, terminal=terminal),
            *(option for mount in mounts(stage_run, outputs) for option in ("--mount", mount.option())),
            *(self.image_id, "python", "-m", "stages.kit.containers.inside"),
            *((UNWATCHED,) if sys.platform == "darwin" else ()),
            *(stage_run.stage, *stage_run.args),
        ]
        with forwarded_signals() as forward_to:
            # Of its own process group: a Ctrl-C then reaches the stage once, from here.
            client = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
            forward_to(_Container(client=self.client, name=name, process=client, lock_path=outputs.lock_path))
            return client.wait()

    def _gpus(self, stage_run: StageRun) -> tuple[str, ...]:
        if not stage_run.gpus:
            return ()
        if self.client == "docker":
            return ("--gpus", f'"device={",".join(stage_run.gpus)}"')
        return tuple(option for uuid in stage_run.gpus for option in ("--device", f"nvidia.com/gpu={uuid}"))


@dataclass(frozen=True, kw_only=True)
class _Container:
    """A container as a receiver of signals."""

    client: str
    name: str
    process: subprocess.Popen[bytes]
    lock_path: Path

    def send_signal(self, number: int) -> None:
        threading.Thread(target=self._send, args=(number,), daemon=True).start()

    def _send(self, number: int) -> None:
        """As soon as the container is there and its first process handles signals."""
        while self.process.poll() is None and self.lock_path.read_text() != READY:
            time.sleep(0.05)
        _ask(self.client, "kill", "--signal", str(int(number)), self.name)


def _environment_options(stage_run: StageRun, *, terminal: bool) -> list[str]:
    """What the caller set is passed by name alone: a value would show in the machine's list of processes."""
    environment = container_environment(stage_run.stage, stage_run.caller, terminal=terminal)
    if stage_run.network:
        environment["HF_HOME"] = str(stage_run.kept_dirs[0])
    set_by_caller = environment.items() & stage_run.caller.items()
    given = [name if (name, value) in set_by_caller else f"{name}={value}" for name, value in environment.items()]
    return [option for value in given for option in ("--env", value)]


def _user(client: str) -> tuple[str, ...]:
    """Options under which what the stage writes belongs to the caller."""
    caller = ("--user", f"{os.getuid()}:{os.getgid()}")
    if client == "podman":
        return caller if os.getuid() == 0 else ("--userns", "keep-id", *caller)
    # A rootless Docker shows the caller as root inside, and everybody else as somebody foreign.
    rootless = "rootless" in _ask(client, "info", "--format", "{{.SecurityOptions}}").stdout
    return ("--user", "0:0") if rootless else caller


def _ask(client: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([client, *args], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
