"""Score a model's completions by its task, word overlaps that tasks share, and the samples that a report shows.

Tasks import this module, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import random
import re
import time
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stages.core.errors import UserError, join_truncated, pluralize
from stages.core.given_files import require_own
from stages.core.records import shown
from stages.data.conversation import Conversation
from stages.data.texts import SURROGATE, UnreadableText, json_objects, read_text

if TYPE_CHECKING:
    from stages.evaluation.generate import TextGenerator
    from stages.evaluation.llama_cpp import LlamaCpp

EXAMPLES = 3
"""Samples of each kind."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    completions: list[str]
    metrics: dict[str, Any]
    rows: list[dict[str, Any]]
    """One row per sample, as in predictions.parquet."""
    generation_s: float
    """Seconds of generation."""


def score_completions(
    generator: TextGenerator | LlamaCpp,
    records: Sequence[Any],
    questions: Sequence[Conversation],
    scoring: ModuleType,
    *,
    completions: list[str] | None = None,
    **options: Any,
) -> Scored:
    """Have the model complete the questions of a task's records, and score its completions.

    scoring: module of the task. completions: another engine's, which are scored instead. options: of its `score`.
    """
    started = time.monotonic()
    if completions is None:
        completions = [*generator.completions(questions)]
    generation_s = time.monotonic() - started
    samples, answer_format = generator.model_samples, generator.answer_format
    if hasattr(samples, "score_options"):
        options |= samples.score_options(records)
    if hasattr(samples, "candidates"):  # reference answers to compute the likelihood of
        options["likelihoods"] = generator.likelihoods(samples.candidates(records, answer_format=answer_format))
        if hasattr(samples, "domain"):  # a mixture has an expert for each
            answered = [samples.conversation(each, answered=True, answer_format=answer_format) for each in records]
            options["routing"] = generator.routing(answered)
    metrics, rows = scoring.score(records, completions, answer_format=answer_format, **options)
    return Scored(completions=completions, metrics=metrics, rows=rows, generation_s=generation_s)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run's task, with the samples that it is scored on."""

    name: str
    samples: ModuleType
    scoring: ModuleType
    answer_format: str | None
    models: dict[str, Any]
    """Options of `score`: models that it scores with, besides the evaluated one."""
    records: Sequence[Any]
    questions: Sequence[Conversation]

    def score(self, generator: TextGenerator | LlamaCpp, completions: list[str] | None = None) -> Scored:
        """Score a model's completions, or another engine's."""
        return score_completions(
            generator, self.records, self.questions, self.scoring, completions=completions, **self.models
        )


def rebatched(generator: TextGenerator, task: Task, scored: Scored) -> dict[str, Any]:
    """The changes that half the batch brings: in 16 bits a completion depends on the others in its batch."""
    halved = replace(generator, batch_size=min(generator.batch_size, len(task.records)) // 2 or 2)
    again = task.score(halved)
    same = sum(before == after for before, after in zip(scored.completions, again.completions, strict=True))
    metrics = {key: again.metrics[key] for key in task.scoring.SUMMARY if isinstance(again.metrics.get(key), float)}
    return metrics | {"batch_size": halved.batch_size, "changed": 1 - same / len(task.records)}


def read_completions(
    path: Path,
    records: Sequence[Any],
    questions: Sequence[Conversation],
    samples: ModuleType,
    *,
    answer_format: str | None,
) -> list[str]:
    """Another system's completions from an answers file, one for each record, in their order.

    The file has JSON Lines, each with the `id` of a sample and the completion as its `answer`; or a form of the task's
    own, which its `samples.read_completions(path, records, answer_format)` reads as (line, id, text).
    Raises UserError, which names the samples, for one without a completion, with several, or unknown.
    """
    require_own(path, path.parent)
    own = getattr(samples, "read_completions", None)
    try:
        given = list(own(path, records, answer_format) if own and path.suffix != ".jsonl" else _json_completions(path))
    except UnreadableText as error:
        raise UserError(f"{path}: {error}") from None
    completions: dict[str, str] = {}
    known = dict.fromkeys(question.sample_id for question in questions)
    problems: dict[str, list[str]] = {"no such sample": [], "a second answer": []}
    for line, sample_id, text in given:
        if sample_id not in known or sample_id in completions:
            kind = "a second answer" if sample_id in completions else "no such sample"
            problems[kind].append(f"{sample_id!r} in line {line}")
        completions[sample_id] = text
    problems["no answer"] = [repr(sample_id) for sample_id in known if sample_id not in completions]
    if lines := [f"  {kind}: {join_truncated(names)}" for kind, names in problems.items() if names]:
        expected = f"expected one answer to each of the {pluralize(len(known), 'sample')} of the split"
        raise UserError(f"{path} does not fit the data, {expected}:\n" + "\n".join(lines))
    return [completions[sample_id] for sample_id in known]


def _json_completions(path: Path) -> Iterator[tuple[int, str, str]]:
    unit, objects = json_objects(read_text(path))
    for number, content in objects:
        if isinstance(content, str):
            raise UserError(f"{path} {unit} {number}: {content}")
        sample_id, completion = content.get("id"), content.get("answer")
        if not isinstance(sample_id, str) or not isinstance(completion, str):
            raise UserError(f'{path} {unit} {number}: {shown(content)}; expected {{"id": SAMPLE, "answer": TEXT}}')
        if SURROGATE.search(completion):
            raise UserError(f"{path} {unit} {number}: the answer holds half of a surrogate pair, which is no character")
        yield number, sample_id, completion


def rouge(completion: str, reference: str, keys: Sequence[str], *, of_any_language: bool = False) -> dict[str, float]:
    """F-measures, from 0 to 1, of one-word, two-word and longest common sequences: rouge1, rouge2 and rougeL of `keys`.

    The same as Google's rouge-score without stemming, computed by torchmetrics.
    of_any_language: words are runs of Unicode's letters and digits, not of a to z and digits alone.
    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
    """
    # torchmetrics imports torch.
    from torchmetrics.functional.text.rouge import rouge_score

    scores = rouge_score(completion, reference, rouge_keys=tuple(keys), normalizer=_words if of_any_language else None)
    return {key: float(scores[f"{key}_fmeasure"]) for key in keys}


def token_f1(completion: str, reference: str) -> float:
    """F1 of the words, in any order, from 0 to 1: without case, ASCII punctuation and English articles.

    Source: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016, evaluate-v1.1.
    """
    from torchmetrics.functional.text.squad import squad

    target: dict[str, Any] = {
        "id": "",
        "answers": {"answer_start": [0], "text": [unicodedata.normalize("NFC", reference)]},
    }
    scores = squad({"id": "", "prediction_text": unicodedata.normalize("NFC", completion)}, target)
    return float(scores["f1"]) / 100


def _words(text: str) -> str:
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFC", text).casefold())


def summary(metrics: Mapping[str, Any], scoring: ModuleType) -> str:
    """The figures that the task's SUMMARY names, as far as there are any, in a line."""
    figures = {key.replace("_", " "): metrics[key] for key in scoring.SUMMARY if key in metrics}
    return ", ".join(
        f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
    )


def failures(rows: Sequence[Mapping[str, Any]], scoring: ModuleType) -> dict[str, list[int]]:
    """Indices of the rows by their kind of failure, a name with underscores. Empty for a task without `failure`."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows if hasattr(scoring, "failure") else ()):
        if kind := scoring.failure(row):
            by_kind[kind].append(index)
    return dict(sorted(by_kind.items()))


def mark_examples(
    records: Sequence[Any], rows: Sequence[Mapping[str, Any]], scoring: ModuleType, out_dir: Path
) -> list[list[str]]:
    """Choose the samples that a report shows: best-1 ..., worst-1 ..., 1 the most extreme, random-1 ..., and KIND-1 ...
    of each kind of failure that the task tells apart: at most EXAMPLES of each.

    rows: of the task's `scoring`, one for each record. The random ones are the same for every model on the same
    records, so that models can be compared. out_dir: gets the image MARK.png of each one that the task draws.
    Returns the marks of each row.
    """
    assert len(records) == len(rows), f"{len(rows)} rows for {len(records)} records"
    score = scoring.ordered_by(records[0])
    ordered = sorted(range(len(rows)), key=lambda index: rows[index][score])
    chosen = {
        "best": ordered[::-1][:EXAMPLES],
        "worst": ordered[:EXAMPLES],
        "random": random.Random(0).sample(range(len(rows)), min(EXAMPLES, len(rows))),
        **{kind: indices[:EXAMPLES] for kind, indices in failures(rows, scoring).items()},
    }
    marks: list[list[str]] = [[] for _ in rows]
    for kind, indices in chosen.items():
        for rank, index in enumerate(indices, start=1):
            marks[index].append(mark := f"{kind}-{rank}")
            if hasattr(scoring, "example_image") and (image := scoring.example_image(records[index], rows[index])):
                image.save(out_dir / f"{mark}.png", optimize=True)
    return marks
