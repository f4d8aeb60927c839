"""The memory log of a stage: what it holds before it loads a model, after, and in its fullest moment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from stages.core.params.schema import DeviceParams
from stages.kit.memory_use.resident import free_and_total_bytes, resident_bytes
from stages.kit.memory_use.stage_memory import MemoryReading, StageMemory
from stages.kit.models.load import check_count, local_device

log = logging.getLogger("stages")

GIB = 2**30


class MemoryLog:
    """Opened right before a stage loads a model; that and every later mark is a line of the log.

    placement: of the model, as load_model has it. `balanced` is measured on all GPUs, all else on this process's own.
    Raises UserError where there are fewer GPUs than the profile wants.
    """

    def __init__(self, device: DeviceParams, placement: str = "single") -> None:
        check_count(device)
        self._gpus = _gpus(device, placement)
        self._before = self._held()
        self._after: MemoryReading | None = None
        log.info("memory before loading: %s; %s free", *self._said(self._before))

    def loaded(self) -> None:
        """A model is there, with all that is put on it. Of several, one after the other, the fullest moment counts."""
        now = self._held()
        if self._after is None or now.held_bytes > self._after.held_bytes:
            self._after = now
            log.info("memory after loading: %s; %s left for the work", *self._said(now))

    def finish(self, stage: str, name: str) -> StageMemory:
        """The work is done. name: of the recipe, baseline or build."""
        assert self._after is not None, f"{stage} {name} loaded nothing"
        end = self._held()
        # The kernel counts a core's last pages late, and may have less for the peak than it had for a moment before it.
        moments = (self._before, self._after, end)
        end = replace(
            end,
            peak_bytes=max(end.peak_bytes, *(moment.held_bytes for moment in moments)),
            peak_reserved_bytes=max(end.peak_reserved_bytes, *(moment.reserved_bytes for moment in moments)),
        )
        log.info("memory at its peak: %s", self._amount(end.peak_bytes, end.peak_reserved_bytes))
        return StageMemory(
            stage=stage,
            name=name,
            kind="cuda_allocated" if self._gpus else "cpu_resident",
            gpus=len(self._gpus),
            before_load=self._before,
            after_load=self._after,
            end=end,
        )

    def _held(self) -> MemoryReading:
        return held_on_gpus(self._gpus) if self._gpus else held_on_cpu()

    def _said(self, held: MemoryReading) -> tuple[str, str]:
        free = f"{held.free_bytes / GIB:.2f} of {held.total_bytes / GIB:.2f} GiB"
        return self._amount(held.held_bytes, held.reserved_bytes), free

    def _amount(self, held_bytes: int, reserved_bytes: int) -> str:
        if not self._gpus:
            return f"{held_bytes / GIB:.2f} GiB resident"
        where = "the GPU" if len(self._gpus) == 1 else f"{len(self._gpus)} GPUs"
        return f"{held_bytes / GIB:.2f} GiB in tensors on {where}, {reserved_bytes / GIB:.2f} reserved"


def _gpus(device: DeviceParams, placement: str) -> tuple[int, ...]:
    """Those that this process puts tensors on; none on a CPU."""
    if device.kind == "cpu":
        return ()
    return tuple(range(device.count)) if placement == "balanced" else (local_device(device).index,)


def held_on_cpu() -> MemoryReading:
    now, most = resident_bytes()
    free, total = free_and_total_bytes()
    return MemoryReading(
        held_bytes=now,
        reserved_bytes=now,
        peak_bytes=most,
        peak_reserved_bytes=most,
        free_bytes=free,
        total_bytes=total,
    )


def held_on_gpus(gpus: Sequence[int]) -> MemoryReading:
    """free_bytes is the driver's word, so CUDA's own context for this process, which asking makes, is not in it."""
    free, total = zip(*map(torch.cuda.mem_get_info, gpus), strict=True)
    return MemoryReading(
        held_bytes=sum(map(torch.cuda.memory_allocated, gpus)),
        reserved_bytes=sum(map(torch.cuda.memory_reserved, gpus)),
        peak_bytes=sum(map(torch.cuda.max_memory_allocated, gpus)),
        peak_reserved_bytes=sum(map(torch.cuda.max_memory_reserved, gpus)),
        free_bytes=sum(free),
        total_bytes=sum(total),
    )
