"""Reports of text tasks, from answers to the page: what scoring writes is what the comparison reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.core.tasks import load_task
from stages.kit.data.parquet import write_rows
from stages.kit.evaluation.likelihood import AnswerLikelihood
from stages.kit.evaluation.score import write_examples
from stages.kit.mixture.certificate import Routing
from stages.kit.reporting.compare import UNAVAILABLE, Comparison, Contender, compare, score_contender
from stages.kit.reporting.page import render_page
from stages.kit.reporting.runs import read_run, refuse_different_samples
from stages.kit.reporting.sections import comparison_table, comparison_text
from stages.kit.reporting.tables import Table
from stages.tasks.amr.samples import encode, parse_record
from stages.tasks.moe.scoring import candidates
from tests.made_up_runs import write_model_lineage
from tests.tasks.moe.made_up import fact, meeting


def evaluated(
    run_dir: Path,
    task: str,
    records: Sequence[Any],
    answers: Sequence[str],
    baseline: str | None = None,
    file: str = "",
    **scored: Any,
) -> Contender:
    scoring, report = load_task(task, "scoring"), load_task(task, "report").REPORT
    metrics, rows = scoring.score(records, answers, **scored)
    write_examples(records, rows, scoring, run_dir / "examples")
    write_rows(rows, run_dir / "predictions.parquet", scoring.PREDICTIONS)
    metrics |= {"answers": file} if file else {}
    (run_dir / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    write_model_lineage(run_dir, run_dir.name)
    run = read_run(run_dir, identity=report.identity, columns=report.columns, trained=False)
    assert run is not None
    return score_contender(report, run_dir.name, [run], baseline=baseline)


def reported(task: str, contenders: Sequence[Contender]) -> tuple[Comparison, Table]:
    refuse_different_samples([contender.run for contender in contenders if contender.run])
    comparison = compare(load_task(task, "report").REPORT, contenders)
    table = comparison_table(comparison)
    assert render_page(comparison, table, profile="tiny").count("<img") == 9 * len(contenders)
    return comparison, table


def column(table: Table, heading: str) -> list[Any]:
    place = [each.heading for each in table.columns].index(heading)
    return [row.cells[place] for row in table.rows]


def test_amr_compares_answer_formats(tmp_path: Path) -> None:
    """Models that get some of twenty sentences right, and of the others only the top."""
    records = [
        parse_record(f"s{n}", f"câu {n} .", f"(c / câu :quant {n} :agent (t / tôi :mod c))", file="val.txt", line=n)
        for n in range(20)
    ]
    wrong = parse_record("wrong", "sai .", "(s / sai)", file="", line=1)
    contenders = []
    rows = (("baseline", "full", 4), ("ptr", "ptr", 12), ("mtup", "mtup", 13), ("peer", "full", 3))
    for name, answer_format, right in rows:
        graphs = [(record if number < right else wrong).parsed() for number, record in enumerate(records)]
        answers = [encode(graph, answer_format) for graph in graphs]
        origin: dict[str, Any] = {"file": "data/answers/peer.txt"} if name == "peer" else {"baseline": "base-llm"}
        run_dir = tmp_path / f"amr-{name}"
        contenders.append(evaluated(run_dir, "amr", records, answers, **origin, answer_format=answer_format))
    comparison, table = reported("amr", contenders)
    words = [insight.words for insight in comparison.insights]
    assert words[0].startswith("the model of amr-ptr is better than that of amr-baseline by +")
    assert words[1].startswith("the model of amr-mtup is better than that of amr-baseline by +")
    assert words[2].startswith("no difference shown between the model of amr-mtup and that of amr-ptr")
    assert [insight.topic for insight in comparison.insights[3:]] == [
        f"amr-{name} against amr-peer" for name in ("baseline", "ptr", "mtup")
    ]
    assert words[4].startswith("the model of amr-ptr is better than that of amr-peer by +")
    assert column(table, "") == ["", "", "highest", "answers"]
    assert column(table, "Restored") == [None, None, contenders[2].score.mean, None]
    assert "Smatch F1" in comparison_text(comparison, table)


def test_a_mixture_is_compared_by_domain(tmp_path: Path) -> None:
    """Models that need so many nats for a token of each domain, a little more for each further sample."""
    records = [fact(number) if number % 2 else meeting(number) for number in range(40)]
    contenders = []
    for name, facts, meetings in (("expert-truthfulqa", 0.2, 3.0), ("expert-qmsum", 3.0, 0.2), ("gate", 0.3, 0.3)):
        rates = {"truthfulqa": facts, "qmsum": meetings}
        likelihoods = [
            AnswerLikelihood(-rates[record.domain] * (1 + index / 100) * 5, 5)
            for index, record in enumerate(records)
            for _ in candidates([record])
        ]
        routing = [Routing(load=(0.5, 0.5), entropy=1.0)] * len(records) if name == "gate" else None
        answers = [record.best for record in records]
        scored: dict[str, Any] = {"likelihoods": likelihoods, "routing": routing}
        contenders.append(evaluated(tmp_path / f"moe-{name}", "moe", records, answers, **scored))
    comparison, table = reported("moe", contenders)
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
    assert column(table, "Routing entropy") == [None, None, 1.0]
    assert comparison_text(comparison, table).count(UNAVAILABLE) == 3
