"""A prediction in words: does it fit, and what is the memory spent on?

Amounts are in GiB with two decimals, and always add up to the total beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.kit.planning.prediction import BUDGET, PHASES, Budget, Prediction, Verdict

GIB = 2**30
LETTERS: dict[Budget, str] = {
    "weights": "W",
    "adapters": "D",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "logits": "L",
    "temporaries": "T",
    "overhead": "H",
}
"""What stands for each in a bar."""


def verdict(prediction: Prediction, capacity_bytes: int) -> Verdict:
    """Against the interval that the total is expected in, not against the total alone."""
    if prediction.high_bytes <= capacity_bytes:
        return "fits"
    return "does not fit" if prediction.low_bytes > capacity_bytes else "too close"


def apportion(amounts: Sequence[int], units: int) -> list[int]:
    """Share out `units` in proportion to amounts >= 0, so that they add up to exactly `units`.

    Each gets its proportion, rounded up or down: those with the largest remainders up (Hamilton's method). Where all
    amounts are 0, nobody gets any.
    """
    total = sum(amounts)
    if total == 0:
        return [0] * len(amounts)
    shares = [amount * units // total for amount in amounts]
    by_remainder = sorted(range(len(amounts)), key=lambda index: -(amounts[index] * units % total))
    for index in by_remainder[: units - sum(shares)]:
        shares[index] += 1
    return shares


def budget_lines(prediction: Prediction, capacity_bytes: int | None = None) -> list[str]:
    """Entries, facts and verdict as plain ASCII: for logs, and for the message of a refusal."""
    lines = [f"{letter:1} {name:<11} {gib:>8} GiB {share:>7}" for letter, name, gib, share in entries(prediction)]
    for gpu, each in enumerate(prediction.gpus):
        judged = "" if capacity_bytes is None else f" {verdict(each, capacity_bytes):>{len('does not fit')}}"
        lines.append(f"{f'GPU {gpu}':13} {gib_text(each.total_bytes):>8} GiB{judged}")
    lines += fact_lines(prediction, capacity_bytes)
    return lines if capacity_bytes is None else [*lines, verdict_line(prediction, capacity_bytes)]


def spent_bytes(prediction: Prediction) -> dict[Budget, int]:
    """What anything is spent on, in the usual order."""
    assert min(prediction.budget.values(), default=0) >= 0, prediction.budget
    assert sum(prediction.budget.values()) == prediction.total_bytes, (prediction.budget, prediction.total_bytes)
    return {entry: prediction.budget[entry] for entry in BUDGET if prediction.budget.get(entry)}


def entries(prediction: Prediction) -> list[tuple[str, str, str, str]]:
    """Letter, name, GiB and share of the total of each entry, the total last. Both columns add up as shown."""
    spent = spent_bytes(prediction)
    amounts = list(spent.values())
    hundredths = apportion(amounts, _hundredths(prediction.total_bytes))
    permille = apportion(amounts, 1000)
    entries = [
        (LETTERS[entry], entry, f"{gib / 100:.2f}", f"{share / 10:.1f}%")
        for entry, gib, share in zip(spent, hundredths, permille, strict=True)
    ]
    return [*entries, ("", "total", gib_text(prediction.total_bytes), f"{sum(permille) / 10:.1f}%")]


def fact_lines(prediction: Prediction, capacity_bytes: int | None) -> list[str]:
    phases = [f"{phase} {gib_text(prediction.phases[phase])}" for phase in PHASES if phase in prediction.phases]
    expected = f"{gib_text(prediction.low_bytes)} to {gib_text(prediction.high_bytes)} GiB"
    gpu = f"GPU {prediction.fullest_gpu}, " if prediction.gpus else ""
    lines = [
        f"fullest   {gpu}in {prediction.peak_phase}; allocated at most, GiB: {', '.join(phases)}",
        f"expected  {expected} (calibration: {prediction.calibration})",
    ]
    return lines if capacity_bytes is None else [*lines, f"usable    {gib_text(capacity_bytes)} GiB"]


def verdict_line(prediction: Prediction, capacity_bytes: int) -> str:
    return f"verdict   {verdict(prediction, capacity_bytes)}"


def _hundredths(num_bytes: int) -> int:
    """In hundredths of a GiB, the nearest."""
    return (num_bytes * 100 + GIB // 2) // GIB


def gib_text(num_bytes: int) -> str:
    return f"{_hundredths(num_bytes) / 100:.2f}"
