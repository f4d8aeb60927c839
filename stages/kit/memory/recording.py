"""What a training step allocated and freed, in order; and what of it was alive at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from stages.kit.memory.allocator import rounded_bytes
from stages.kit.planning.prediction import Budget, Phase


@dataclass(slots=True)
class Storage:
    """One piece of memory that tensors share."""

    size_bytes: int
    phase: Phase
    """In which it was allocated."""
    budget: Budget
    born: int
    died: int | None = None
    """Ticks of the recording's clock; None where it outlived the recording."""
    gpu: int = 0
    """The one that it lies on, where layers are spread over several."""


@dataclass(frozen=True)
class Peak:
    """A phase's fullest moment."""

    size_bytes: int
    budget: dict[Budget, int]


@dataclass
class Recording:
    """The storages of one step. Times are ticks: the n-th allocation, free or change of phase."""

    rounded: bool = True
    """Whether sizes count as torch's CUDA allocator hands them out, or as they are."""
    storages: list[Storage] = field(default_factory=list)
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    """When each phase began."""

    def on(self, gpu: int) -> Recording:
        """The part of the record that lies on one GPU."""
        return replace(self, storages=[storage for storage in self.storages if storage.gpu == gpu])

    def size(self, storage: Storage) -> int:
        return rounded_bytes(storage.size_bytes) if self.rounded else storage.size_bytes

    def timeline(self) -> Iterator[tuple[int, bool, Storage]]:
        """Every allocation (True) and free (False), in order."""
        events = [(storage.born, True, storage) for storage in self.storages]
        events += [(storage.died, False, storage) for storage in self.storages if storage.died is not None]
        yield from sorted(events, key=lambda event: event[0])

    def peaks(self) -> dict[Phase, Peak]:
        """The fullest moment of each phase, what came before and is still alive counted."""
        starts = iter(self.phases)
        upcoming = next(starts, None)
        phase: Phase = "load"
        held = 0
        budget: Counter[Budget] = Counter()
        peaks: dict[Phase, Peak] = {}
        _raise(peaks, phase, held, budget)
        for tick, born, storage in self.timeline():
            while upcoming is not None and upcoming[0] <= tick:
                phase, upcoming = upcoming[1], next(starts, None)
                _raise(peaks, phase, held, budget)
            size = self.size(storage) if born else -self.size(storage)
            held += size
            budget[storage.budget] += size
            if born:
                _raise(peaks, phase, held, budget)
        for _, phase in (upcoming, *starts) if upcoming is not None else ():  # nothing came or went from there on
            _raise(peaks, phase, held, budget)
        return peaks


def _raise(peaks: dict[Phase, Peak], phase: Phase, held: int, budget: Counter[Budget]) -> None:
    if phase not in peaks or held > peaks[phase].size_bytes:
        peaks[phase] = Peak(held, dict(budget))
