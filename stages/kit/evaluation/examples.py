"""Which samples a report shows of a model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any


def chosen_examples(rows: Sequence[Mapping[str, Any]], score: str, *, count: int, seed: int) -> dict[str, list[int]]:
    """Positions of the `best` and the `worst` rows by `score`, the most extreme first, and of `random` ones.

    count: of each kind, fewer where there are fewer rows.
    seed: of the random choice, which is the same for every model on the same records, so that models compare.
    """
    ordered = sorted(range(len(rows)), key=lambda index: rows[index][score])
    count = min(count, len(rows))
    return {
        "best": ordered[::-1][:count],
        "worst": ordered[:count],
        "random": random.Random(seed).sample(range(len(rows)), count),
    }
