"""Tasks, found by their folder's name in stages/tasks: no registry, no base class."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from stages.core.errors import UserError
from stages.core.params.schema import BaselineParams, DatasetParams, RecipeParams
from stages.core.records import STRICT, parse, problems, refusal


def load_task(task: str, module: Literal["sources", "samples", "scoring", "report", "predictions"]) -> ModuleType:
    """The module `stages.tasks.TASK.MODULE`. Raises UserError where there is none."""
    package = f"stages.tasks.{task}"
    try:
        return import_module(f"{package}.{module}")
    except ModuleNotFoundError as error:
        if error.name == package:
            raise UserError(f"no task is called {task!r}: there is no folder stages/tasks/{task}") from None
        if error.name == f"{package}.{module}":
            raise UserError(f"the task {task} has no {module}: there is no stages/tasks/{task}/{module}") from None
        raise


def answer_format_problems(samples: ModuleType, subject: RecipeParams | BaselineParams, path: str) -> dict[str, str]:
    """Problems by dotted path: an answer format that the task does not have. samples: the task's module. path: the
    subject's own, e.g. recipes.NAME."""
    formats = getattr(samples, "ANSWER_FORMATS", (None,))
    expected = ", ".join("null" if each is None else each for each in formats)
    wrong = subject.answer_format not in formats
    return {f"{path}.answer_format": f"is {subject.answer_format or 'null'}; expected {expected}"} if wrong else {}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PlainReader:
    """Settings of every dataset's `reader`; a task with further ones has a subclass, `Reader`."""

    strict: bool = False
    """Whether fields that only describe, and are not read, are refused; otherwise they are counted."""


def reader_of(sources: ModuleType, dataset: DatasetParams, path: str) -> Any:
    """`dataset.reader` as the task's dataclass Reader. Raises UserError if the task cannot read the dataset.

    sources: the task's module of that name. path: the dataset's own, profiles.PROFILE.datasets.NAME.
    """
    if wrong := dataset_problems(sources, dataset, path):
        raise refusal(Path("params.yaml"), wrong)
    return parse(getattr(sources, "Reader", PlainReader), dataset.reader)


def dataset_problems(sources: ModuleType, dataset: DatasetParams, path: str) -> dict[str, str]:
    """Problems by dotted path: settings that the dataset's task does not have. sources, path: as for `reader_of`."""
    wrong = {}
    if dataset.mix and not hasattr(sources, "mix"):
        wrong[f"{path}.mix"] = f"datasets of the task {dataset.task} cannot be mixed"
    kind = getattr(sources, "Reader", PlainReader)
    try:
        parse(kind, dataset.reader)
    except ValidationError as error:
        wrong |= {f"{path}.reader.{where}": problem for where, problem in problems(error, kind).items()}
    return wrong
