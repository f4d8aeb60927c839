"""The order in which stages start side by side: a function of what they wait for, and of what runs already."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage that may have something to do."""

    waits_for: frozenset[str]
    """The steps that it depends on directly."""
    gpus: int = 0
    """GPUs that it will lease."""


def next_steps(
    steps: Mapping[str, Step],
    *,
    waiting: Collection[str],
    running: Collection[str],
    done: Collection[str],
    jobs: int,
    gpus: int,
) -> list[str]:
    """The names of the steps to start now, those first that begin the longest chain of steps.

    steps: each after those that it waits for.
    waiting: not started yet. done: ended well; what waits for a step that failed is never started.
    jobs: steps at once. gpus: of the machine; a step that wants more than there are starts when no other has one, and
    says itself what is wrong.
    """
    length = chain_lengths(steps)
    ready = [name for name in waiting if steps[name].waits_for <= set(done)]
    chosen: list[str] = []
    for name in sorted(ready, key=lambda name: -length[name]):
        together = [*running, *chosen]
        used, wanted = sum(steps[other].gpus for other in together), steps[name].gpus
        has_gpus = not (wanted and used) or used + wanted <= gpus
        if len(together) < jobs and has_gpus:
            chosen.append(name)
    return chosen


def chain_lengths(steps: Mapping[str, Step]) -> dict[str, int]:
    """The number of steps in the longest chain that begins with each one, itself included.

    steps: each after those that it waits for.
    """
    lengths = dict.fromkeys(steps, 1)
    for name in reversed(lengths):
        for other in steps[name].waits_for:
            lengths[other] = max(lengths[other], 1 + lengths[name])
    return lengths
