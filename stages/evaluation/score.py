"""Score a model's completions by its task, word overlaps that tasks share, and the samples that a report shows.

Tasks import this module, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import random
import re
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stages.core.errors import UserError, join_truncated, pluralize
from stages.core.given_files import require_own
from stages.core.records import shown
from stages.core.tasks import load_task
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, with the samples that models are scored on."""

    name: str
    answer_format: str | None
    records: Sequence[Any]
    models: Mapping[str, Any] = field(default_factory=dict)
    """Options of `scoring.score`: models that it scores with, besides the evaluated one."""

    @property
    def samples(self) -> ModuleType:
        return load_task(self.name, "samples")

    @property
    def scoring(self) -> ModuleType:
        return load_task(self.name, "scoring")

    @cached_property
    def questions(self) -> list[Conversation]:
        ask = partial(self.samples.conversation, answered=False, answer_format=self.answer_format)
        asked = [ask(record) for record in self.records]
        if answered := [each.sample_id for each in asked if each.answered()]:
            raise ValueError(f"task {self.name}: conversation(answered=False) answers {join_truncated(answered)}")
        return asked

    def score(self, generator: TextGenerator | LlamaCpp, completions: list[str] | None = None) -> Scored:
        """Have the model complete the questions, and score its completions; or score `completions`, another engine's
        of the same model."""
        started = time.monotonic()
        if completions is None:
            completions = [*generator.completions(self.questions)]
        generation_s = time.monotonic() - started
        samples, options = generator.model_samples, dict(self.models)
        if hasattr(samples, "score_options"):
            options |= samples.score_options(self.records)
        if hasattr(samples, "candidates"):  # reference answers to compute the likelihood of
            candidates = samples.candidates(self.records, answer_format=self.answer_format)
            options["likelihoods"] = generator.likelihoods(candidates)
            if hasattr(samples, "domain"):  # a mixture has an expert for each
                answer = partial(samples.conversation, answered=True, answer_format=self.answer_format)
                options["routing"] = generator.routing([answer(record) for record in self.records])
        metrics, rows = self.scoring.score(self.records, completions, answer_format=self.answer_format, **options)
        return Scored(completions=completions, metrics=metrics, rows=rows, generation_s=generation_s)


def rebatched(generator: TextGenerator, task: Task, scored: Scored) -> dict[str, Any]:
    """The changes that half the batch brings: in 16 bits a completion depends on the others in its batch."""
    halved = replace(generator, batch_size=min(generator.batch_size, len(task.records)) // 2 or 2)
    again = task.score(halved)
    same = sum(before == after for before, after in zip(scored.completions, again.completions, strict=True))
    metrics = {key: again.metrics[key] for key in task.scoring.SUMMARY if isinstance(again.metrics.get(key), float)}
    return metrics | {"batch_size": halved.batch_size, "changed": 1 - same / len(task.records)}


def read_completions(path: Path, task: Task) -> list[str]:
    """Another system's completions from an answers file, one for each of the task's records, in their order.

    The file has JSON Lines, each with the `id` of a sample and the completion as its `answer`; or a form of the task's
    own, which its `samples.read_completions(path, records, answer_format)` reads as (line, id, text).
    Raises UserError, which names the samples, for one without a completion, with several, or unknown.
    """
    require_own(path, path.parent)
    own = getattr(task.samples, "read_completions", None) if path.suffix != ".jsonl" else None
    try:
        given = list(own(path, task.records, task.answer_format) if own else _json_completions(path))
    except UnreadableText as error:
        raise UserError(f"{path}: {error}") from None
    completions: dict[str, str] = {}
    known = Counter(question.sample_id for question in task.questions)
    problems: dict[str, list[str]] = {"no such sample": [], "a second answer": []}
    for line, sample_id, text in given:
        if sample_id not in known or sample_id in completions:
            kind = "a second answer" if sample_id in completions else "no such sample"
            problems[kind].append(f"{sample_id!r} in line {line}")
        completions[sample_id] = text
    problems["no answer"] = [repr(sample_id) for sample_id in known if sample_id not in completions]
    problems["several samples have this id"] = [repr(sample_id) for sample_id, count in known.items() if count > 1]
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


def rouge(key: str, completion: str, reference: str, *, of_any_language: bool = False) -> float:
    """F-measure, from 0 to 1, of one-word, two-word or longest common sequences: `key` is rouge1, rouge2 or rougeL.

    The same as Google's rouge-score without stemming, computed by torchmetrics.
    of_any_language: words are runs of Unicode's letters and digits, not of a to z and digits alone.
    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
    """
    # torchmetrics imports torch.
    from torchmetrics.functional.text.rouge import rouge_score

    scores = rouge_score(completion, reference, rouge_keys=key, normalizer=_words if of_any_language else None)
    return float(scores[f"{key}_fmeasure"])


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
