"""The ingredients of a published model: all that it was trained on, not only the data of its last training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from stages.core.lineage import Lineage
from stages.publishing.model_card import evaluated_on, ingredients_of
from tests.made_up_runs import project_params

BASE = Lineage(kind="base", name="dense", digest="0" * 64, source={"folder": "data/tiny/qwen2-folklore"}, parents={})
CHAIN = ("only-truthfulqa", "only-qmsum", "both-domains", "finetune-alone")
"""The data of moe-finetune-alone and of all that it was made from."""


def prepared(tmp_path: Path) -> Path:
    """The prepared data of the last: without a training sample of QMSum."""
    folder = tmp_path / "finetune-alone"
    folder.mkdir()
    parts = {
        "truthfulqa": {"source": "hub:a/truth@1234", "asked": 200},
        "qmsum": {"source": "folder:data/tiny/qmsum", "asked": 0},
    }
    (folder / "stats.json").write_text(json.dumps({"source": "mix", "parts": parts}))
    return folder


def test_the_data_of_earlier_trainings_are_ingredients(tmp_path: Path) -> None:
    found = ingredients_of(BASE, CHAIN, prepared(tmp_path), project_params())
    assert [(each.kind, each.name, each.place, each.licence) for each in found] == [
        ("base", "dense", "folder:data/tiny/qwen2-folklore", "apache-2.0"),
        ("data", "truthfulqa", "hub:a/truth", None),
        ("data", "qmsum", "folder:data/tiny/qmsum", "apache-2.0"),
    ]


def test_a_folder_may_have_an_at_sign_in_its_name() -> None:
    params = replace(project_params(), licenses={"folder:bases/a": "mit"})
    (found,) = ingredients_of(replace(BASE, source={"folder": "bases/a@b"}), (), Path("x"), params)
    assert (found.words, found.licence) == ("folder:bases/a@b", None)


def test_a_mix_is_evaluated_on_all_its_parts(tmp_path: Path) -> None:
    assert [each.name for each in evaluated_on(prepared(tmp_path), project_params())] == ["truthfulqa", "qmsum"]
