import json
from pathlib import Path

from stages.kit.data.parquet import write_rows
from stages.kit.evaluation.likelihood import AnswerLikelihood
from stages.kit.evaluation.score import write_examples
from stages.kit.mixture.certificate import Routing
from stages.kit.reporting.compare import UNAVAILABLE, Contender, compare, score_contender
from stages.kit.reporting.page import render_page
from stages.kit.reporting.runs import read_run, refuse_different_samples
from stages.kit.reporting.sections import comparison_table, comparison_text
from stages.tasks.moe import scoring
from stages.tasks.moe.report import REPORT
from stages.tasks.moe.scoring import PREDICTIONS, candidates, score
from tests.made_up_runs import write_model_lineage
from tests.tasks.moe.made_up import fact, meeting

RECORDS = [fact(number) if number % 2 else meeting(number) for number in range(40)]


def evaluated(runs_dir: Path, name: str, *, rates: dict[str, float], mixture: bool = False) -> Contender:
    """A model that needs so many nats for a token, by domain, a little more for each further sample."""
    likelihoods, routed = [], []
    for index, record in enumerate(RECORDS):
        rate = rates[record.domain] * (1 + index / 100)
        likelihoods += [AnswerLikelihood(-rate * 5, 5)] * len(candidates([record]))
        routed.append(Routing(load=(0.5, 0.5), entropy=1.0))
    answers = [record.best for record in RECORDS]
    figures, rows = score(RECORDS, answers, likelihoods=likelihoods, routing=routed if mixture else None)
    run_dir = runs_dir / name
    write_examples(RECORDS, rows, scoring, run_dir / "examples")
    write_rows(rows, run_dir / "predictions.parquet", PREDICTIONS)
    (run_dir / "metrics.json").write_text(json.dumps(figures), encoding="utf-8")
    write_model_lineage(run_dir, name)
    run = read_run(run_dir, identity=REPORT.identity, columns=REPORT.columns, trained=False)
    assert run is not None
    return score_contender(REPORT, name, [run], baseline=None)


def test_the_report_tells_the_story_by_domain(tmp_path: Path) -> None:
    contenders = [
        evaluated(tmp_path, "moe-expert-truthfulqa", rates={"truthfulqa": 0.2, "qmsum": 3.0}),
        evaluated(tmp_path, "moe-expert-qmsum", rates={"truthfulqa": 3.0, "qmsum": 0.2}),
        evaluated(tmp_path, "moe-gate", rates={"truthfulqa": 0.3, "qmsum": 0.3}, mixture=True),
    ]
    refuse_different_samples([contender.run for contender in contenders if contender.run])
    comparison = compare(REPORT, contenders)
    assert comparison.headline.startswith("The model of moe-gate is best: perplexity 1.")
    words = {insight.topic: insight.words for insight in comparison.insights}
    home = "TruthfulQA's expert against QMSum's, on "
    assert words[f"{home}TruthfulQA"].startswith(
        "the model of moe-expert-truthfulqa is better than that of moe-expert-qmsum by -"
    )
    assert words[f"{home}QMSum"].startswith(
        "the model of moe-expert-truthfulqa is worse than that of moe-expert-qmsum by +"
    )
    away = "The gated mixture against TruthfulQA's expert, on "
    assert words[f"{away}TruthfulQA"].startswith("the model of moe-gate is worse than ")
    assert words[f"{away}QMSum"].startswith("the model of moe-gate is better than ")
    table = comparison_table(comparison)
    headings = [column.heading for column in table.columns]
    assert headings[2:6] == ["TruthfulQA perplexity", "95% interval", "QMSum perplexity", "95% interval"]
    entropies = [row.cells[headings.index("Routing entropy")] for row in table.rows]
    assert entropies == [None, None, 1.0]
    text = comparison_text(comparison, table)
    assert scoring.UNAVAILABLE == UNAVAILABLE
    assert text.count(UNAVAILABLE) == 3
    assert "moe-expert-truthfulqa" in text
    page = render_page(comparison, table, profile="tiny")
    assert page.count("<img") == 27
    assert "Left of the dashed line" in page
