"""GPUs of this machine, as NVIDIA's driver shows them (NVML)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stages.core.errors import UserError

IDLE_BYTES = 256 * 2**20
"""In use on a GPU where nothing runs: the driver's own, a few MiB. A CUDA context on a large GPU takes more."""

DESKTOP_BYTES = 2 * 2**30
"""In use where a desktop is drawn: two 4K screens and a browser. A workstation's only GPU must not be refused."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One whole GPU. A figure that it does not support is None or empty, and does not count as use."""

    index: int
    """As nvidia-smi counts, in PCI order; CUDA may count otherwise (CUDA_DEVICE_ORDER). A stage is given the UUID."""
    uuid: str
    """GPU-8932f937-d72c-...; empty where the GPU does not answer."""
    name: str
    obstacle: str = ""
    """Why no stage can have it, whoever uses it: it is split by MIG, or is lost."""
    used_bytes: int | None = None
    """By all processes, those of other containers too; without what the driver reserves for itself."""
    total_bytes: int | None = None
    compute: Mapping[int, int | None] = field(default_factory=dict)
    """Bytes of each process that computes on it, by process id; None where the driver does not say."""
    graphics: Mapping[int, int | None] = field(default_factory=dict)
    """Likewise for processes that draw."""
    draws: bool = False
    """Whether it draws a desktop. Under WSL that is Windows', whose processes are not listed."""

    @property
    def is_empty(self) -> bool:
        """Whether nobody computes on it. A desktop's programs may, as long as they stay small."""
        allowed_bytes = DESKTOP_BYTES if self.draws or self.graphics else IDLE_BYTES
        return self.compute.keys() <= self.graphics.keys() and (self.used_bytes or 0) <= allowed_bytes

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def read_gpus() -> tuple[Gpu, ...]:
    """Every GPU of this machine, in NVML's order; none where there is no NVIDIA driver.

    Raises UserError where there is a driver that does not work.
    """
    import pynvml

    try:
        with _nvml():
            return tuple(_read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise UserError(f"NVIDIA's driver does not answer ({error}); see what it says to: nvidia-smi") from error


def driver_version() -> str | None:
    """The version of NVIDIA's driver, e.g. "580.95.05"; None where it does not answer."""
    import pynvml

    try:
        with _nvml():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


@contextmanager
def _nvml() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(index: int) -> Gpu:
    import pynvml

    def ask(query: Callable[..., Any], *args: Any, otherwise: Any) -> Any:
        """What WSL, Jetsons, vGPUs and older drivers do not answer is no obstacle."""
        try:
            return query(device, *args)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
            return otherwise

    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetName(device)
        if ask(pynvml.nvmlDeviceGetMigMode, otherwise=(0, 0))[0]:
            obstacle = f"split by MIG; made whole by: nvidia-smi -i {index} -mig 0"
            return Gpu(index=index, uuid=uuid, name=name, obstacle=obstacle)
        # Version 1 counts the hundreds of MiB that the driver reserves as used.
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2, otherwise=None)
        # By version: the plain names raise something else than NVMLError where the driver is too old.
        compute = ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, otherwise=())
        graphics = ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, otherwise=())
        return Gpu(
            index=index,
            uuid=uuid,
            name=name,
            used_bytes=memory and memory.used,
            total_bytes=memory and memory.total,
            compute={process.pid: process.usedGpuMemory for process in compute},
            graphics={process.pid: process.usedGpuMemory for process in graphics},
            draws=bool(ask(pynvml.nvmlDeviceGetDisplayActive, otherwise=True)),
        )
    except pynvml.NVMLError as error:  # lost, say: the others are not
        return Gpu(index=index, uuid="", name="not answering", obstacle=str(error))
