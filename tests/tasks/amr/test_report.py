import json
from pathlib import Path

from stages.kit.data.parquet import write_rows
from stages.kit.evaluation.score import write_examples
from stages.kit.reporting.compare import Contender, compare, score_contender
from stages.kit.reporting.page import render_page
from stages.kit.reporting.runs import read_run, refuse_different_samples
from stages.kit.reporting.sections import comparison_table, comparison_text
from stages.tasks.amr import scoring
from stages.tasks.amr.report import REPORT
from stages.tasks.amr.samples import Record, encode, parse_record
from stages.tasks.amr.scoring import PREDICTIONS, score
from tests.made_up_runs import write_model_lineage


def evaluated(runs_dir: Path, name: str, answer_format: str, num_right: int) -> Contender:
    """A model that gets the first so many of twenty sentences right, and of the others only the top."""
    records = [
        parse_record(f"s{n}", f"câu {n} .", f"(c / câu :quant {n} :agent (t / tôi :mod c))", file="val.txt", line=n)
        for n in range(20)
    ]
    wrong = parse_record("wrong", "sai .", "(s / sai)", file="", line=1)

    def answer(record: Record, number: int) -> str:
        return encode((record if number < num_right else wrong).parsed(), answer_format)

    metrics, rows = score(
        records, [answer(record, number) for number, record in enumerate(records)], answer_format=answer_format
    )
    run_dir = runs_dir / name
    write_examples(records, rows, scoring, run_dir / "examples")
    write_rows(rows, run_dir / "predictions.parquet", PREDICTIONS)
    (run_dir / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    write_model_lineage(run_dir, name)
    run = read_run(run_dir, identity=REPORT.identity, columns=REPORT.columns, trained=False)
    assert run is not None
    return score_contender(REPORT, name, [run], baseline=None)


def test_what_scoring_writes_is_what_the_comparison_reads(tmp_path: Path) -> None:
    recipes = {"amr-baseline": ("full", 4), "amr-ptr": ("ptr", 12), "amr-mtup": ("mtup", 13)}
    contenders = [evaluated(tmp_path, name, answer_format, right) for name, (answer_format, right) in recipes.items()]
    refuse_different_samples([contender.run for contender in contenders if contender.run])
    comparison = compare(REPORT, contenders)
    words = [insight.words for insight in comparison.insights]
    assert words[0].startswith("the model of amr-ptr is better than that of amr-baseline by +")
    assert words[1].startswith("the model of amr-mtup is better than that of amr-baseline by +")
    assert words[2].startswith("no difference shown between the model of amr-mtup and that of amr-ptr")
    table = comparison_table(comparison)
    restored = [row.cells[[column.key for column in table.columns].index("smatch_f1_restored")] for row in table.rows]
    assert restored == [None, None, contenders[2].score.mean]
    assert "Smatch F1" in comparison_text(comparison, table)
    assert render_page(comparison, table, profile="tiny").count("<img") == 27
