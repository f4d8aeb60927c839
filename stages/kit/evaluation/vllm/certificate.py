"""The certificate of a second engine: it answers as our own models do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from stages.core.errors import UserError, counted, listed
from stages.kit.evaluation.vllm.questions import Answer, View

CERTIFICATE_FILE = "vllm.json"


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far the log-probabilities of the answers' tokens, in nats, may be from our own model's."""

    mean: float
    """The mean over all tokens."""
    largest: float
    """The largest of any token."""
    close: float
    """A token that is likelier than another by no more was a close choice."""


TOLERANCE = {
    "fp32": Tolerance(mean=1e-4, largest=1e-3, close=2e-3),
    "fp16": Tolerance(mean=1e-2, largest=0.1, close=0.2),
    # As far apart as transformers is from itself with another split of the work.
    "bf16": Tolerance(mean=0.05, largest=1.0, close=1.0),
}
"""By precision."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    run: str
    engine: str
    """Its name and version."""
    model: str
    """Digest of the model's folder."""
    environment: str
    """Digest of the engine's image, or of its lock."""
    request: str
    """Digest of what it was asked: its options, the prompts, the pictures."""
    device: str
    """The device of both: cpu, or the GPU's name."""
    precision: str
    tolerance: Tolerance
    samples: int
    tokens: int
    """Of all answers."""
    log_prob_deviation: float
    """The largest of any token of any answer."""
    mean_deviation: float
    """The mean over all tokens."""
    ties: int
    """Tokens that are not the likeliest for our own model, yet were close choices."""
    same_answers: int
    """Samples that our own model answers word for word alike, and so their boxes."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    def __str__(self) -> str:
        return (
            f"{self.same_answers} of {counted(self.samples, 'answer')} are the same; log-probabilities of "
            f"{counted(self.tokens, 'token')} are off by {self.mean_deviation:.1e} on average (at most "
            f"{self.tolerance.mean:g}) and by up to {self.log_prob_deviation:.1e} (at most {self.tolerance.largest:g})"
        )


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One sample, answered by both."""

    sample_id: str
    deviations: list[float]
    """One for each of its tokens; none where the prompts differ."""
    ties: int
    same_answer: bool
    unlike: str
    """What differs more than rounding explains; "" for nothing."""

    @property
    def deviation(self) -> float:
        """The largest of its tokens; NaN where any is."""
        return torch.tensor(self.deviations).max().item() if self.deviations else float("nan")


def mean_deviation(results: Sequence[Compared]) -> float:
    """The mean over all tokens of these samples."""
    return torch.tensor([each for result in results for each in result.deviations]).mean().item()


def compared(sample_id: str, theirs: Answer, view: View, *, same_answer: bool, tolerance: Tolerance) -> Compared:
    """A sample's answers. view: our model's, of the tokens of the other engine. same_answer: our own words for it."""
    deviations: list[float] = []
    ties, unlike = 0, ""
    if theirs.prompt != view.prompt:
        unlike = f"reads another prompt: {difference(theirs.prompt, view.prompt)}"
    else:
        differences = (torch.tensor(theirs.log_probs) - view.log_probs).abs()
        deviations = differences.tolist()
        margins = view.margins
        ties = int(((margins > 0) & (margins <= tolerance.close)).sum())
        if not bool((differences <= tolerance.largest).all()):  # a NaN is unlike too
            unlike = f"log-probabilities off by {differences.max():.2g}"
        if (margins > tolerance.close).any():
            place = int((margins > tolerance.close).nonzero()[0])
            unlike = f"token {place + 1} of the answer is another; {unlike}".removesuffix("; ")
        elif not same_answer and not bool((margins.abs() <= tolerance.close).any()):
            unlike = f"the answer is another, and no token of it was a close choice; {unlike}".removesuffix("; ")
    return Compared(sample_id=sample_id, deviations=deviations, ties=ties, same_answer=same_answer, unlike=unlike)


def difference(theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Where two sequences of token ids part."""
    place = next((place for place, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
    if place is None:
        return f"{len(theirs)} tokens, not {len(ours)}"
    return f"its token {place + 1} is {theirs[place]}, not {ours[place]}"


def require_alike(run: str, engine: str, results: Sequence[Compared], *, tolerance: Tolerance) -> None:
    """Raises UserError, which names the samples, where the engine answers unlike our own model."""
    unlike = [result for result in results if result.unlike]
    if not unlike and not (mean := mean_deviation(results)) <= tolerance.mean:
        raise UserError(
            f"{engine} does not answer as {run} does in transformers: log-probabilities are off by {mean:.2g} "
            f"on average, which rounding does not explain; it neither serves nor evaluates it"
        )
    if unlike:
        shown = listed([f"{result.sample_id}: {result.unlike}" for result in unlike], 5)
        raise UserError(
            f"{engine} does not answer as {run} does in transformers, in {len(unlike)} of "
            f"{counted(len(results), 'sample')}; it neither serves nor evaluates it:\n{shown}"
        )


def read_certificate(path: Path) -> Certificate | None:
    """None where there is none, or one that is damaged: it is made anew then."""
    try:
        return TypeAdapter(Certificate).validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError):
        return None
