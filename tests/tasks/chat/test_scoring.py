import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data.parquet import read_rows, write_rows
from stages.data.texts import TextMetric
from stages.evaluation.likelihood import AnswerLikelihood
from stages.evaluation.score import summary
from stages.tasks.chat import scoring
from stages.tasks.chat.samples import candidates, field_accuracy, json_fields
from stages.tasks.chat.scoring import PREDICTIONS, example_image, ordered_by, score
from tests.damage import VALUES, damaged_text, quick
from tests.tasks.chat.conversations import record

ORDER = '{"goods": "red lamp", "count": 3, "to": {"city": "Huế", "days": [1, 2]}}'


def one(metric: TextMetric, completion: str, truth: str, figure: str) -> float:
    metrics, _ = score([record("?", truth, metric)], [completion])
    return float(metrics[figure])


@pytest.mark.parametrize(
    ("metric", "completion", "truth", "expected"),
    [
        ("exact", " A lamp.\n", "A lamp.", 1),
        ("exact", "a lamp.", "A lamp.", 0),
        ("exact", "<think>\nA lamp?\n</think>\n\nA lamp.", "<think>\nLit.\n</think>\n\nA lamp.", 1),
        ("exact", "A lamp?\n</think>\n\nA lamp.", "A lamp.", 1),
        ("token_f1", "<think>\nred lamp", "red lamp", 2 * 2 / 5),  # cut before its answer
        ("exact", "Hue\u0302\u0301", "Hu\u1ebf", 1),
        # 3 of 4 and 3 of 5 words, without "the" and the full stop: 2 * 3 / 9.
        ("token_f1", "The red lamp is lit.", "red lamp stood lit today", 2 * 3 / 9),
        # "red lamp lit" is the longest common sequence: 3 of 5 and 3 of 4.
        ("rouge_l", "the red lamp is lit", "red lamp, lit now", 2 * 0.6 * 0.75 / 1.35),
        ("rouge_l", "chiếc đèn đỏ", "đèn đỏ", 2 * 2 / 3 / (1 + 2 / 3)),
        ("chrf", "", "lamp", 0),
    ],
)
def test_a_figure_equals_the_one_computed_by_hand(
    metric: TextMetric, completion: str, truth: str, expected: float
) -> None:
    assert one(metric, completion, truth, metric) == pytest.approx(expected, abs=1e-6)


def test_chrf_counts_recall_twice() -> None:
    """For "abcd" against "abce": 3 of 4 letters, 2 of 3 pairs, 1 of 2 triples and no run of four."""
    assert one("chrf", "abcd", "abce", "chrf") == pytest.approx((3 / 4 + 2 / 3 + 1 / 2 + 0) / 4, abs=1e-4)
    # Precision 1 and recall 1/2, 1/3 and 0 of the lengths that both have: F2 of their means.
    assert one("chrf", "ab", "abcd", "chrf") < one("chrf", "abcd", "ab", "chrf")


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        (ORDER, 1),
        ('{"count": 3.0, "to": {"days": [1, 2], "city": "Huế"}, "goods": "red lamp"}', 1),
        ('{"goods": "red lamp", "count": 3}', 2 / 5),
        ('{"goods": "lamp", "count": 3, "to": {"city": "Huế", "days": [1, 2]}}', 4 / 6),
        ('{"goods": "red lamp", "count": 3, "to": {"city": "Huế", "days": [1, 2, 3]}}', 5 / 6),
        ('{"goods": "red lamp", "count": "3", "to": {"city": "Huế", "days": [2, 1]}}', 2 / 8),
        (ORDER.replace("ế", "e\u0302\u0301"), 1),
        (ORDER.replace("ế", "\\u0065\\u0302\\u0301"), 1),
        (f"Here it is: {ORDER}", 0),
        (ORDER.replace("{", '{"count": 2, ', 1), 0),
        ("", 0),
        ("[" * 100_000, 0),
    ],
)
def test_fields_are_counted_by_path_and_value(completion: str, share: float) -> None:
    assert field_accuracy(completion, ORDER) == pytest.approx(share)


@given(data=st.data())
@quick(150)
def test_field_accuracy_of_any_completion_is_a_share(data: st.DataObject) -> None:
    text = data.draw(damaged_text(ORDER, ["[", "]", "{", "}", ",", "1e999", "NaN", "9" * 5000]) | VALUES.map(repr))
    share = field_accuracy(text, ORDER)
    assert 0 <= share <= 1
    assert share == 0 or json_fields(text) is not None


def test_figures_are_means_of_the_rows_with_intervals(tmp_path: Path) -> None:
    metrics: tuple[TextMetric, ...] = ("json", "exact", "perplexity")
    records = [record("One?", "1", *metrics), record("Two?", '{"a": 2}', *metrics, number=2)]
    assert [each.sample_id for each in candidates(records)] == ["a:1", "a:2"]
    assert all(each.answered() for each in candidates(records))
    found, rows = score(records, ["1", "two"], likelihoods=[AnswerLikelihood(-1.0, 2), AnswerLikelihood(-5.0, 4)])
    assert (found["field_accuracy"], found["json_valid"], found["exact"]) == (0.5, 0.5, 0.5)
    assert found["perplexity"] == pytest.approx(math.exp(6 / 6))
    assert found["exact_low"] <= 0.5 <= found["exact_high"]
    assert not {"chrf", "token_f1", "rouge_l"} & set(found)
    assert [row["token_probability"] for row in rows] == pytest.approx([math.exp(-0.5), math.exp(-1.25)])
    assert summary(found, scoring) == "perplexity 2.718, exact 0.500, field accuracy 0.500, json valid 0.500, samples 2"
    write_rows(rows, tmp_path / "predictions.parquet", PREDICTIONS)
    assert [row["chrf"] for row in read_rows(tmp_path / "predictions.parquet")] == [None, None]
    assert [ordered_by(each) for each in records] == ["field_accuracy"] * 2
    assert example_image(records[0], rows[0]) is None
    assert candidates([record("One?", "1", "exact")]) == []
