"""Memory that a stage uses, before and after it loads a model and at its peak; a GPU's utilization and power; and
errors for want of memory.

Measured memory differs from run to run. It is written below the report of the stage's task, where only `compare` and
`publish` read it: a stage that had it among its inputs would rerun each time. Torch is imported where a GPU is read and
nowhere else.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from threading import Event, Thread
from traceback import walk_tb
from typing import Annotated, Any, NamedTuple, Self

import psutil
from pydantic import Field
from pydantic.dataclasses import dataclass

from stages.core.errors import OutOfMemory, pluralize
from stages.core.records import STRICT, StageFile

log = logging.getLogger("stages")

GIB = 2**30
SAMPLE_S = 2.0
"""Seconds between two readings of a GPU's utilization and power; NVML averages over one second at most."""

Amount = Annotated[int, Field(ge=0, lt=2**63)]
"""Bytes, summed over GPUs; their peaks need not be at one moment."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StageMemory(StageFile):
    stage: str
    name: str
    """Recipe, baseline or build."""
    gpus: int
    """Number of GPUs with tensors of this process; of several processes the first one counts, on its GPU. 0 on a CPU,
    where all resident memory counts, Python and its libraries included."""
    used_before_bytes: Amount
    """Right before the stage loads a model."""
    free_before_bytes: Amount
    """On the device, whichever process uses the rest; on a CPU on the machine or in the container."""
    used_loaded_bytes: Amount
    """After loading; the largest, where several models are loaded one after the other."""
    free_loaded_bytes: Amount
    peak_bytes: Amount


class Reading(NamedTuple):
    used_bytes: int
    peak_bytes: int
    """Largest used_bytes until then."""
    free_bytes: int


def stage_memory_path(data_dir: Path, task: str, *, name: str, stage: str) -> Path:
    return data_dir / "report" / task / "memory" / name / f"{stage}.json"


class MemoryLog:
    """Readings of one stage, each a line of its log; create it right before the stage loads a model.

    gpus: those that this process puts tensors on (models/load.py, `gpus_in_use`); none on a CPU.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus = gpus
        self._before = self._read("before loading")
        self._loaded: Reading | None = None

    def loaded(self) -> None:
        """Take the reading after loading; of several models the one that used most counts."""
        now = self._read("after loading")
        if self._loaded is None or now.used_bytes > self._loaded.used_bytes:
            self._loaded = now

    def finish(self, stage: str, name: str) -> StageMemory:
        """Take the last reading. name: recipe, baseline or build."""
        assert self._loaded is not None, f"{stage} {name} loaded nothing"
        end = self._read("at the end")
        # The kernel counts a core's last pages late, so its peak can be below a reading before it.
        peak_bytes = max(end.peak_bytes, *(each.used_bytes for each in (self._before, self._loaded, end)))
        log.info("memory at its peak: %.2f GiB", peak_bytes / GIB)
        return StageMemory(
            stage=stage,
            name=name,
            gpus=len(self._gpus),
            used_before_bytes=self._before.used_bytes,
            free_before_bytes=self._before.free_bytes,
            used_loaded_bytes=self._loaded.used_bytes,
            free_loaded_bytes=self._loaded.free_bytes,
            peak_bytes=peak_bytes,
        )

    def write(self, stage: str, name: str, *, task: str) -> None:
        """Take the last reading, and write the record."""
        self.finish(stage, name).write(stage_memory_path(Path("data"), task, name=name, stage=stage))

    def _read(self, when: str) -> Reading:
        reading = reading_of(self._gpus)
        what = f"in tensors on {pluralize(len(self._gpus), 'GPU')}" if self._gpus else "resident"
        used_gib, free_gib = reading.used_bytes / GIB, reading.free_bytes / GIB
        log.info("memory %s: %.2f GiB %s; %.2f GiB free", when, used_gib, what, free_gib)
        return reading


class GpuUse:
    """Utilization, power and energy of GPUs within the block, as NVML reports them; a thread samples them.

    Nothing on a CPU and where NVML does not report them. A resumed training counts from where it was resumed.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus = gpus
        self._seconds = self._busy_seconds = self._joules = 0.0
        """Sampled time; time with a kernel running, averaged over GPUs; energy of all GPUs."""
        self._ended = Event()
        self._thread = Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        if self._gpus:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._gpus:
            self._thread.join()

    def totals(self) -> dict[str, Any]:
        """Mean utilization and power, and the energy that they add up to."""
        if not self._seconds:
            return {}
        return {
            "gpu_utilization": round(self._busy_seconds / self._seconds, 4),
            "gpu_watts": round(self._joules / self._seconds, 1),
            "gpu_kwh": round(self._joules / 3.6e6, 6),
        }

    def _sample(self) -> None:
        import pynvml
        import torch

        before = time.monotonic()
        while not self._ended.wait(SAMPLE_S):
            try:
                utilization = sum(map(torch.cuda.utilization, self._gpus)) / len(self._gpus) / 100
                watts = sum(map(torch.cuda.power_draw, self._gpus)) / 1000
            except (pynvml.NVMLError, ModuleNotFoundError, RuntimeError) as error:
                log.info("NVML reports no utilization and power of the GPU: %s", error)
                return
            before, elapsed = (now := time.monotonic()), now - before
            self._seconds += elapsed
            self._busy_seconds += elapsed * utilization
            self._joules += elapsed * watts


def reading_of(gpus: Sequence[int]) -> Reading:
    """On a GPU free_bytes comes from the driver, so it excludes CUDA's own context of this process."""
    if not gpus:
        return Reading(*resident_bytes(), free_bytes=free_and_total_bytes()[0])
    import torch

    return Reading(
        used_bytes=sum(map(torch.cuda.memory_allocated, gpus)),
        peak_bytes=sum(map(torch.cuda.max_memory_allocated, gpus)),
        free_bytes=sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus),
    )


def resident_bytes() -> tuple[int, int]:
    """(now, peak so far) of this process, without its children."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = psutil.Process().memory_info().rss
    # getrusage's peak starts with the peak of the parent process.
    peak_kib = int(lines["VmHWM"].split()[0]) if "VmHWM" in lines else getrusage(RUSAGE_SELF).ru_maxrss
    return now, max(now, 1024 * peak_kib)


# Mount point of the memory control group, and by version the names of its limit, its use, and the file cache within
# that, which the kernel reclaims first (cgroups(7); Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst).
_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_and_total_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) of the machine, or of the control group around this process that leaves least, as in a container.

    free: available without swapping, file cache included.
    """
    machine = psutil.virtual_memory()
    free, total = zip((machine.available, machine.total), *_control_groups(root), strict=True)
    return min(free), min(total)


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(free, limit) of each control group with a limit that this process is in."""
    memberships = root / "proc/self/cgroup"
    for line in memberships.read_text().splitlines() if memberships.exists() else ():
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, limit_name, used_name, cache_name = _V1 if controllers else _V2
        top = root / mounted
        # In a container the group is mounted as the top, under whatever path it has outside.
        group = top / inside.lstrip("/")
        for folder in (group, *group.parents):
            limit = folder / limit_name
            if folder.is_relative_to(top) and limit.exists() and (limit_bytes := limit.read_text().strip()) != "max":
                cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / used_name).read_text()) - int(cache.get(cache_name, 0))
                yield max(int(limit_bytes) - used, 0), int(limit_bytes)


_OUT_OF_MEMORY = (
    # torch.OutOfMemoryError, "CUDA error: out of memory" of a kernel, NCCL, bitsandbytes.
    "out of memory",
    # CUBLAS_, CUDNN_ and CUSOLVER_, which allocate workspaces beside torch.
    "STATUS_ALLOC_FAILED",
    "not enough workspace",
    # c10/core/CPUAllocator: "DefaultCPUAllocator: can't allocate memory"
    "can't allocate memory",
    # vLLM, at its start.
    "No available memory for the cache blocks",
    "is less than desired GPU memory utilization",
    # xllamacpp, which says no more.
    "Failed to init server",
)


@contextmanager
def recognised_out_of_memory() -> Iterator[None]:
    """Raises OutOfMemory, which has an exit code of its own, for an error that means "no memory left".

    Nothing is freed, as the process ends. bitsandbytes' own allocations end it themselves, with exit code 1.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise OutOfMemory(f"out of memory: {reason}") from error


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(map(says_out_of_memory, (str(error), *_conversion_errors(error))))


def says_out_of_memory(text: str) -> bool:
    return any(sign in text for sign in _OUT_OF_MEMORY)


def _conversion_errors(error: BaseException) -> Iterator[str]:
    """Errors of transformers' quantization of weights, which it logs and leaves out of the error that it raises."""
    for frame, _ in walk_tb(error.__traceback__):
        yield from getattr(frame.f_locals.get("loading_info"), "conversion_errors", {}).values()
