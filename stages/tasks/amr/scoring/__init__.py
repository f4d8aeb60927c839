"""Scores of AMR parsers: Smatch over the whole corpus.

A completion that is no graph counts as an empty one: nothing matched, nothing predicted, and the whole gold graph
missed. Three figures stand beside this strict one: with the words as written, with broken completions repaired, and for
`mtup` the graph that a rule restores from the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from stages.data.groups import groups_of
from stages.evaluation.statistics import bootstrap, corpus_f1
from stages.tasks.amr.samples import Record, decode
from stages.tasks.amr.samples.graphs import Node, penman, read_graph
from stages.tasks.amr.scoring.smatch import Match, as_written, best_match, normalized, triples_of

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
        *(
            (name, pa.int64())
            for name in (
                *("matched", "predicted", "gold", "matched_unnormalised", "matched_repaired", "predicted_repaired"),
                *("matched_restored", "predicted_restored"),
            )
        ),
        ("proven", pa.bool_()),
    ]
)
"""Columns of predictions.parquet. Counts are of triples; those of the restored graph are null except for `mtup`."""

SUMMARY = ("smatch_f1", "smatch_precision", "smatch_recall", "invalid", "unproven", "samples")
"""Figures of metrics.json that the log shows."""


def score(
    records: Sequence[Record], completions: Sequence[str], *, answer_format: str
) -> tuple[dict[str, float | int | str], list[dict[str, Any]]]:
    """Score completions, one for each record.

    Returns (metrics, rows): the figures of metrics.json, and the rows of predictions.parquet in the order of the
    records. `unproven` counts the samples with a figure that may be too low, as its match took longer than
    TIME_LIMIT_S. Only `mtup` has `smatch_f1_restored`.
    """
    rows = [_row(record, text, answer_format) for record, text in zip(records, completions, strict=True)]
    evidence = np.array([[row["matched"], row["predicted"], row["gold"]] for row in rows], dtype=np.float64)
    matched, predicted, gold = (int(total) for total in evidence.sum(axis=0))
    interval = bootstrap(evidence, corpus_f1, groups_of(records))
    invalid = sum(not row["valid"] for row in rows)
    metrics: dict[str, float | int | str] = {
        "samples": len(rows),
        "answer_format": answer_format,
        "smatch_f1": _corpus_f1(rows, "matched", "predicted"),
        **({"smatch_f1_low": interval.low, "smatch_f1_high": interval.high} if interval else {}),
        "smatch_precision": matched / predicted if predicted else 0.0,
        "smatch_recall": matched / gold,
        "smatch_f1_unnormalised": _corpus_f1(rows, "matched_unnormalised", "predicted"),
        "smatch_f1_repaired": _corpus_f1(rows, "matched_repaired", "predicted_repaired"),
    }
    if answer_format == "mtup":
        metrics["smatch_f1_restored"] = _corpus_f1(rows, "matched_restored", "predicted_restored")
    metrics |= {
        "exact_rate": sum(row["f1"] == 1 for row in rows) / len(rows),
        "invalid": invalid,
        "invalid_rate": invalid / len(rows),
        "unproven": sum(not row["proven"] for row in rows),
    }
    return metrics, rows


def _corpus_f1(rows: Sequence[Mapping[str, Any]], matched: str, predicted: str) -> float:
    """F1 of all triples of all samples, so that a long sentence counts more than a short one."""
    return 2 * sum(row[matched] for row in rows) / sum(row[predicted] + row["gold"] for row in rows)


def _row(record: Record, text: str, answer_format: str) -> dict[str, Any]:
    decoded, gold = decode(text, answer_format), record.parsed()

    def match(graph: Node | None, truth: Node = gold, word: Callable[[str], str] = normalized) -> Match:
        theirs = triples_of(truth, word)
        return Match(0, 0, theirs.size) if graph is None else best_match(triples_of(graph, word), theirs)

    strict = match(decoded.graph)
    written = match(decoded.graph, read_graph(record.graph), as_written)
    fixed = strict if decoded.graph else match(decoded.repaired)
    restored = match(decoded.restored) if answer_format == "mtup" else None
    return {
        "id": record.id,
        "sentence": record.sentence,
        "text": text,
        "valid": decoded.graph is not None,
        "problem": decoded.problem,
        "prediction": None if decoded.graph is None else penman(decoded.graph, indented=True),
        "truth": penman(gold, indented=True),
        "f1": 2 * strict.matched / (strict.predicted + strict.gold),
        "matched": strict.matched,
        "predicted": strict.predicted,
        "gold": strict.gold,
        "matched_unnormalised": written.matched,
        "matched_repaired": fixed.matched,
        "predicted_repaired": fixed.predicted,
        "matched_restored": restored.matched if restored else None,
        "predicted_restored": restored.predicted if restored else None,
        "proven": all(each.proven for each in (strict, written, fixed, restored) if each),
    }


def ordered_by(_: Record) -> str:
    """The column that ranks samples from worst to best."""
    return "f1"


def failure(row: Mapping[str, Any]) -> str | None:
    """The kind of failure of a row of predictions: no graph, or one with fewer than half of the triples right."""
    if not row["valid"]:
        return "no_graph"
    return "mostly_wrong" if row["f1"] < 0.5 else None
