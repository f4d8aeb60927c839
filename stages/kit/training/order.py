"""The order of the samples: within an optimizer step, which takes the same ones in any order, by their length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import Sampler


class SortedInSteps(Sampler[int]):
    """The samples of each step, the longest first, so that its micro-batches have less padding.

    Which samples a step has, accelerate's sampler draws from (seed, epoch) alone; so does this.
    """

    def __init__(self, drawn: SeedableRandomSampler, lengths: Sequence[int], effective_batch: int) -> None:
        """lengths: in tokens, by sample. effective_batch: samples in a step, of all processes."""
        self.drawn = drawn
        self.lengths = lengths
        self.effective_batch = effective_batch

    def __len__(self) -> int:
        return len(self.drawn)

    def __iter__(self) -> Iterator[int]:
        drawn = iter(self.drawn)
        while step := list(islice(drawn, self.effective_batch)):
            yield from sorted(step, key=lambda sample: (-self.lengths[sample], sample))

    def set_epoch(self, epoch: int) -> None:
        """As accelerate's data loader passes it on."""
        self.drawn.set_epoch(epoch)
