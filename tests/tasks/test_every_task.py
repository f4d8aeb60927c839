"""The lists of tasks that are kept by hand leave none out."""

from collections.abc import Iterable

import pytest

from stages.core.params import load_params
from stages.core.tasks import load_task
from stages.reporting.compare import task_report
from tests import ROOT
from tests.tasks.test_damaged_sources import CORPORA
from tests.tasks.test_prepared import RECORDS
from tests.test_answers import DATA
from tests.test_tasks import CASES

TASKS = {path.parent.name for path in ROOT.glob("stages/tasks/*/report.py")}


@pytest.mark.parametrize(
    ("name", "listed", "elsewhere"),
    [
        ("RECORDS in tests/tasks/test_prepared.py", RECORDS, {}),
        (
            "CORPORA in tests/tasks/test_damaged_sources.py",
            {corpus.task for corpus in CORPORA.values()},
            {"detection": "tests/tasks/detection/test_sources.py"},
        ),
        ("DATA in tests/test_answers.py", DATA, {}),
        (
            "CASES in tests/test_tasks.py",
            {case.task for case in CASES.values()},
            {"detection": "tests/test_stages.py", "moe": "tests/test_build.py"},
        ),
    ],
)
def test_a_list_has_every_task(name: str, listed: Iterable[str], elsewhere: dict[str, str]) -> None:
    """elsewhere: tasks that are tested in another file, by name."""
    assert {*listed} == TASKS - elsewhere.keys(), f"{name}: add an entry for each task, or say where else it is tested"
    assert elsewhere.keys() <= TASKS
    assert all((ROOT / path).is_file() for path in elsewhere.values())


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_report_ranks_by_what_matters_and_asks_about_runs_of_params(task: str) -> None:
    params = load_params(ROOT / "params.yaml")
    report = task_report(load_task(task, "report"), params, task)
    assert report.primary.key in params.compare.matters
    asked = {name for question in report.questions for name in (question.ours, question.theirs)}
    assert asked <= {*params.recipes, *params.baselines}
