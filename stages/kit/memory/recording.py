"""The allocations and frees of a training step, in order, and the peak of each phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from stages.kit.memory.allocator import CachingAllocator, rounded_bytes
from stages.kit.planning.prediction import Budget, Phase

Peak: TypeAlias = Counter[Budget]
"""The fullest moment of a phase: bytes by what they are spent on. Its total() is what tensors take."""


@dataclass(slots=True)
class Storage:
    """One piece of memory that tensors share."""

    size_bytes: int
    budget: Budget
    born: int
    died: int | None = None
    """Ticks of the recording's clock; None where it outlived the recording."""
    gpu: int = 0
    """The one that it lies on, where layers are spread over several."""


@dataclass
class Recording:
    """The storages of one step. Times are ticks: the n-th allocation, free or change of phase."""

    cuda: bool
    """Whether sizes count as torch's CUDA allocator hands them out, or as they are."""
    storages: list[Storage] = field(default_factory=list)
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    """When each phase began."""

    def on(self, gpu: int) -> Recording:
        """The part of the record that lies on one GPU."""
        return replace(self, storages=[storage for storage in self.storages if storage.gpu == gpu])

    def timeline(self) -> list[tuple[int, Storage | Phase]]:
        """In order: storages, where they are born and where they die, and phases, where they begin."""
        events: list[tuple[int, Storage | Phase]] = [*self.phases]
        for storage in self.storages:
            events.append((storage.born, storage))
            if storage.died is not None:
                events.append((storage.died, storage))
        return sorted(events, key=lambda event: event[0])

    def peaks(self) -> dict[Phase, Peak]:
        """Of each phase; what is left of earlier phases counts."""
        phase: Phase = "load"
        held = Peak()
        peaks = {phase: Peak()}
        for tick, event in self.timeline():
            if isinstance(event, Storage):
                size = rounded_bytes(event.size_bytes) if self.cuda else event.size_bytes
                held[event.budget] += size if tick == event.born else -size
            else:
                phase = event
            if phase not in peaks or held.total() > peaks[phase].total():
                peaks[phase] = held.copy()
        return peaks

    def replayed(self, *, expandable: bool) -> CachingAllocator:
        """torch's allocator at the end of the step."""
        allocator = CachingAllocator(expandable=expandable)
        for tick, event in self.timeline():
            if isinstance(event, Storage) and event.size_bytes:
                if tick == event.born:
                    allocator.allocate(id(event), event.size_bytes)
                else:
                    allocator.free(id(event))
        return allocator
