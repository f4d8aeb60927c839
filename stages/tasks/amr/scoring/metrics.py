"""How well a model's answers say what the sentences mean: Smatch over the whole corpus.

An answer that is no graph counts as an empty one: nothing matched, nothing predicted, and all of the gold graph
missed. Three figures stand beside the strict one, each in its own column: as the words were written, with broken
answers repaired, and of `mtup` by the graph that a rule restores from the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from stages.kit.statistics import bootstrap, corpus_f1
from stages.tasks.amr.samples.graphs import Node, canonical, penman_line
from stages.tasks.amr.samples.records import Record
from stages.tasks.amr.samples.targets import decode, repaired
from stages.tasks.amr.scoring.smatch import TIME_LIMIT_S, as_written, best_match, normalized, triples_of

PREDICTIONS = pa.schema(
    [
        ("id", pa.string()),
        ("sentence", pa.string()),
        ("text", pa.string()),
        ("valid", pa.bool_()),
        ("problem", pa.string()),
        ("prediction", pa.string()),
        ("truth", pa.string()),
        ("f1", pa.float64()),
        ("matched", pa.int64()),
        ("predicted", pa.int64()),
        ("gold", pa.int64()),
        ("matched_unnormalised", pa.int64()),
        ("matched_repaired", pa.int64()),
        ("predicted_repaired", pa.int64()),
        ("matched_restored", pa.int64()),
        ("predicted_restored", pa.int64()),
        ("proven", pa.bool_()),
    ]
)
"""Of predictions.parquet. Counts are of triples; those of the restored graph are null but for `mtup`."""


@dataclass(frozen=True)
class Counts:
    """Triples of one pair of graphs."""

    matched: int
    predicted: int
    gold: int
    proven: bool = True

    @property
    def f1(self) -> float:
        return 2 * self.matched / (self.predicted + self.gold)


def summary(metrics: Mapping[str, Any]) -> str:
    """The figures that matter most in a line."""
    unproven = f", {metrics['unproven']} not proven" if metrics["unproven"] else ""
    return (
        f"Smatch F1 {metrics['smatch_f1']:.3f} (precision {metrics['smatch_precision']:.3f}, recall "
        f"{metrics['smatch_recall']:.3f}), {metrics['invalid']} of {metrics['samples']} answers are no graph{unproven}"
    )


def score(
    records: Sequence[Record], answers: Sequence[str], *, answer_format: str, time_limit_s: float = TIME_LIMIT_S
) -> tuple[dict[str, float | int | str], list[dict[str, Any]]]:
    """Score raw answers, one for each record.

    answer_format: one of targets.ANSWER_FORMATS, the form in which the answers were asked for.
    time_limit_s: for proving that the mapping of one pair of graphs is the best; `unproven` counts the pairs that took
        longer in any of the figures, which may then be too low.
    Returns (metrics, rows): the flat figures of metrics.json, and the rows of predictions.parquet in the order of the
    records. `smatch_f1_restored` is there for `mtup` only.
    """
    assert len(records) == len(answers) > 0, f"{len(answers)} answers for {len(records)} records"
    rows = [_row(record, text, answer_format, time_limit_s) for record, text in zip(records, answers, strict=True)]
    matched, predicted, gold = (sum(row[name] for row in rows) for name in ("matched", "predicted", "gold"))
    evidence = np.array([[row["matched"], row["predicted"], row["gold"]] for row in rows], dtype=np.float64)
    interval = bootstrap(evidence, corpus_f1)
    invalid = sum(not row["valid"] for row in rows)
    metrics: dict[str, float | int | str] = {
        "samples": len(rows),
        "answer_format": answer_format,
        "smatch_f1": _corpus(rows, "matched", "predicted"),
        **({"smatch_f1_low": interval.low, "smatch_f1_high": interval.high} if interval else {}),
        "smatch_precision": matched / predicted if predicted else 0.0,
        "smatch_recall": matched / gold,
        "smatch_f1_unnormalised": _corpus(rows, "matched_unnormalised", "predicted"),
        "smatch_f1_repaired": _corpus(rows, "matched_repaired", "predicted_repaired"),
        **(
            {"smatch_f1_restored": _corpus(rows, "matched_restored", "predicted_restored")}
            if answer_format == "mtup"
            else {}
        ),
        "exact_rate": sum(row["f1"] == 1 for row in rows) / len(rows),
        "invalid": invalid,
        "invalid_rate": invalid / len(rows),
        "unproven": sum(not row["proven"] for row in rows),
    }
    return metrics, rows


def _corpus(rows: Sequence[Mapping[str, Any]], matched: str, predicted: str) -> float:
    """F1 of all triples of all samples, a long sentence counting more than a short one."""
    return 2 * sum(row[matched] for row in rows) / sum(row[predicted] + row["gold"] for row in rows)


def _row(record: Record, text: str, answer_format: str, time_limit_s: float) -> dict[str, Any]:
    decoded, gold = decode(text, answer_format), record.parsed()

    def count(graph: Node | None) -> Counts:
        return _counts(graph, gold, normalized, time_limit_s)

    strict = count(decoded.graph)
    as_read = record.as_it_was()
    same = decoded.graph is None or _same_words(decoded.graph.words() | as_read.words())
    written = strict if same else _counts(decoded.graph, as_read, as_written, time_limit_s)
    mended = strict if decoded.valid else count(repaired(text, answer_format))
    restored = count(decoded.restored) if answer_format == "mtup" else None
    return {
        "id": record.id,
        "sentence": record.sentence,
        "text": text,
        "valid": decoded.valid,
        "problem": decoded.problem,
        "prediction": None if decoded.graph is None else penman_line(canonical(decoded.graph)),
        "truth": record.canonical,
        "f1": strict.f1,
        "matched": strict.matched,
        "predicted": strict.predicted,
        "gold": strict.gold,
        "matched_unnormalised": written.matched,
        "matched_repaired": mended.matched,
        "predicted_repaired": mended.predicted,
        "matched_restored": restored.matched if restored else None,
        "predicted_restored": restored.predicted if restored else None,
        "proven": all(counts.proven for counts in (strict, written, mended, restored) if counts),
    }


def _same_words(words: set[str]) -> bool:
    """Whether the same of them are equal as written as are normalized, so that the same triples match."""
    pairs = {(as_written(word), normalized(word)) for word in words}
    return len(pairs) == len({written for written, _ in pairs}) == len({plain for _, plain in pairs})


def _counts(graph: Node | None, truth: Node, word: Callable[[str], str], time_limit_s: float) -> Counts:
    theirs = triples_of(truth, word)
    if graph is None:
        return Counts(0, 0, theirs.size)
    ours = triples_of(graph, word)
    match = best_match(ours, theirs, time_limit_s=time_limit_s)
    return Counts(match.matched, ours.size, theirs.size, match.proven)
