import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.core.params.schema import LimitParams
from stages.kit.planning.plan import resolve_plan
from tests.core.params.files import load, refusal


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("profile",), "tinny", r"profile: no profile is called 'tinny' \(did you mean 'tiny'\?\)"),
        (("recipes", "r1-llm-only", "base"), "bases/vml", r"r1-llm-only.base: no profile has a base 'vml'"),
        (("recipes", "r3-stage2", "base"), "runs/r3-stage/merged", r"r3-stage2.base: no recipe is called 'r3-stage'"),
        (("recipes", "r3-stage1", "base"), "runs/r3-stage2/merged", r"cycle: r3-stage1 -> r3-stage2 -> r3-stage1"),
        (("recipes", "r1-llm-only", "base"), "runs/r1-llm-only/merged", r"cycle: r1-llm-only -> r1-llm-only"),
        (("recipes", "r1-llm-only", "data"), "tables", r"r1-llm-only.data: no profile has a dataset 'tables'"),
        (("recipes", "r1-llm-only", "parts"), {}, r"r1-llm-only.parts: every part is frozen"),
        (("recipes", "r1-llm-only", "lora"), None, r"r1-llm-only.lora: missing"),
        (("recipes", "r1-llm-only", "parts", "vision"), "lora", r"lora.targets.vision: missing"),
        (
            ("recipes", "r4-joint", "parts", "vision"),
            "frozen",
            r"lora.targets.vision: set, though parts.vision is froz",
        ),
        (("recipes", "r2-vision-only", "quantization"), "nf4", r"quantization: nf4 weights cannot be trained in full"),
        (
            ("recipes", "r1-llm-only", "part_learning_rates"),
            {"vision": 1.0},
            r"part_learning_rates.vision: set, though",
        ),
        (("profiles", "tiny", "memory", "attn"), "flash_attention_2", r"tiny.memory: flash attention"),
        (("profiles", "tiny", "memory", "placement"), "balanced", r"placement: balanced needs several CUDA devices"),
        (("profiles", "tiny", "device", "count"), 2, r"tiny.memory.placement: single with device.count 2"),
        (("profiles", "tiny", "images", "min_pixels"), 10**9, r"tiny.images.min_pixels: larger than max_pixels"),
        (("profiles", "tiny", "datasets", "nutrition-tables", "generate"), None, r"nutrition-tables.generate: missing"),
        (("profiles", "tiny", "datasets", "nutrition-tables", "source"), "somewhere", r"nutrition-tables.source"),
        (("baselines", "base-vlm", "base"), "bases/other", r"baselines.base-vlm.base: no profile has a base 'other'"),
        (("predictions", "example-sentences", "recipe"), "amr-prt", r"example-sentences.recipe: .*mean 'amr-ptr'\?"),
        (
            ("predictions", "example-sentences", "recipe"),
            "r1-llm-only",
            r"example-sentences.task: amr, though .*detection",
        ),
        *(
            (("predictions", "example-sentences", "inputs"), inputs, r"inputs: expected a file of this checkout")
            for inputs in ("/srv/x.txt", "https://x.org/x.txt", "data/https://x.org/x.txt", "data/../x.txt", "data", "")
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    raw: dict[str, Any], tmp_path: Path, path: tuple[str, ...], value: Any, reason: str
) -> None:
    *parents, last = path
    here = raw
    for step in parents:
        here = here[step]
    here[last] = value
    assert re.search(reason, refusal(raw, tmp_path))


def test_sharding_refuses_what_knows_no_share_of_a_weight(raw: dict[str, Any], tmp_path: Path) -> None:
    profile = raw["profiles"]["qwen2-vl-7b-2x48gb"]
    profile["memory"] |= {"placement": "sharded", "optimizer": "paged_adamw_8bit"}
    message = refusal(raw, tmp_path)
    assert "memory.optimizer: an 8-bit optimizer cannot be sharded; take adamw_torch_fused" in message
    assert "memory.quantization: nf4 weights cannot be sharded; set it to none, or take placement ddp" in message


def mixed(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The tiny profile with two generated datasets of a task and a mix of them, changed."""
    datasets = raw["profiles"]["tiny"]["datasets"]
    for name in ("one", "other"):
        datasets[name] = {"task": "moe", "source": f"generated:{name}", "generate": {"train": 8, "val": 4}}
    datasets["both"] = {"task": "moe", "source": "mix", "mix": {"one": 4, "other": None}, **changes}
    return raw


def test_limits_and_mixes_are_read(raw: dict[str, Any], tmp_path: Path) -> None:
    raw = mixed(raw)
    raw["profiles"]["tiny"]["datasets"]["one"]["limit"] = {"train": 5}
    params = load(raw, tmp_path)
    assert params.dataset("one").selection() == {"limit": LimitParams(train=5, val=None)}
    assert params.dataset("both").selection() == {"mix": {"one": 4, "other": None}}
    assert params.dataset("nutrition-tables").selection() == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mix": None}, "both.mix: missing, though the source is mix"),
        ({"source": "folder:x"}, "both.mix: set, though the source is folder:x"),
        ({"limit": {"train": 3}}, "both.limit: set, though mix says how much of each dataset to take"),
        ({"mix": {"one": 0, "other": 0}}, "both.mix: takes no training sample of any dataset"),
        ({"mix": {"ohter": 3}}, "both.mix.ohter: the profile has no such dataset (did you mean 'other'?)"),
        ({"mix": {"both": 3}}, "both.mix.both: is a mix itself"),
        ({"mix": {"nutrition-tables": 3}}, "both.mix.nutrition-tables: has the task detection, this one moe"),
        ({"mix": {"one": -1}}, "both.mix.one: "),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(
    raw: dict[str, Any], tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    assert f"profiles.tiny.datasets.{problem}" in refusal(mixed(raw, **changes), tmp_path)


def test_a_length_without_room_for_a_question_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["profiles"]["tiny"]["evaluation"]["max_length"] = raw["profiles"]["tiny"]["evaluation"]["max_new_tokens"]
    assert "profiles.tiny.evaluation.max_length: not more than max_new_tokens" in refusal(raw, tmp_path)


def experts(*recipes: str, domains: Sequence[str | None] = ()) -> list[dict[str, str | None]]:
    """As params.yaml has them."""
    return [{"recipe": recipe, "domain": domain} for recipe, domain in zip_longest(recipes, domains)]


def with_build(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """With a build of two recipes, and a recipe and a baseline that start from it."""
    two = experts("r1-llm-only", "r2-vision-only", domains=("tables", "prices"))
    build = {"task": "detection", "base": "bases/vlm", "experts": two, **changes}
    raw["builds"] = {**raw["builds"], "moe": build}
    raw["recipes"]["after"] = {**raw["recipes"]["r1-llm-only"], "base": "builds/moe"}
    raw["baselines"]["base-moe"] = {**raw["baselines"]["base-vlm"], "base": "builds/moe"}
    return raw


def test_a_build_is_a_base_like_any_other(raw: dict[str, Any], tmp_path: Path) -> None:
    params = load(with_build(raw), tmp_path)
    assert params.build("moe").top_k == 2
    assert params.recipe("after").base_build() == "moe"
    assert params.recipe("after").base_recipe() is None
    assert params.recipe("r3-stage2").base_build() is None
    with pytest.raises(UserError, match=r"no build is called 'mo' \(did you mean 'moe'\?\)"):
        params.build("mo")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"experts": experts("r1-llm-only")}, r"builds.moe.experts: .* at least 2"),
        ({"experts": ["r1-llm-only", "r2-vision-only"]}, r"builds.moe.experts.0: .* found 'r1-llm-only'"),
        (
            {"experts": [{"recipe": "r1", "domian": "a"}, {}]},
            r"experts.0.domian: unknown .*'domain'.*\n.*1.recipe: miss",
        ),
        ({"experts": experts("r1-llm-only", "r1")}, r"builds.moe.experts: no recipe is called 'r1'"),
        ({"experts": experts("r1-llm-only", "r1-llm-only")}, r"moe.experts: r1-llm-only is named more than once"),
        ({"experts": experts("r1-llm-only", "after")}, r"moe.experts: after comes from builds/moe, not from bases/vlm"),
        ({"experts": experts("r1-llm-only", "after")}, r"after.base: forms a cycle: after -> builds/moe -> after"),
        (
            {"experts": experts("r1-llm-only", "r2-vision-only", domains=("a", "a"))},
            r"builds.moe.experts: a is named more than once",
        ),
        (
            {"experts": experts("r1-llm-only", "r2-vision-only", domains=("a", "a.b"))},
            r"builds.moe.experts.1.domain: .* match pattern",
        ),
        (
            {"experts": experts("r1-llm-only", "r2-vision-only", domains=("a",))},
            r"builds.moe.experts: some have a `domain` and others have none",
        ),
        (
            {"router_init": "hidden-states", "experts": experts("r1-llm-only", "r2-vision-only")},
            r"builds.moe.router_init: hidden-states, though no expert has a `domain`",
        ),
        ({"top_k": 1}, r"builds.moe.top_k: .* greater than or equal to 2"),
        ({"top_k": 3}, r"builds.moe.top_k: 3, though there are 2 experts"),
        ({"task": "amr"}, r"builds.moe.experts: r1-llm-only has the task detection, not amr"),
        ({"base": "bases/vml"}, r"builds.moe.base: no profile has a base 'vml' \(did you mean 'vlm'\?\)"),
        ({"base": "runs/r1-llm-only/merged"}, r"builds.moe.base"),
        ({"router_init": "hidden"}, r"builds.moe.router_init"),
        ({"topk": 2}, r"builds.moe.topk: unknown key \(did you mean 'top_k'\?\)"),
    ],
)
def test_a_build_that_cannot_be_is_refused(
    raw: dict[str, Any], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert re.search(reason, refusal(with_build(raw, **changes), tmp_path))


def with_labels(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """With a build of two recipes, whose routers one recipe labels, and another one trains on."""
    domains = changes.pop("domains", ("tables", "prices"))
    raw = with_build(raw, experts=experts("r1-llm-only", "r2-vision-only", domains=domains))
    gate = {**raw["recipes"]["r1-llm-only"], "parts": {"llm": "full"}, "full_targets": {"llm": ["mlp.gate"]}}
    gate = {**gate, "lora": None, "quantization": "none"}
    labels = {"base": "builds/moe", "loss": "router-labels"}
    raw["recipes"]["labels"] = {**gate, **labels, **changes}
    raw["recipes"]["gate"] = {**gate, "base": "runs/labels/merged"}
    return raw


def test_a_gate_is_trained_by_two_recipes(raw: dict[str, Any], tmp_path: Path) -> None:
    params = load(with_labels(raw), tmp_path)
    assert params.domains("labels") == params.domains("gate") == ("tables", "prices")
    assert params.domains("r1-llm-only") == ()
    assert resolve_plan(params, "labels", train_samples=16).domains == ("tables", "prices")
    assert resolve_plan(params, "gate", train_samples=16).domains == ()
    for name in ("labels", "gate"):
        assert params.recipe(name).full_targets == {"llm": ("mlp.gate",)}
    assert params.recipe("r2-vision-only").full_targets == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"domains": ()}, r"labels.base: goes back to builds/moe, whose experts have no `domain`"),
        ({"domains": (), "base": "runs/after/merged"}, r"labels.base: goes back to builds/moe, whose experts have no"),
        ({"base": "runs/r1-llm-only/merged"}, r"labels.base: goes back to bases/vlm, a dense model"),
        ({"base": "runs/gate/merged"}, r"labels.base: forms a cycle: labels -> gate -> labels"),
        ({"domain": "tables"}, r"labels.domain: unknown key"),
        ({"loss": "router-label"}, r"labels.loss: "),
        (
            {"full_targets": {}},
            r"labels.full_targets: loss router-labels trains routers and nothing else",
        ),
        ({"full_targets": {"llm": ["mlp.gate", "norm"]}}, r"labels.full_targets: loss router-labels trains routers"),
        ({"parts": {"llm": "full", "vision": "full"}}, r"labels.full_targets: loss router-labels trains routers"),
        ({"full_targets": {"llm": []}}, r"labels.full_targets.llm: .* at least 1"),
        ({"full_targets": {"lm": ["mlp.gate"]}}, r"labels.full_targets.lm"),
        ({"quantization": "nf4"}, r"labels.quantization: nf4 weights cannot be trained in full"),
        (
            {"full_targets": {"llm": ["mlp.gate"], "vision": ["attn"]}},
            r"labels.full_targets.vision: set, though parts.vision is frozen",
        ),
    ],
)
def test_labels_that_make_no_sense_are_refused(
    raw: dict[str, Any], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert re.search(f"recipes.{reason}", refusal(with_labels(raw, **changes), tmp_path))


def test_a_base_that_is_no_build_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    with_build(raw)["recipes"]["after"]["base"] = "builds/mo"
    assert "recipes.after.base: no build is called 'mo' (did you mean 'moe'?)" in refusal(raw, tmp_path)


def test_a_cycle_through_several_builds_is_found(raw: dict[str, Any], tmp_path: Path) -> None:
    recipes = raw["recipes"]
    recipes["one"], recipes["two"] = ({**recipes["r1-llm-only"], "base": f"builds/{name}"} for name in "ab")
    build = {"task": "detection", "base": "bases/vlm"}
    raw["builds"] = {
        "a": {**build, "experts": experts("r1-llm-only", "two")},
        "b": {**build, "experts": experts("one", "r1-llm-only")},
    }
    message = refusal(raw, tmp_path)
    assert "recipes.one.base: forms a cycle: one -> builds/a -> two -> builds/b -> one" in message
