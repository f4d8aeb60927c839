"""params.yaml is checked as a whole before every stage."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.launcher import settings
from tests import ROOT
from tests.documents import write_yaml


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    return tmp_path


def mistakes(workspace: Path, raw: Any) -> str:
    """The message for params.yaml with this content."""
    write_yaml(raw, workspace / "params.yaml")
    with pytest.raises(UserError) as refused:
        settings.checked_params(workspace)
    return refused.value.message


def shipped() -> Any:
    return YAML(typ="safe").load(ROOT / "params.yaml")


def test_the_shipped_file_is_without_mistakes() -> None:
    assert settings.checked_params(ROOT) == load_params(ROOT / "params.yaml")


def test_an_unknown_task_is_named_by_its_path(workspace: Path) -> None:
    raw = shipped()
    raw["baselines"]["base-vlm"]["task"] = "nosuch"
    raw["predictions"]["mine"] = {"task": "chat", "recipe": "chat-lora", "inputs": "data/questions.jsonl"}
    raw["profiles"]["tiny"]["datasets"]["visempar"]["task"] = "amrr"
    message = mistakes(workspace, raw)
    assert "baselines.base-vlm.task: no task is called 'nosuch'; there are: amr, " in message
    assert "predictions.mine.task: chat predicts on no file (amr does); use `make try`" in message
    assert "profiles.tiny.datasets.visempar.task: no task is called 'amrr' (did you mean 'amr'?)" in message


def test_settings_of_a_dataset_are_checked_by_its_task(workspace: Path) -> None:
    raw = shipped()
    datasets = raw["profiles"]["tiny"]["datasets"]
    datasets["nutrition-tables"]["reader"] = {"columns": {"ordr": "xywh"}, "max_image_pixels": 0}
    datasets["visempar"]["reader"] = {"group": "x"}
    datasets["conversations"]["reader"] = {"metrics": ["bleu"], "grup": "x"}
    datasets["both"] = {"task": "chat", "source": "mix", "mix": {"conversations": None}}
    message = mistakes(workspace, raw)
    for problem in (
        "nutrition-tables.reader.columns.ordr: unknown key (did you mean 'order'?)",
        "nutrition-tables.reader.max_image_pixels: input should be greater",
        "visempar.reader.group: unknown key",
        "both.mix: datasets of the task chat cannot be mixed",
        "conversations.reader.metrics.0: input should be",
        "conversations.reader.grup: unknown key (did you mean 'group'?)",
    ):
        assert f"profiles.tiny.datasets.{problem}" in message


def test_the_dataset_and_the_answer_format_are_of_the_task(workspace: Path) -> None:
    raw = shipped()
    raw["baselines"]["base-vlm"]["answer_format"] = "full"
    raw["recipes"]["amr-ptr"]["answer_format"] = "prt"
    raw["recipes"]["r1-llm-only"]["data"] = "visempar"
    raw["baselines"]["base-moe"]["data"] = "visempar"
    del raw["baselines"]["base-llm"]["answer_format"]
    message = mistakes(workspace, raw)
    assert "baselines.base-vlm.answer_format: is full; expected null" in message
    assert "baselines.base-llm.answer_format: is null; expected full, ptr, mtup" in message
    assert "recipes.amr-ptr.answer_format: is prt; expected full, ptr, mtup" in message
    assert "recipes.r1-llm-only.data: is visempar, which has the task amr" in message
    assert "baselines.base-moe.data: is visempar, which has the task amr" in message
