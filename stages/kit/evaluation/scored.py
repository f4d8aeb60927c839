"""A model's answers to a task's records, and their scores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answering import Answerer
from stages.kit.evaluation.likelihood import answer_log_likelihoods
from stages.kit.evaluation.routing import routing
from stages.kit.models.prompts import samples_for
from stages.kit.planning.ladder import read_at_once


@dataclass(frozen=True, kw_only=True)
class Scored:
    answers: list[str]
    metrics: dict[str, Any]
    rows: list[dict[str, Any]]
    """One row per sample, as in predictions.parquet."""
    answer_s: float
    """Seconds that the answers took."""


def score_answers(
    answerer: Answerer,
    records: Sequence[Any],
    questions: Sequence[Conversation],
    samples: ModuleType,
    scoring: ModuleType,
    *,
    answer_format: str | None,
    answers: list[str] | None = None,
) -> Scored:
    """Have the model answer a task's records, and score its answers.

    questions: of the records. samples, scoring: modules of the task. answer_format: the form of the answer.
    answers: another engine's, which are scored instead.
    """
    started = time.monotonic()
    if answers is None:
        answers = answerer.answers(questions)
    answer_s = time.monotonic() - started
    options: dict[str, Any] = {}
    asked = samples_for(samples, answerer.model.config.model_type, answerer.processor)
    if hasattr(asked, "score_options"):
        options = asked.score_options(records)
    if hasattr(scoring, "candidates"):  # answers that are not the model's own, whose likelihood counts
        limits: dict[str, Any] = {
            "batch_size": read_at_once(answerer.batch_size),
            "max_length": answerer.settings.max_length,
        }
        weighed = scoring.candidates(records, answer_format=answer_format)
        options["likelihoods"] = answer_log_likelihoods(answerer.model, answerer.processor, weighed, **limits)
        if hasattr(samples, "domain"):  # which a mixture's experts are told apart by
            answered = [asked.conversation(record, answered=True, answer_format=answer_format) for record in records]
            options["routing"] = routing(answerer.model, answerer.processor, answered, **limits)
    metrics, rows = scoring.score(records, answers, answer_format=answer_format, **options)
    return Scored(answers=answers, metrics=metrics, rows=rows, answer_s=answer_s)
