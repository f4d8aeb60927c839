import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data.parquet import write_rows
from stages.tasks.amr import scoring
from stages.tasks.amr.samples import ANSWER_FORMATS, SEPARATOR, Record, encode, parse_record
from stages.tasks.amr.scoring import PREDICTIONS, score
from stages.tasks.amr.scoring.smatch import Match
from tests.damage import damaged_text, quick
from tests.tasks.amr.drawn import PIECES, TEXTS

GOLD = (
    "(đ / đi :agent (t / tôi) :time (h / hôm qua))",  # 6 triples
    "(n / nói :agent (c / chủ tịch :mod (n1 / nhỏ)) :polarity -)",  # 7
    "(m / mưa)",  # 2
)


def records() -> list[Record]:
    return [
        parse_record(f"s{number}", f"câu {number} .", graph, file="val.txt", line=number)
        for number, graph in enumerate(GOLD)
    ]


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_right_completions_score_one(answer_format: str) -> None:
    figures, rows = score(
        records(), [encode(record.parsed(), answer_format) for record in records()], answer_format=answer_format
    )
    assert figures["smatch_f1"] == figures["smatch_f1_repaired"] == figures["exact_rate"] == 1
    assert figures["invalid"] == figures["unproven"] == 0
    assert ("smatch_f1_restored" in figures) == (answer_format == "mtup")
    assert all(row["valid"] and row["f1"] == 1 for row in rows)


def test_separators_count_only_as_written() -> None:
    figures, rows = score(records(), [encode(record.parsed(), "full") for record in records()], answer_format="full")
    assert figures["smatch_f1"] == 1
    assert figures["smatch_f1_unnormalised"] == pytest.approx(13 / 15)  # "hôm qua" and "chủ tịch" are lost
    assert [row["matched_unnormalised"] for row in rows] == [5, 6, 2]
    figures, _ = score(records(), list(GOLD), answer_format="full")
    assert figures["smatch_f1_unnormalised"] == 1


def test_a_broken_completion_counts_as_empty_and_its_repair_separately() -> None:
    completions = ["(đ / đi :agent (t / tôi) :time (h / hôm qua", "xin lỗi", "(m / mưa)"]
    figures, rows = score(records(), completions, answer_format="full")
    assert [(row["matched"], row["predicted"], row["gold"]) for row in rows] == [(0, 0, 6), (0, 0, 7), (2, 2, 2)]
    assert figures["smatch_precision"] == 1
    assert figures["smatch_recall"] == pytest.approx(2 / 15)
    assert figures["smatch_f1"] == pytest.approx(2 * 2 / (2 + 15))
    assert figures["smatch_f1_repaired"] == pytest.approx(2 * 8 / (8 + 15))
    assert figures["invalid"] == 2
    assert figures["invalid_rate"] == pytest.approx(2 / 3)
    assert rows[0]["problem"] == "2 parentheses are never closed"


def test_the_corpus_counts_triples_and_not_sentences() -> None:
    completions = [GOLD[0], "(x / sai)", "(x / sai)"]
    figures, rows = score(records(), completions, answer_format="full")
    assert [row["matched"] for row in rows] == [6, 1, 1]  # the top is right
    assert figures["smatch_f1"] == pytest.approx(2 * 8 / (10 + 15))
    matched, predicted, gold = (sum(row[name] for row in rows) for name in ("matched", "predicted", "gold"))
    assert figures["smatch_f1"] == 2 * matched / (predicted + gold), "rows are enough to score any redraw"


def test_both_steps_of_mtup_are_scored() -> None:
    completions = [
        f"(đi :agent (tôi) :time (hôm_qua)){SEPARATOR}(đ / đi)",  # first step right, second poor
        "(nói :agent (chủ_tịch :mod (nhỏ)) :polarity -)",  # no second step
        f"(mưa{SEPARATOR}(m / mưa)",  # first step broken
    ]
    figures, rows = score(records(), completions, answer_format="mtup")
    assert [row["matched"] for row in rows] == [2, 0, 2]
    assert [row["matched_restored"] for row in rows] == [6, 7, 0]
    assert figures["smatch_f1_restored"] == pytest.approx(2 * 13 / (13 + 15))


def test_unproven_matches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "best_match", lambda *_: Match(1, 2, 3, proven=False))
    figures, rows = score(records(), [*GOLD[:2], ""], answer_format="full")
    assert figures["unproven"] == 2
    assert [row["proven"] for row in rows] == [False, False, True]


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_true_and_predicted_graphs_of_all_formats_are_indented_alike(answer_format: str) -> None:
    _, rows = score(records()[:1], [encode(records()[0].parsed(), answer_format)], answer_format=answer_format)
    assert rows[0]["truth"] == rows[0]["prediction"] == "(đ / đi\n    :agent (t / tôi)\n    :time (h / hôm_qua))"


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
@given(data=st.data())
@quick(25)
def test_any_completion_is_scored_or_counted_invalid(
    answer_format: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    right = [encode(record.parsed(), answer_format) for record in records()]
    completions = [data.draw(st.just(text) | damaged_text(text, PIECES) | TEXTS) for text in right]
    figures, rows = score(records(), completions, answer_format=answer_format)
    assert 0 <= float(figures["smatch_f1"]) <= 1
    assert figures["invalid"] == sum(row["problem"] is not None for row in rows)
    assert all(row["matched"] <= min(row["predicted"], row["gold"]) for row in rows)
    path = tmp_path_factory.getbasetemp() / "predictions.parquet"
    write_rows(rows, path, PREDICTIONS)
    assert pq.read_table(path).to_pylist() == rows
