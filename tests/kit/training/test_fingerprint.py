"""A training is known by all that its bytes depend on, and by nothing else."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import stages
from stages.core.lineage import Lineage
from stages.kit.planning.plan import Plan
from stages.kit.training import resume
from stages.kit.training.checkpoints import digest_of
from stages.kit.training.resume import identity_of
from tests.kit.training.small import plan_for

PLAN = plan_for("r1-llm-only")
BASE = Lineage(kind="base", name="vlm", digest="ab" * 32)


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"samples")
    return path


def identity(data_path: Path, plan: Plan = PLAN, attempt: int = 0, base: Lineage = BASE) -> dict[str, str]:
    return identity_of(plan, attempt=attempt, base=base, data_path=data_path)


def test_it_is_the_same_from_another_folder(data_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(data_path)
    moved = data_path.rename(tmp_path / "moved.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/elsewhere")
    assert identity(moved) == before
    assert digest_of(identity(moved)) == digest_of(before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plan", {"plan": replace(PLAN, seed=43)}),
        ("plan", {"plan": replace(PLAN, schedule=replace(PLAN.schedule, weight_decay=0.5))}),
        ("attempt", {"attempt": 1}),
        ("base", {"base": replace(BASE, digest="cd" * 32)}),
    ],
)
def test_a_training_that_is_asked_for_something_else_is_another(
    data_path: Path, name: str, change: dict[str, object]
) -> None:
    before, after = identity(data_path), identity(data_path, **change)  # type: ignore[arg-type]
    assert {part for part in before if before[part] != after[part]} == {name}
    assert digest_of(before) != digest_of(after)


def other_data(data_path: Path, patch: pytest.MonkeyPatch) -> None:
    data_path.write_bytes(b"Samples")


def other_image(data_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("BAKEOFF_IMAGE", "sha256:0123")


def other_environment(data_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("NCCL_ALGO", "Ring")


def other_packages(data_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resume, "distributions", list)


def other_threads(data_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "get_num_threads", lambda: 77)


def more_code(data_path: Path, patch: pytest.MonkeyPatch) -> None:
    module = ModuleType("__main__")
    module.__file__ = str(Path(stages.__file__).parent / "kit/memory/calibration.yaml")  # which nothing imports
    patch.setitem(sys.modules, "made up", module)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("data", other_data),
        ("image", other_image),
        ("environment", other_environment),
        ("packages", other_packages),
        ("device", other_threads),
        ("code", more_code),
    ],
)
def test_so_is_one_on_anything_else(
    data_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    before = identity(data_path)
    change(data_path, monkeypatch)
    after = identity(data_path)
    assert {part for part in before if before[part] != after[part]} == {name}


def test_a_change_in_a_file_that_it_runs_is_other_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    for path in (tmp_path / "__init__.py", tmp_path / "kit/used.py"):
        path.write_text("")
    monkeypatch.setattr(stages, "__file__", str(tmp_path / "__init__.py"))
    module = ModuleType("stages.kit.used")
    module.__file__ = str(tmp_path / "kit/used.py")
    monkeypatch.setitem(sys.modules, "stages.kit.used", module)
    (tmp_path / "kit/unused.py").write_text("")
    before = list(resume._imported_code())
    (tmp_path / "kit/unused.py").write_text("pass")
    assert list(resume._imported_code()) == before
    (tmp_path / "kit/used.py").write_text("pass")
    assert list(resume._imported_code()) != before
