"""How sure the answers of a report are, and what more it would take to be surer."""

from __future__ import annotations

from stages.kit.reporting.comparison import Comparison, Insight, p_words
from stages.kit.reporting.tables import Column, Row, Table
from stages.kit.statistics import LEVEL, MAX_SEEDS, POWER

EVIDENCE = (
    "The interval and p belong to a question alone; corrected p counts that all of them were asked. Ahead and behind "
    "are the samples on which every model of the first beats, or loses to, every model of the second."
)
"""Introduces the table of the evidence."""


def evidence_table(comparison: Comparison) -> Table:
    """A row a question that has an answer."""
    over_seeds = comparison.over_seeds
    of_seeds = (Column("win_rate", "Pairs of models won", ".0%"), Column("seeds_needed", "Seeds, if it is real"))
    columns = (
        Column("question", "Question"),
        Column("difference", "Difference", "+.3f"),
        Column("difference", "95% interval", "+.3f"),
        Column("p", "p"),
        Column("corrected_p", "Corrected p"),
        Column("ahead", "Samples ahead", "d"),
        Column("behind", "Behind", "d"),
        Column("detectable", f"Smallest shown in {POWER:.0%}", ".3f"),
        *(of_seeds if over_seeds else ()),
    )
    rows = []
    for insight in comparison.insights:
        if (found := insight.difference) is not None:
            cells = (
                insight.topic,
                found.mean,
                found.interval,
                p_words(found.p_value),
                p_words(found.adjusted_p),
                found.ahead,
                found.behind,
                found.detectable,
                *((found.win_rate, _seeds_needed(insight)) if over_seeds else ()),
            )
            rows.append(Row(cells=cells))
    return Table(columns=columns, rows=tuple(rows))


def design_words(comparison: Comparison) -> list[str]:
    """What the number of samples and seeds lets the report say, a sentence or two each."""
    lines = [f"{comparison.num_samples} samples; intervals are {LEVEL:.0%}, paired by sample."]
    answered = [insight.difference for insight in comparison.insights if insight.difference]
    if answered:
        lines[0] += f" p is corrected for {answered[0].family} questions."
    primary = [insight for insight in comparison.insights if insight.metric.key == comparison.report.primary.key]
    if shown := [found.detectable for insight in primary if (found := insight.difference) and found.detectable]:
        low, high = f"{min(shown):.3f}", f"{max(shown):.3f}"
        size = low if low == high else f"{low} to {high}, depending on the pair,"
        lines.append(
            f"Roughly, a true difference in {comparison.report.primary_words} of {size} is shown by {POWER:.0%} of "
            "such reports; a smaller one by fewer."
        )
    if comparison.over_seeds and min(len(each.runs) for each in comparison.evaluated if each.baseline) < 3:
        lines.append("Two seeds hardly show how far seeds lie apart: take three or more.")
    if not comparison.over_seeds and any(contender.baseline for contender in comparison.evaluated):
        lines.append(
            "Each recipe was trained once: this compares these models, not the recipes, which give other models under "
            f"other seeds. For the recipes: dvc exp run --queue -S 'seed=42,43,44' compare@{comparison.report.task}, "
            f"then dvc queue start, then make compare TASK={comparison.report.task}"
        )
    if splits := {str(run.metrics["split"]) for run in comparison.all_runs if "split" in run.metrics}:
        lines.append(f"Scored on the split {', '.join(splits)}, which settings are chosen by: no result to report.")
    by_engine: dict[str, list[str]] = {}
    for run in comparison.all_runs:
        by_engine.setdefault(str(run.metrics.get("engine", "transformers")), []).append(run.name)
    if len(by_engine) > 1:
        who = "; ".join(f"{engine}: {', '.join(names)}" for engine, names in by_engine.items())
        lines.append(f"Not all were answered by one engine, and differences may be the engines' ({who}).")
    elif "transformers" not in by_engine:
        lines += [f"Answered by {engine}; transformers answers the first samples alike." for engine in by_engine]
    return [*lines, *comparison.notes]


def _seeds_needed(insight: Insight) -> str:
    assert insight.difference is not None
    if insight.difference.verdict in ("better", "worse"):
        return "shown"
    needed = insight.difference.seeds_needed()
    return f"about {needed}" if needed else f"over {MAX_SEEDS}, or more samples"
