"""Where a published model comes from: all that was trained on, not what the last training read alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.lineage import Lineage
from stages.kit.publishing.card import evaluated_on, ingredients_of
from tests.made_up_runs import project_params

BASE = Lineage(kind="base", name="dense", digest="0" * 64, source={"folder": "data/tiny/qwen2-folklore"}, parents={})
CHAIN = ("only-truthfulqa", "only-qmsum", "both-domains", "finetune-alone")
"""What the trainings of moe-finetune-alone and of all that it was made from read."""


def prepared(tmp_path: Path) -> Path:
    """The last one's data, as prepare resolved them: without a training sample of QMSum."""
    folder = tmp_path / "finetune-alone"
    folder.mkdir()
    parts = {
        "truthfulqa": {"source": "hub:a/truth@1234", "asked": 200},
        "qmsum": {"source": "folder:data/tiny/qmsum", "asked": 0},
    }
    (folder / "stats.json").write_text(json.dumps({"source": "mix", "parts": parts}))
    return folder


def test_data_of_earlier_trainings_are_named_beside_those_of_the_last(tmp_path: Path) -> None:
    found = ingredients_of(BASE, CHAIN, prepared(tmp_path), project_params())
    assert [(each.kind, each.name, each.source, each.licence) for each in found] == [
        ("base", "dense", "folder:data/tiny/qwen2-folklore", "apache-2.0"),
        ("data", "truthfulqa", "hub:a/truth@1234", None),
        ("data", "qmsum", "folder:data/tiny/qmsum", "apache-2.0"),
    ]


def test_of_a_damaged_mix_the_stage_that_mixes_it_is_named(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    (folder / "stats.json").write_text('{"source": "mix"')
    with pytest.raises(UserError, match="dvc repro -f -s prepare@finetune-alone"):
        evaluated_on(folder, project_params())


def test_a_mix_is_evaluated_on_what_it_trains_on_no_sample_of_too(tmp_path: Path) -> None:
    assert [each.name for each in evaluated_on(prepared(tmp_path), project_params())] == ["truthfulqa", "qmsum"]
