from typing import get_args

import pytest

from stages.core.errors import UserError
from stages.core.params.schema import DatasetParams
from stages.data.texts import TEXT_METRICS, TextMetric
from stages.tasks.chat.report import METRICS, report_for
from stages.tasks.chat.scoring import COLUMNS, PREDICTIONS


def dataset(*metrics: TextMetric) -> DatasetParams:
    return DatasetParams(task="chat", source="folder:x", reader={"metrics": metrics} if metrics else {})


@pytest.mark.parametrize("metric", COLUMNS)
def test_models_are_ranked_by_the_first_metric_and_every_column_is_in_the_predictions(metric: TextMetric) -> None:
    report = report_for({"a": dataset(metric, "exact")})
    assert report.primary.higher_is_better == (metric != "perplexity")
    assert report.primary.key == (COLUMNS[metric][0] if metric != "perplexity" else metric)
    assert {*report.columns, *report.identity} <= set(PREDICTIONS.names)
    assert [column.key for column in report.metrics].count("exact") == 1


def test_every_column_is_in_the_report_of_all_metrics() -> None:
    report = report_for({"a": dataset(*get_args(TextMetric))})
    assert {column.key for column in report.metrics} == {column.key for column in METRICS}


def test_datasets_with_different_metrics_are_refused() -> None:
    report_for({"a": dataset(), "b": dataset(*TEXT_METRICS)})
    with pytest.raises(UserError, match=r"name different metrics \(a: exact; b: chrf\); give them the same ones"):
        report_for({"a": dataset("exact"), "b": dataset("chrf")})
