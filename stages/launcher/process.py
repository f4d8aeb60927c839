"""The engine without containers: a stage is a fresh process on the host.

Also describes the machine and the packages that a stage runs on, from names and files alone: importing torch would
take as long as some stages do. Used inside containers too, so it imports nothing heavy.
"""

from __future__ import annotations

import os
import platform
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stages.core.environment import arithmetic, cpu_model, installed_packages, stage_environment, usable_cores
from stages.core.errors import OUT_OF_MEMORY
from stages.core.lineage import json_digest, short
from stages.core.provenance import Machine
from stages.core.signals import SAME_REQUEST_S, end_with_parent, handling

if TYPE_CHECKING:  # a container starts this module first, and needs no dvc.yaml
    from stages.launcher.pipeline import Request

STAGES = ("base", "prepare", "plan", "train", "merge", "build", "export", "evaluate", "predict", "compare", "publish")

MACHINE_COUNTERS = (Path("/proc/vmstat"),)
"""Files with the kernel's count of processes that it killed because memory ran out."""
CONTAINER_COUNTERS = (
    Path("/sys/fs/cgroup/memory.events"),  # cgroup v2
    Path("/sys/fs/cgroup/memory/memory.oom_control"),  # v1
)
"""Files with this count for a container, seen from inside."""


Image = tuple[str, str]
"""Name and digest of the image of a container."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The result of a stage run."""

    code: int
    """Exit code; 128 + n if signal n ended the stage."""
    machine: Machine | None = None
    """The machine it ran on; None if the container did not report it."""


class ForwardedSignals:
    """Forwards the signals that ask to end; those that arrive before there is a receiver are kept for it."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._early: list[int] = []
        self._send: Callable[[int], object] = self._early.append
        self._last = -SAME_REQUEST_S

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - self._last >= SAME_REQUEST_S:
            self._last = time.monotonic()
            self.received.append(number)
            self._send(number)

    def forward_to(self, send: Callable[[int], object]) -> None:
        self._send = send
        for number in self._early:
            send(number)

    def code_of_stage(self, code: int) -> int:
        """The stage's exit code; never "out of memory", which would restart it, after somebody asked it to end."""
        return 128 + self.received[-1] if self.received and code == OUT_OF_MEMORY else code


@contextmanager
def forwarded_signals() -> Iterator[ForwardedSignals]:
    """Handle the signals that ask to end while a stage runs."""
    signals = ForwardedSignals()
    with handling(signals.on_signal):
        yield signals


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process without input, which ends with this one. In its own process group, a Ctrl-C reaches it once, from
    here, and not a second time from the terminal while it is already saving its work."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_parent(), **options)


def wait_for(process: subprocess.Popen[Any]) -> int:
    """Wait for a process to end, and handle signals meanwhile; returns its exit code, 128 + n after signal n.

    A wait without a limit ends for a signal only if that interrupts it. One that comes a moment before it begins, or to
    another thread, would be handled when the process has ended.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1)
            return code if code >= 0 else 128 - code


class ProcessEngine:
    """Runs a stage with the launcher's own interpreter; restricts neither its network nor its files."""

    name = "process"
    image = None

    def run(self, request: Request) -> Ended:
        """Run the stage to its end.

        Signals that ask to end go on to the stage, which decides how to end; processes that it leaves behind are
        killed. If the kernel killed it because memory ran out, the code is OUT_OF_MEMORY.
        """
        terminal = sys.stderr.isatty()
        native = request.params.active.memory.native
        environment = stage_environment(
            request.stage, request.caller, network=request.network, terminal=terminal, native=native
        )
        environment |= request.variables(None)
        if request.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in request.gpus)
        machine = this_machine(environment)
        killed_before = oom_kills(MACHINE_COUNTERS)
        with forwarded_signals() as signals:
            code = run_stage(request.command, request.workspace_dir, environment, signals)
        return Ended(code=signals.code_of_stage(as_out_of_memory(code, killed_before)), machine=machine)


def run_stage(
    command: Sequence[str], working_dir: Path, environment: Mapping[str, str], signals: ForwardedSignals
) -> int:
    """Run a stage (its name and arguments) with this interpreter, and kill the processes that it leaves behind.

    Returns its exit code: 128 + n after signal n.
    """
    stage, *args = command
    child = start([sys.executable, "-m", f"stages.{stage}", *args], cwd=working_dir, env=dict(environment))
    signals.forward_to(child.send_signal)
    code = wait_for(child)
    with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, for a group of zombies
        os.killpg(child.pid, signal.SIGKILL)
    return code


def as_out_of_memory(code: int, killed_before: int) -> int:
    """OUT_OF_MEMORY for a stage that was killed while the machine's count of such kills went up.

    killed_before: the count before the stage began.
    """
    killed = code == 128 + signal.SIGKILL and oom_kills(MACHINE_COUNTERS) > killed_before
    return OUT_OF_MEMORY if killed else code


def oom_kills(counters: Sequence[Path]) -> int:
    """Number of processes that the kernel has killed because memory ran out, from the first file that exists.

    All of them have a line `oom_kill N`. 0 without such a line, as on other systems than Linux.
    """
    for path in counters:
        if path.exists():
            lines = (line.split() for line in path.read_text().splitlines())
            return next((int(count) for name, count in lines if name == "oom_kill"), 0)
    return 0


def this_machine(environment: Mapping[str, str]) -> Machine:
    """The machine and the packages that this process sees. environment: of the stage."""
    return Machine(
        python=platform.python_version(),
        packages=installed_packages(sys.path),
        cuda=cuda_of_torch(),
        system=platform.platform(),
        cpu=cpu_model(),
        arithmetic=arithmetic(environment),
        cores=usable_cores(),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    )


def cuda_of_torch() -> str | None:
    """The CUDA version of torch's build, from its version.py; None for a CPU build or without torch."""
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(path))["cuda"] if path else None


def triton_dir(image: Image | None, repository_dir: Path) -> Path:
    """The folder of kernels that Triton compiled, for each image, or each set of packages of this interpreter."""
    if image is not None:
        name = short(image[1].removeprefix("sha256:"))
    else:
        name = f"process-{short(json_digest([sys.version, installed_packages(sys.path)]))}"
    return repository_dir / ".bakeoff/triton" / name
