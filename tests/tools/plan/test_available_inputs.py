"""What is at hand of a base and of data: believed only where it is what the profile names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.core.lineage import write_lineage
from stages.core.params.load import load_params
from stages.core.params.schema import BuildParams, ExpertParams, Params
from stages.kit.models.geometries import PUBLISHED, geometry_config_path
from tools.plan.available_inputs import available_base, available_data, root_base, same_source, trainable_recipes

COMMIT = "895c3a49bc3fa70a340399125c650a463535e71c"


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """Of the 2B profile, in an empty folder."""
    params = load_params().on("qwen2-vl-2b-24gb")
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


@pytest.mark.parametrize("profile", load_params().profiles)
def test_the_geometry_of_every_shipped_base_is_known_before_it_is_fetched(profile: str) -> None:
    params = load_params().on(profile)
    recipes = trainable_recipes(params)
    assert recipes
    for recipe in recipes:
        assert (available_base(params, recipe).config_dir / "config.json").is_file()


def test_a_profile_trains_the_recipes_whose_base_and_data_it_has() -> None:
    params = load_params()
    assert trainable_recipes(params) == list(params.recipes)
    assert trainable_recipes(params.on("qwen25-7b-48gb")) == ["amr-baseline", "amr-ptr", "amr-mtup"]
    assert "r3-stage2" in trainable_recipes(params.on("qwen2-vl-7b-48gb"))
    assert "amr-ptr" not in trainable_recipes(params.on("qwen2-vl-7b-48gb"))


def test_every_published_geometry_is_there() -> None:
    for name in PUBLISHED.values():
        assert geometry_config_path(name).is_file()


def test_a_recipe_that_continues_another_has_the_base_of_that_one(params: Params) -> None:
    third = replace(params.recipes["r3-stage2"], base="runs/r3-stage2/merged")
    assert root_base(replace(params, recipes={**params.recipes, "third": third}), "third") == ("vlm", None)
    assert available_base(params, "r3-stage2") == available_base(params, "r3-stage1")


def test_a_recipe_that_starts_from_a_build_has_the_geometry_of_the_builds_base(params: Params) -> None:
    build = BuildParams(
        task="detection",
        base="bases/vlm",
        experts=tuple(ExpertParams(recipe=name) for name in ("r1-llm-only", "r2-vision-only")),
    )
    after = replace(params.recipes["r1-llm-only"], base="builds/moe")
    further = replace(after, base="runs/after/merged")
    recipes = {**params.recipes, "after": after, "further": further}
    params = replace(params, recipes=recipes, builds={"moe": build})
    for recipe in ("after", "further"):
        assert root_base(params, recipe) == ("vlm", build)
        assert available_base(params, recipe) == replace(available_base(params, "r1-llm-only"), build=build)


def test_a_base_that_was_fetched_is_taken_with_its_tokenizer(params: Params) -> None:
    folder = built({"hub": "Qwen/Qwen2-VL-2B-Instruct", "revision": COMMIT})
    base = available_base(params, "r1-llm-only")
    assert (base.config_dir, base.processor_dir) == (folder, folder)


@pytest.mark.parametrize(
    "source",
    [
        {"hub": "Qwen/Qwen2-VL-7B-Instruct", "revision": COMMIT},
        {"hub": "Qwen/Qwen2-VL-2B-Instruct", "revision": COMMIT[::-1]},
        {"random": "qwen2-vl-2b", "seed": "0"},
        {"folder": "somewhere"},
    ],
)
def test_a_base_of_another_profile_is_not_taken(params: Params, source: dict[str, str]) -> None:
    built(source)
    base = available_base(params, "r1-llm-only")
    assert (base.config_dir, base.processor_dir) == (geometry_config_path("qwen2-vl-2b").parent, None)


def test_a_random_base_is_known_by_its_geometry(params: Params) -> None:
    base = available_base(with_base(params, "random:qwen2-vl-tiny"), "r1-llm-only")
    assert base.config_dir == geometry_config_path("qwen2-vl-tiny").parent


def test_an_unknown_repository_has_to_be_fetched_first(params: Params) -> None:
    unknown = with_base(params, f"hub:Nobody/Knows@{COMMIT}")
    with pytest.raises(UserError, match=r"Nobody/Knows.*dvc exp run -S profile=qwen2-vl-2b-24gb base@vlm"):
        available_base(unknown, "r1-llm-only")
    folder = built({"hub": "Nobody/Knows", "revision": COMMIT})
    assert available_base(unknown, "r1-llm-only").config_dir == folder


def test_data_are_taken_only_where_they_are_the_profiles(params: Params) -> None:
    assert available_data(params, "nutrition-tables") is None
    stats = Path("data/prepared/nutrition-tables/stats.json")
    stats.parent.mkdir(parents=True)
    stats.write_text(json.dumps({"source": "generated"}))
    assert available_data(params, "nutrition-tables") is None
    assert available_data(params.on("tiny"), "nutrition-tables") == stats.parent
    stats.write_text(json.dumps({"source": f"hub:openfoodfacts/nutrition-table-detection@d59dcee8{'0' * 32}"}))
    assert available_data(params, "nutrition-tables") == stats.parent
    stats.write_text("[]")
    with pytest.raises(UserError, match=r"stats\.json is damaged.*prepare@nutrition-tables"):
        available_data(params, "nutrition-tables")


def test_a_mix_is_taken_only_where_it_is_of_the_profiles_parts_and_of_so_much_of_each(params: Params) -> None:
    params = params.on("tiny")
    stats = Path("data/prepared/finetune-mix/stats.json")
    stats.parent.mkdir(parents=True)
    facts, meetings = ({"source": f"generated:{name}"} for name in ("truthfulqa", "qmsum"))
    ours = {"truthfulqa": {**facts, "asked": 200}, "qmsum": {**meetings, "asked": 50}}
    others: tuple[dict[str, Any], ...] = (
        {},
        {**ours, "qmsum": {**meetings, "asked": 0}},
        {**ours, "qmsum": {**meetings, "asked": 50, "source": "folder:data/qmsum"}},
        {"truthfulqa": ours["truthfulqa"]},
        {**ours, "more": ours["qmsum"]},
    )
    for parts in others:
        stats.write_text(json.dumps({"source": "mix", "parts": parts}))
        assert available_data(params, "finetune-mix") is None
    stats.write_text(json.dumps({"source": "mix", "parts": ours}))
    assert available_data(params, "finetune-mix") == stats.parent
    assert available_data(params.on("moe-80gb"), "finetune-mix") is None
    faults: tuple[Any, ...] = ({"qmsum": 1}, {"qmsum": {}}, [1])
    for damaged in faults:
        stats.write_text(json.dumps({"source": "mix", "parts": damaged}))
        with pytest.raises(UserError, match=r"stats\.json is damaged.*mix@finetune-mix"):
            available_data(params, "finetune-mix")
