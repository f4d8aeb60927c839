"""The engines docker and podman: a stage is a fresh, sealed container, started by their clients, which are alike."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stages.core.environment import TMP_DIR
from stages.core.signals import GRACE_S
from stages.kit.launcher.container import INSIDE, Mount, NotUsable, Outputs, run_client, run_sealed, variables
from stages.kit.launcher.images import image_reference
from stages.kit.launcher.process import Ended, StageRun

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

CALLER = f"{os.getuid()}:{os.getgid()}"
"""Owner of the files that a stage writes."""


@dataclass(frozen=True)
class Client:
    """A container engine's command."""

    program: str
    """docker or podman, or a path to one of them."""

    @cached_property
    def is_podman(self) -> bool:
        """Whether it is podman, also if it is called docker: the package podman-docker installs such a script."""
        path = Path(shutil.which(self.program) or self.program)
        if "podman" in path.name:
            return True
        with path.open("rb") as file:
            start = file.read(4096)
        return start.startswith(b"#!") and b"podman" in start

    def ask(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run one of its commands and capture its output."""
        # In its own process group: the signal that a closing terminal sends to the launcher's group must not end the
        # command that passes it on.
        return subprocess.run(
            [self.program, *args],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    def show(self, *args: str, **environment: str) -> bool:
        """Run one of its commands with its output shown; returns whether it succeeded."""
        return subprocess.run([self.program, *args], env=os.environ | environment, check=False).returncode == 0

    def succeeds(self, *args: str) -> bool:
        """Whether one of its commands succeeds."""
        return self.ask(*args).returncode == 0

    def image_id(self, reference: str) -> str | None:
        """The digest of the image of that name on this machine; None if there is none, or no engine answers."""
        found = self.ask("image", "inspect", "--format", "{{.Id}}", reference)
        return found.stdout.strip() if found.returncode == 0 else None

    def problem(self) -> str | None:
        """The reason why the engine cannot be used, in one line; None if it answers."""
        answer = self.ask("info" if self.is_podman else "version")
        return None if answer.returncode == 0 else (answer.stderr.strip() or "no reason given").splitlines()[-1]


@dataclass(frozen=True, kw_only=True)
class ContainerEngine:
    client: Client
    reference: str
    """The image's name, made from the hash of what it is built from."""
    image_id: str
    """Digest of the image that is run: its name could be given to another image."""

    @classmethod
    def find(cls, program: str, workspace_dir: Path, target: str) -> ContainerEngine:
        """The engine, with the image of this checkout. Raises NotUsable if one of them is missing."""
        if not shutil.which(program):
            raise NotUsable(f"{program} is not installed")
        client = Client(program)
        reference = image_reference(workspace_dir, target)
        if image_id := client.image_id(reference):
            return cls(client=client, reference=reference, image_id=image_id)
        if problem := client.problem():
            raise NotUsable(f"{program} does not work here ({problem})")
        raise NotUsable(f"{program} has no image {reference}; build it with: make image TARGET={target}")

    @property
    def name(self) -> str:
        return "podman" if self.client.is_podman else "docker"

    @property
    def image(self) -> tuple[str, str]:
        return self.reference, self.image_id

    def run(self, stage_run: StageRun) -> Ended:
        """Run the stage to its end.

        Signals that ask to end go on to the stage, which decides how to end. If the launcher is killed, the first
        process of the container ends the stage.
        """
        return run_sealed(stage_run, lambda found, outputs: self._run(stage_run, found, outputs))

    def _run(self, stage_run: StageRun, found: list[Mount], outputs: Outputs) -> int:
        assert stage_run.declared is not None
        stage = stage_run.declared.name
        name = f"bakeoff-{stage.replace('@', '-')}-{secrets.token_hex(4)}"
        # Processes on several nodes have to reach each other.
        network = "host" if stage_run.num_nodes > 1 else "bridge" if stage_run.network else "none"
        terminal = stage_run.terminal and sys.stdout.isatty()
        # Variables of the caller are passed by name alone: a value would show in the machine's list of processes.
        passed, given = variables(stage_run, terminal=terminal)
        environment = [*passed, *(f"{key}={value}" for key, value in given.items()), f"BAKEOFF_IMAGE={self.image_id}"]
        command = [
            *(self.client.program, "run", "--rm", "--name", name, "--label", f"bakeoff.stage={stage}"),
            *("--label", f"bakeoff.workspace={stage_run.workspace_dir}", "--pull", "never", "--log-driver", "none"),
            *("--sig-proxy=false", "--stop-timeout", str(GRACE_S), *(("--tty",) if terminal else ())),
            *("--network", network, *HARDENING),
            # Processes that train together look each other up by this name, also without a network.
            *(("--hostname", "localhost") if stage_run.num_nodes == 1 else ()),
            *("--workdir", str(stage_run.workspace_dir)),
            *self._account_and_gpus(stage_run.gpus),
            *(option for variable in environment for option in ("--env", variable)),
            *(option for mount in found for option in ("--mount", mount.option())),
            *(self.image_id, *INSIDE, *stage_run.command),
        ]

        def send(number: int, _client: object) -> bool:
            return self.client.succeeds("kill", "--signal", str(int(number)), name)

        def end(code: int) -> int:
            # The client may end before its container: killed, or with its terminal.
            if self.client.succeeds("kill", "--signal", "TERM", name):
                self.client.ask("wait", name)
            return code

        return run_client(command, outputs.ready_path, send=send, failed=end)

    def _account_and_gpus(self, gpus: tuple[str, ...]) -> list[str]:
        """Options for a container with the caller's account and these GPUs (UUIDs), and no other."""
        if self.client.is_podman:
            # podman would add writable folders (/run, /var/tmp), and the caller's proxies.
            plain = ["--read-only-tmpfs=false", "--http-proxy=false", "--user", CALLER]
            devices = [option for uuid in gpus for option in ("--device", f"nvidia.com/gpu={uuid}")]
            return [*plain, *(() if os.getuid() == 0 else ("--userns", "keep-id")), *devices]
        # In a rootless Docker, root inside is the caller outside.
        rootless = "rootless" in self.client.ask("info", "--format", "{{.SecurityOptions}}").stdout
        user = ["--user", "0:0"] if rootless else ["--userns", "host", "--user", CALLER]
        return [*user, *(("--gpus", f'"device={",".join(gpus)}"') if gpus else ())]
