"""The identity of a training has everything that its bytes depend on, and nothing else."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import stages
from stages.core.lineage import Lineage, json_digest
from stages.core.params.schema import DeviceParams
from stages.planning.plan import Plan
from stages.training import identity as identity_module
from stages.training.identity import identity_of
from tests.plans import changed
from tests.training.small import plan_for

PLAN = plan_for("r1-llm-only", micro_batch=1)

BASE = Lineage(kind="base", name="vlm", digest="ab" * 32)


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"samples")
    return path


def identity(data_path: Path, plan: Plan = PLAN, attempt: int = 0, base: Lineage = BASE) -> dict[str, str]:
    return identity_of(plan, attempt=attempt, base=base, data={"data": data_path})


def test_the_identity_has_no_path_and_no_name(data_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(data_path)
    moved = data_path.rename(tmp_path / "moved.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/elsewhere")
    assert identity(moved, replace(PLAN, name="other")) == before


def imported_file(patch: pytest.MonkeyPatch, path: Path) -> None:
    module = ModuleType("made up")
    module.__file__ = str(path)
    patch.setitem(sys.modules, "made up", module)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plan", {"plan": replace(PLAN, seed=43)}),
        ("plan", {"plan": changed(PLAN, weight_decay=0.5)}),
        ("attempt", {"attempt": 1}),
        ("base", {"base": replace(BASE, digest="cd" * 32)}),
        ("data", lambda patch, data_path: data_path.write_bytes(b"Samples")),
        ("image", lambda patch, _: patch.setenv("BAKEOFF_IMAGE", "sha256:0123")),
        ("environment", lambda patch, _: patch.setenv("NCCL_ALGO", "Ring")),
        ("packages", lambda patch, _: patch.setattr(identity_module, "installed_packages", list)),
        ("device", lambda patch, _: patch.setattr(torch, "get_num_threads", lambda: 77)),
        # A script, which nothing imports.
        ("code", lambda patch, _: imported_file(patch, Path(stages.__file__).parent / "evaluation/vllm/worker.py")),
    ],
)
def test_the_identity_names_what_differs(
    data_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any
) -> None:
    before = identity(data_path)
    if callable(change):
        change(monkeypatch, data_path)
        change = {}
    after = identity(data_path, **change)
    assert {fact for fact in before if before[fact] != after[fact]} == {name}
    assert json_digest(before) != json_digest(after)


def test_other_loaded_libraries_of_cuda_are_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    loaded = {torch.backends.cudnn: 92000, torch.cuda.nccl: (2, 29, 7)}
    for module, version in loaded.items():
        monkeypatch.setattr(module, "version", lambda version=version: version)
    device = identity_module._device(DeviceParams(kind="cuda"))
    assert device == "1 x cuda: H100, CUDA 13.0, cuDNN 92000, NCCL (2, 29, 7)"


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        ('"Other words."\n\n\nclass A:\n  "A."\n  x: int = 1  # one\n  "Unit."\n', True),
        ("class A:\n    x: int = 2\n", False),
        ("class A:\n    x: float = 1\n", False),
        ('class A:\n    x: int = "1"\n', False),
    ],
)
def test_comments_docstrings_and_layout_make_no_other_training(source: str, is_same: bool) -> None:
    before = identity_module._without_texts(b"class A:\n    x: int = 1\n")
    assert (identity_module._without_texts(source.encode()) == before) == is_same


def test_only_code_that_runs_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    for name in ("__init__.py", "training/used.py", "training/unused.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(stages, "__file__", str(tmp_path / "__init__.py"))
    imported_file(monkeypatch, tmp_path / "training/used.py")
    before = list(identity_module._imported_code())
    (tmp_path / "training/unused.py").write_text("pass")
    assert list(identity_module._imported_code()) == before
    (tmp_path / "training/used.py").write_text("pass")
    assert list(identity_module._imported_code()) != before
