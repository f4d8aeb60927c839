import pytest

from stages.core.errors import UserError
from stages.tasks import load_task


def test_a_module_is_loaded_by_its_name() -> None:
    assert load_task("amr", "report").REPORT.title == "Vietnamese AMR parsing"


@pytest.mark.parametrize(
    ("task", "module", "reason"),
    [
        ("parsing", "report", "no task is called 'parsing': there is no folder stages/tasks/parsing"),
        ("detection", "predictions", "the task detection has no predictions"),
    ],
)
def test_what_a_task_has_not_is_refused(task: str, module: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_task(task, module)


def test_a_fault_within_a_module_is_no_fault_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError(name="penman")

    monkeypatch.setattr("stages.tasks.import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        load_task("amr", "sources")
