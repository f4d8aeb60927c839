"""The report of mixtures, from answers to the page: what scoring writes is what the comparison reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.kit.data.parquet import write_rows
from stages.kit.evaluation.likelihood import AnswerLikelihood
from stages.kit.evaluation.score import write_examples
from stages.kit.mixture.certificate import Routing
from stages.kit.statistics import UNAVAILABLE
from stages.reporting.compare import Contender, compare, score_contender
from stages.reporting.page import render_page
from stages.reporting.runs import read_run, refuse_different_samples
from stages.reporting.sections import comparison_table, comparison_text
from stages.tasks.moe import scoring
from stages.tasks.moe.report import REPORT
from stages.tasks.moe.samples import Record
from tests.made_up_runs import write_model_lineage
from tests.tasks.moe.made_up import fact, meeting


def evaluated(run_dir: Path, records: Sequence[Record], **scored: Any) -> Contender:
    """A model that gives the best answers."""
    metrics, rows = scoring.score(records, [record.best for record in records], **scored)
    write_examples(records, rows, scoring, run_dir / "examples")
    write_rows(rows, run_dir / "predictions.parquet", scoring.PREDICTIONS)
    (run_dir / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    write_model_lineage(run_dir, run_dir.name)
    run = read_run(run_dir, identity=REPORT.identity, columns=REPORT.columns, trained=False)
    assert run is not None
    return score_contender(REPORT, run_dir.name, [run], baseline=None)


def test_a_mixture_is_compared_by_domain(tmp_path: Path) -> None:
    """Models that need so many nats for a token of each domain, a little more for each further sample."""
    records = [fact(number) if number % 2 else meeting(number) for number in range(40)]
    contenders = []
    for name, facts, meetings in (("expert-truthfulqa", 0.2, 3.0), ("expert-qmsum", 3.0, 0.2), ("gate", 0.3, 0.3)):
        rates = {"truthfulqa": facts, "qmsum": meetings}
        likelihoods = [
            AnswerLikelihood(-rates[record.domain] * (1 + index / 100) * 5, 5)
            for index, record in enumerate(records)
            for _ in scoring.candidates([record])
        ]
        routing = [Routing(load=(0.5, 0.5), entropy=1.0)] * len(records) if name == "gate" else None
        contenders.append(evaluated(tmp_path / f"moe-{name}", records, likelihoods=likelihoods, routing=routing))
    refuse_different_samples([contender.run for contender in contenders if contender.run])
    comparison = compare(REPORT, contenders)
    table = comparison_table(comparison)
    assert render_page(comparison, table, profile="tiny").count("<img") == 9 * len(contenders)
    assert comparison.headline.startswith("The model of moe-gate is best: perplexity 1.")
    words = {insight.topic: insight.words for insight in comparison.insights}
    for topic, domain, start in (
        ("TruthfulQA's expert against QMSum's", "TruthfulQA", "moe-expert-truthfulqa is better than"),
        ("TruthfulQA's expert against QMSum's", "QMSum", "moe-expert-truthfulqa is worse than"),
        ("The gated mixture against TruthfulQA's expert", "TruthfulQA", "moe-gate is worse than"),
        ("The gated mixture against TruthfulQA's expert", "QMSum", "moe-gate is better than"),
    ):
        assert words[f"{topic}, on {domain}"].startswith(f"the model of {start}")
    headings = [each.heading for each in table.columns]
    assert headings[2:6] == ["TruthfulQA perplexity", "95% interval", "QMSum perplexity", "95% interval"]
    assert [row.cells[headings.index("Routing entropy")] for row in table.rows] == [None, None, 1.0]
    assert comparison_text(comparison, table).count(UNAVAILABLE) == 3
