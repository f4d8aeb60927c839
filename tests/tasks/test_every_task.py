"""Properties of every task."""

import pytest

from stages.core.params import load_params
from stages.core.tasks import load_task
from stages.reporting.compare import Question, task_report
from tests import ROOT
from tests.tasks import TASKS
from tests.test_tasks import CASES


def test_every_task_goes_through_all_stages() -> None:
    """Detection in tests/test_stages.py, moe in tests/test_build.py."""
    assert {"detection", "moe"} | {case.task for case in CASES.values()} == set(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_a_report_ranks_by_what_matters_and_asks_about_runs_of_params(task: str) -> None:
    params = load_params(ROOT / "params.yaml")
    report = task_report(params, task)
    assert report.primary.key in params.compare.matters
    asked = {name for question in report.questions for name in (question.ours, question.theirs)}
    assert asked <= {*params.recipes, *params.baselines}


def test_a_report_asks_what_params_ask_of_its_task() -> None:
    asked = "compare.against={r2-vision-only: r4-joint, r4-joint: r2-vision-only, r1-llm-only: r4-joint}"
    params = load_params(ROOT / "params.yaml", changes=[asked])
    known = load_task("detection", "report").REPORT.questions
    questions = {task: task_report(params, task).questions for task in ("detection", "amr")}
    # A pair is asked about once: whether in both directions, or by the task's own questions already.
    once = Question("r2-vision-only against r4-joint", "r2-vision-only", "r4-joint")
    assert questions["detection"] == (*known, once)
    assert questions["amr"] == load_task("amr", "report").REPORT.questions
