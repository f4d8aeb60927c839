"""The engines docker and podman: a stage is a fresh, sealed container, started by their clients, which are alike."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.core.environment import TMP_DIR
from stages.core.errors import UserError
from stages.core.signals import GRACE_S
from stages.launcher.container import (
    Mount,
    NoImage,
    NotUsable,
    SealedEngine,
    StageFolder,
    csv_line,
    first_process,
    run_client,
)
from stages.launcher.gpus import Gpu, device_files
from stages.launcher.images import image_reference
from stages.launcher.pipeline import Request

HARDENING = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    # SELinux lets a container read a file only once it is relabelled, which would change the user's files.
    *("--security-opt", "label=disable"),
    # Shared memory carries batches from data-loader workers; /tmp holds compiled kernels, which have to run.
    *("--shm-size", "4g", "--tmpfs", f"{TMP_DIR}:rw,exec,nosuid,nodev,size=4g,mode=1777"),
    *("--ulimit", "core=0"),
)

CALLER = f"{os.getuid()}:{os.getgid()}"
"""Owner of the files that a stage writes."""
PROCESSES, PROCESSES_PER_CORE = 1024, 16
"""Processes and threads of a stage, the larger of the two, and as many for each device: math libraries start one thread
a core in each of their processes."""
RESERVE = 16
"""The share of the machine's memory that a stage leaves to others, as a divisor."""


@dataclass(frozen=True)
class Client:
    """A container engine's command."""

    program: str
    """docker or podman, or a path to one of them."""

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
        """The digest of the image of that name on this machine; None if there is none, or no engine responds."""
        result = self.ask("image", "inspect", "--format", "{{.Id}}", reference)
        return result.stdout.strip() if result.returncode == 0 else None

    @cached_property
    def info(self) -> dict[str, Any]:
        """The engine's description of itself and its machine; empty if it gives none."""
        result = self.ask("info", "--format", "{{json .}}")
        return dict(json.loads(result.stdout)) if result.returncode == 0 else {}

    @property
    def is_podman(self) -> bool:
        """Whether it is podman, also if it is called docker: the package podman-docker installs such a script."""
        return "podman" in Path(self.program).name or "host" in self.info

    @property
    def is_rootless_docker(self) -> bool:
        return any("rootless" in option for option in self.info.get("SecurityOptions") or ())

    @property
    def cdi_devices(self) -> set[str]:
        """Names of the devices that docker gives by CDI, e.g. nvidia.com/gpu=GPU-8932f937-..."""
        return {device["ID"] for device in self.info.get("DiscoveredDevices") or ()}

    def problem(self) -> str | None:
        """The reason why the engine cannot be used, in one line; None if it responds."""
        result = self.ask("ps", "--quiet")
        return None if result.returncode == 0 else (result.stderr.strip() or "no reason given").splitlines()[-1]


@dataclass(frozen=True, kw_only=True)
class ContainerEngine(SealedEngine):
    client: Client

    @classmethod
    def find(cls, name: str, workspace_dir: Path, target: str) -> ContainerEngine:
        """The engine with a client of that name, with the image of this checkout.

        Raises NotUsable if one of them is missing.
        """
        if not shutil.which(name):
            raise NotUsable(f"{name} is not installed")
        client = Client(name)
        reference = image_reference(workspace_dir, target)
        if image_id := client.image_id(reference):
            own_name = "podman" if name == "docker" and client.is_podman else name
            return cls(name=own_name, client=client, image=(reference, image_id))
        if problem := client.problem():
            raise NotUsable(f"{name} does not work here ({problem})")
        raise NoImage(f"{name} has no image {reference}; build it with: make image TARGET={target}")

    def run_container(self, request: Request, mounts: list[Mount], folder: StageFolder) -> int:
        name = f"bakeoff-{folder.stage.replace('@', '-')}-{secrets.token_hex(4)}"
        # Processes on several nodes have to reach each other.
        network = "host" if request.num_nodes > 1 else "bridge" if request.network else "none"
        terminal = sys.stderr.isatty() and sys.stdout.isatty()
        # Variables of the caller are passed by name alone: a value would show in the machine's list of processes.
        passed, given = self.variables(request, terminal=terminal)
        environment = [*passed, *(f"{key}={value}" for key, value in given.items())]
        command = [
            *(self.client.program, "run", "--rm", "--name", name, "--label", f"bakeoff.stage={folder.stage}"),
            *("--label", f"bakeoff.workspace={request.workspace_dir}", "--pull", "never", "--log-driver", "none"),
            *("--sig-proxy=false", "--stop-timeout", str(GRACE_S), *(("--tty",) if terminal else ())),
            *("--network", network, *HARDENING, *self._limits(request)),
            # Processes that train together look each other up by this name, also without a network.
            *(("--hostname", "localhost") if request.num_nodes == 1 else ()),
            *("--workdir", str(request.workspace_dir)),
            *(*self._account(), *self._gpus(request.gpus)),
            *(option for variable in environment for option in ("--env", variable)),
            # Nothing else can be written in the workspace: below /tmp its folder would be as writable as that.
            *("--mount", csv_line("type=tmpfs", f"target={request.workspace_dir}", "readonly")),
            *(option for mount in mounts for option in ("--mount", mount.option())),
            *(self.image[1], *first_process(request)),
        ]

        def send(number: int, _client: object) -> bool:
            return self.client.succeeds("kill", "--signal", str(int(number)), name)

        def end(code: int) -> int:
            # The client may end before its container: killed, or with its terminal.
            if self.client.succeeds("kill", "--signal", "TERM", name):
                self.client.ask("wait", name)
            return code

        return run_client(command, folder.ready_path, send=send, failed=end)

    def _limits(self, request: Request) -> list[str]:
        """Options that keep a stage from taking all processes and all memory of the machine."""
        own, devices, info = request.params.containers, request.params.active.device.count, self.client.info
        host = info.get("host", {})  # podman's
        total = int(host.get("memTotal", info.get("MemTotal", 0)))
        processes = max(PROCESSES, PROCESSES_PER_CORE * int(host.get("cpus", info.get("NCPU", 0))))
        wanted = round(own.memory_gb * 1e9) if own.memory_gb else total - total // RESERVE
        if wanted > total:
            raise UserError(
                f"containers.memory_gb in params.yaml is {own.memory_gb:g}; {self.name} has {total / 1e9:.1f} GB here"
            )
        # The limit of memory with swap is the same: no swap.
        memory = [f"--{name}={wanted}b" for name in ("memory", "memory-swap") if wanted]
        return ["--pids-limit", str(own.processes or processes * (1 + devices)), *memory]

    def _account(self) -> list[str]:
        """Options for a container with the caller's account."""
        if self.client.is_podman:
            # podman would add writable folders (/run, /var/tmp), and the caller's proxies.
            plain = ["--read-only-tmpfs=false", "--http-proxy=false", "--user", CALLER]
            return plain if os.getuid() == 0 else [*plain, "--userns", "keep-id"]
        # In a rootless Docker, root inside is the caller outside.
        return ["--user", "0:0"] if self.client.is_rootless_docker else ["--userns", "host", "--user", CALLER]

    def _gpus(self, gpus: tuple[Gpu, ...]) -> list[str]:
        """Options for a container with these GPUs, and no other."""
        if not gpus:
            return []
        names = [f"nvidia.com/gpu={gpu.uuid}" for gpu in gpus]
        if self.client.is_podman or self.client.cdi_devices.issuperset(names):
            return _devices(names)
        # A container loses a GPU that --gpus alone has given it when systemd reloads its units, as at each update of
        # packages: docker and its cgroup do not know of the device (NVIDIA/nvidia-container-toolkit#48).
        uuids = ",".join(gpu.uuid for gpu in gpus)
        files = [] if self.client.is_rootless_docker else device_files(gpus)
        return ["--gpus", f'"device={uuids}"', *_devices(map(str, files))]


def _devices(names: Iterable[str]) -> list[str]:
    return [option for name in names for option in ("--device", name)]
