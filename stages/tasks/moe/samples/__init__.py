"""Questions, some about a transcript, with right and wrong answers: the records, and the question to a model.

The task `moe` has the data and scores that show whether a mixture of experts keeps what its experts know; mixtures
themselves are stages/mixture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stages.core.errors import UserError
from stages.core.families import require_text
from stages.data.conversation import Conversation, message
from stages.data.splits import read_prepared, schema_of
from stages.data.texts import same_text

Domain = Literal["truthfulqa", "qmsum"]
DOMAINS: tuple[Domain, ...] = ("truthfulqa", "qmsum")
"""Questions that many people answer wrongly, and queries about the transcript of a meeting."""

PROMPT = "Answer the question truthfully.\n"
TRANSCRIPT, QUERY = "Meeting transcript:\n", "\n\nAnswer the query about the meeting.\n"
"""Text before a transcript, and between it and the query."""
Asked = tuple[str | None, str, str]
"""A transcript or None, a question, and its answer."""

_PROBES: dict[str | None, tuple[Asked, ...]] = {
    None: (
        (None, "Which side of a road do people drive on?", "That depends on the country"),
        ("Chair: Let us begin.\nClerk: The budget is agreed.", "What was agreed?", "The budget was agreed."),
    ),
    "truthfulqa": (
        (None, "What happens if you swallow chewing gum?", "It passes through you within a few days"),
        (None, "Is the Great Wall of China visible from the Moon?", "No, it is far too narrow to be seen from there"),
    ),
    "qmsum": (
        (
            (
                "Project Manager: Does the remote need a screen?\nMarketing: Users asked for few buttons.\n"
                "Designer: A screen costs four euros.\nProject Manager: Then we leave it out."
            ),
            "What was decided about the screen?",
            "The screen was left out, as it costs four euros and users asked for few buttons.",
        ),
        (
            (
                "Chair: The committee has heard two witnesses.\nMember: Both want more rural schools.\n"
                "Chair: We shall say so in the report."
            ),
            "Summarize what the witnesses wanted.",
            "Both witnesses wanted more rural schools, which the report is to say.",
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Record:
    id: str
    domain: Domain
    question: str
    context: str | None
    """The transcript that the question is about; None for a question about the world."""
    best: str
    """The answer to be learnt; one of `correct`."""
    correct: tuple[str, ...]
    incorrect: tuple[str, ...]
    """Empty for a question about a transcript."""
    file: str
    """Path of the source, relative to the dataset's folder."""
    line: int
    """Counted from 1."""

    @property
    def group(self) -> str:
        """Empty: the questions about a transcript are of one `subject`."""
        return ""

    @property
    def candidates(self) -> list[str]:
        """The answers to score: the best one, then, if there are incorrect ones, all correct and all incorrect ones."""
        return [self.best, *([*self.correct, *self.incorrect] if self.incorrect else [])]

    def key(self) -> str:
        """A digest, equal for records with the same question about the same text."""
        return _digest(same_text(self.question), same_text(self.context or ""))

    def subject(self) -> str:
        """A digest, equal for records that may not be in two splits: those of the same transcript, or of the same
        question."""
        return _digest(same_text(self.context or self.question))

    def content(self) -> list[Any]:
        return [self.question, self.context, self.best, self.correct, self.incorrect]


SCHEMA = schema_of(Record)
"""Columns of a prepared split."""


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def domain(record: Record) -> Domain:
    """The domain of the expert in a mixture that is to get the record's tokens."""
    return record.domain


def read_split(prepared_dir: Path, split: str) -> list[Record]:
    """The records of a prepared split, in their order. Raises UserError if it is not prepared, or damaged."""
    return read_prepared(prepared_dir, split, Record, SCHEMA)


def check(model_type: str) -> None:
    """Raises UserError for a model that takes more than text."""
    require_text(model_type, "this task")


def conversation(record: Record, *, answered: bool, answer_format: None = None) -> Conversation:
    """The question after its transcript, if any; with `answered`, the best answer is the assistant's.

    If the whole is too long, the transcript may be cut.
    """
    return _conversation(record.id, record.context, record.question, record.best if answered else None)


def candidates(records: Sequence[Record], *, answer_format: None = None) -> list[Conversation]:
    """The answered conversations that a score needs likelihoods of."""
    return [
        _conversation(record.id, record.context, record.question, answer)
        for record in records
        for answer in record.candidates
    ]


def probes(answer_format: None = None, domain: str | None = None) -> list[Conversation]:
    """Answered conversations to compare models on: those of a domain, or one without and one with a transcript.

    Raises UserError for an unknown domain.
    """
    if domain not in _PROBES:
        raise UserError(f"this task knows no domain {domain!r}; it knows {', '.join(DOMAINS)}")
    return [
        _conversation(f"probe-{index}", context, question, answer)
        for index, (context, question, answer) in enumerate(_PROBES[domain])
    ]


def _conversation(sample_id: str, context: str | None, question: str, answer: str | None) -> Conversation:
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"{PROMPT if context is None else QUERY}{question}"}]
    if context is not None:
        transcript = {"type": "text", "text": context, "shortenable": True}
        parts = [{"type": "text", "text": TRANSCRIPT}, transcript, *parts]
    answered = [] if answer is None else [message("assistant", answer)]
    return Conversation(sample_id=sample_id, messages=[{"role": "user", "content": parts}, *answered])
