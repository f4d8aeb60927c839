"""The calls for notebooks: their example runs, and what they return is what the commands say."""

from __future__ import annotations

import doctest
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.data.guards import read_guard
from stages.models.certificate import made_model
from stages.reporting.runs import report_runs_dir
from stages.tasks.amr.samples import read_split
from tests import ROOT
from tests.made_up_runs import made_up_ious, write_made_up_run
from tests.stage_runs import made_up_memory, read_params, write_workspace
from tools import api


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped recipes on a base that is small on every profile, two of them evaluated, with their baseline."""
    raw = read_params(ROOT / "params.yaml")
    for profile in raw["profiles"].values():
        profile["bases"] = dict.fromkeys(profile["bases"], "folder:data/tiny/qwen2-vl")
        profile["images"] = {"min_pixels": 3136, "max_pixels": 12544}
        profile["memory"]["fit"] = "refuse"  # one prediction, and no ladder of them
        profile["evaluation"]["batch_size"] = 8
    for recipe in raw["recipes"].values():
        recipe["max_length"] = 128
    write_workspace(tmp_path, raw)
    monkeypatch.chdir(tmp_path)
    params = load_params()
    for seed, (name, mean) in enumerate({"base-vlm": 0.2, "r1-llm-only": 0.6, "r4-joint": 0.8}.items()):
        trained = params if name in params.recipes else None
        write_made_up_run(
            report_runs_dir(Path("data"), "detection"), name, made_up_ious(mean, 40, seed=seed), params=trained
        )
    return tmp_path


def test_the_example_of_the_documentation_runs(workspace: Path) -> None:
    failed, attempted = doctest.testmod(api, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert (failed, attempted > 5) == (0, True)
    assert not (workspace / "data/bases").exists()


def test_every_cell_of_the_tour_runs(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without Jupyter: the code of its cells, one after the other, in a folder below the checkout."""
    (workspace / "docs").mkdir()
    os.chdir(workspace / "docs")
    cells = json.loads((ROOT / "docs/tour.ipynb").read_text(encoding="utf-8"))["cells"]
    assert len(cells) == 12
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    known: dict[str, Any] = {}
    with made_up_memory():
        exec("\n".join(code), known)  # noqa: S102 - our own
    assert known["example"].size > (100, 100)
    printed, _ = capsys.readouterr()
    for part in ("better on ", "++recipes.r1-llm-only.lora.rank=8' evaluate@r1-llm-only", "fits: "):
        assert part in printed


@pytest.mark.parametrize(
    ("ask", "stage"),
    [
        (lambda: api.read_run("r4-joint"), "evaluate@r4-joint"),
        (lambda: api.compare_runs("amr"), "compare@amr"),
        (lambda: made_model("runs/r4-joint/merged"), "merge@r4-joint"),
        (lambda: read_split(Path("data/prepared/visempar"), "val"), "prepare@visempar"),
        (lambda: read_guard("general"), "guard@general"),
    ],
)
def test_what_is_not_here_is_made_or_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object], stage: str
) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"; run: dvc repro {stage}; or, .*: dvc pull --with-deps {stage}$"):
        ask()
