"""The base and the data of a recipe before its stages have run: taken only where they are what the profile names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.core.lineage import write_lineage
from stages.core.params import load_params
from stages.core.params.schema import BuildParams, ExpertParams, Params
from stages.kit.models.folders import PUBLISHED, geometry_config_path
from tests import ROOT
from tools.plan.available_inputs import available_base, available_data, root_base, same_source, trainable_recipes

COMMIT = "895c3a49bc3fa70a340399125c650a463535e71c"
GEOMETRY = geometry_config_path("qwen2-vl-2b").parent


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """Of the 2B profile, in an empty folder."""
    params = load_params(ROOT / "params.yaml").on("qwen2-vl-2b-24gb")
    monkeypatch.chdir(tmp_path)
    return params


def with_base(params: Params, source: str) -> Params:
    profile = replace(params.active, bases={"vlm": source})
    return replace(params, profiles={**params.profiles, params.profile: profile})


def built(source: dict[str, str]) -> Path:
    folder = Path("data/bases/vlm")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write_lineage(folder, kind="base", name="vlm", source=source)
    return folder


@pytest.mark.parametrize(
    ("found", "asked", "same"),
    [
        (f"hub:Qwen/A@{COMMIT}", f"hub:Qwen/A@{COMMIT}", True),
        (f"hub:Qwen/A@{COMMIT}", "hub:Qwen/A@895c3a49", True),
        (f"hub:Qwen/A@{COMMIT}", "hub:Qwen/A@d59dcee8", False),
        (f"hub:Qwen/A@{COMMIT}", "hub:Qwen/A@main", True),
        (f"hub:Qwen/AB@{COMMIT}", "hub:Qwen/A@895c3a49", False),
        ("folder:photographs", "folder:photographs", True),
        ("folder:photographs-2", "folder:photographs", False),
        ("generated", f"hub:Qwen/A@{COMMIT}", False),
    ],
)
def test_a_source_is_the_one_that_is_named(found: str, asked: str, same: bool) -> None:
    assert same_source(found, asked) is same


def test_the_geometry_of_every_shipped_base_is_known_before_it_is_fetched() -> None:
    assert all(geometry_config_path(name).is_file() for name in PUBLISHED.values())
    in_file = load_params(ROOT / "params.yaml")
    for profile in in_file.profiles:
        params = in_file.on(profile)
        recipes = trainable_recipes(params)
        assert recipes
        assert all((available_base(params, recipe).config_dir / "config.json").is_file() for recipe in recipes)
    assert trainable_recipes(in_file) == list(in_file.recipes)
    assert trainable_recipes(in_file.on("qwen25-7b-48gb")) == ["amr-baseline", "amr-ptr", "amr-mtup"]


def test_a_recipe_that_continues_another_or_a_build_has_the_base_at_the_root(params: Params) -> None:
    base = available_base(params, "r1-llm-only")
    assert available_base(params, "r3-two-stage") == available_base(params, "r2-vision-only")
    experts = tuple(ExpertParams(recipe=name) for name in ("r1-llm-only", "r2-vision-only"))
    build = BuildParams(task="detection", base="bases/vlm", experts=experts)
    after = replace(params.recipes["r1-llm-only"], base="builds/moe")
    recipes = {**params.recipes, "after": after, "further": replace(after, base="runs/after/merged")}
    params = replace(params, recipes=recipes, builds={"moe": build})
    for recipe in ("after", "further"):
        assert root_base(params, recipe) == ("vlm", build)
        assert available_base(params, recipe) == replace(base, build=build)


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ({"hub": "Qwen/Qwen2-VL-2B-Instruct", "revision": COMMIT}, True),
        ({"hub": "Qwen/Qwen2-VL-7B-Instruct", "revision": COMMIT}, False),
        ({"hub": "Qwen/Qwen2-VL-2B-Instruct", "revision": COMMIT[::-1]}, False),
        ({"random": "qwen2-vl-2b", "seed": "0"}, False),
        ({"folder": "somewhere"}, False),
    ],
)
def test_a_base_that_was_fetched_is_taken_with_its_tokenizer_unless_it_is_another_profiles(
    params: Params, source: dict[str, str], taken: bool
) -> None:
    folder = built(source)
    base = available_base(params, "r1-llm-only")
    assert (base.config_dir, base.processor_dir) == ((folder, folder) if taken else (GEOMETRY, None))


def test_an_unknown_repository_has_to_be_fetched_first(params: Params) -> None:
    unknown = with_base(params, f"hub:Nobody/Knows@{COMMIT}")
    with pytest.raises(UserError, match=r"Nobody/Knows.*dvc exp run -S profile=qwen2-vl-2b-24gb base@vlm"):
        available_base(unknown, "r1-llm-only")
    folder = built({"hub": "Nobody/Knows", "revision": COMMIT})
    assert available_base(unknown, "r1-llm-only").config_dir == folder


def test_data_are_taken_only_where_they_are_the_profiles(params: Params) -> None:
    stats = write_stats("nutrition-tables", {"source": "folder:data/tiny/nutrition-tables"})
    assert available_data(params, "nutrition-tables") is None
    assert available_data(params.on("tiny"), "nutrition-tables") == stats.parent
    write_stats("nutrition-tables", {"source": f"hub:openfoodfacts/nutrition-table-detection@d59dcee8{'0' * 32}"})
    assert available_data(params, "nutrition-tables") == stats.parent
    write_stats("nutrition-tables", [])
    with pytest.raises(UserError, match=r"stats\.json is damaged.*prepare@nutrition-tables"):
        available_data(params, "nutrition-tables")
    stats.unlink()
    assert available_data(params, "nutrition-tables") is None


def test_a_mix_is_taken_only_where_it_is_of_the_profiles_parts_and_of_so_much_of_each(params: Params) -> None:
    facts, meetings = ({"source": f"folder:data/tiny/{name}"} for name in ("truthfulqa", "qmsum"))
    ours = {"truthfulqa": {**facts, "asked": 200}, "qmsum": {**meetings, "asked": 50}}
    others: tuple[dict[str, Any], ...] = (
        {},
        {**ours, "qmsum": {**meetings, "asked": 0}},
        {**ours, "qmsum": {**meetings, "asked": 50, "source": "folder:data/qmsum"}},
        {**ours, "more": ours["qmsum"]},
    )
    for parts in others:
        write_stats("finetune-mix", {"source": "mix", "parts": parts})
        assert available_data(params.on("tiny"), "finetune-mix") is None
    stats = write_stats("finetune-mix", {"source": "mix", "parts": ours})
    assert available_data(params.on("tiny"), "finetune-mix") == stats.parent
    assert available_data(params.on("moe-80gb"), "finetune-mix") is None
    write_stats("finetune-mix", {"source": "mix", "parts": {"qmsum": 1}})
    with pytest.raises(UserError, match=r"stats\.json is damaged.*prepare@finetune-mix"):
        available_data(params.on("tiny"), "finetune-mix")


def write_stats(dataset: str, stats: Any) -> Path:
    path = Path("data/prepared") / dataset / "stats.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stats))
    return path
