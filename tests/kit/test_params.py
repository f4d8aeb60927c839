import copy
import io
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from stages.kit.errors import UserError
from stages.kit.params import LimitParams, Params, load_params, made_by
from stages.kit.plan import resolve_plan
from tests.damage import at, damaged_text, damaged_tree, quick

SHIPPED = Path(__file__).parents[2] / "params.yaml"


@pytest.fixture
def raw() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(SHIPPED))


def load(raw: Any, tmp_path: Path) -> Params:
    path = tmp_path / "params.yaml"
    path.write_text(json.dumps(raw), encoding="utf-8")  # which is YAML too
    return load_params(path)


def refusal(raw: Any, tmp_path: Path) -> str:
    with pytest.raises(UserError) as error:
        load(raw, tmp_path)
    return error.value.message


def test_the_shipped_file_loads() -> None:
    params = load_params(SHIPPED)
    assert params.profile == "tiny"
    assert {"r1-llm-only", "r2-vision-only", "r3-stage1", "r3-stage2", "r4-joint"} <= params.recipes.keys()


def test_the_original_experiments_numbers_are_kept() -> None:
    recipe = load_params(SHIPPED).recipe("r4-joint")
    assert recipe.lora is not None
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.dropout) == (64, 128, 0.1)
    assert (recipe.learning_rate, recipe.effective_batch, recipe.epochs, recipe.seed) == (1e-4, 16, 3, 42)


def test_every_hub_source_is_pinned_to_a_commit() -> None:
    profiles = load_params(SHIPPED).profiles.values()
    sources = [source for profile in profiles for source in profile.bases.values()]
    sources += [dataset.source for profile in profiles for dataset in profile.datasets.values()]
    pinned = [source for source in sources if source.startswith("hub:")]
    assert pinned
    assert all(re.fullmatch(r"hub:[^@]+@[0-9a-f]{8,40}", source) for source in pinned)


def test_an_unknown_key_is_refused_with_the_nearest_one(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["recipes"]["r1-llm-only"]["lora"]["rnak"] = 8
    raw["recipes"]["r1-llm-only"]["epoch"] = 8
    message = refusal(raw, tmp_path)
    assert "recipes.r1-llm-only.lora.rnak: unknown key (did you mean 'rank'?)" in message
    assert "recipes.r1-llm-only.epoch: unknown key (did you mean 'epochs'?)" in message


def test_all_problems_are_reported_at_once_with_their_paths(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["recipes"]["r1-llm-only"]["lora"]["rank"] = 0
    raw["recipes"]["r2-vision-only"]["learning_rate"] = "fast"
    raw["profiles"]["tiny"]["memory"]["precision"] = "fp8"
    del raw["profiles"]["tiny"]["device"]
    message = refusal(raw, tmp_path)
    assert "has 4 problems" in message
    for path in (
        "recipes.r1-llm-only.lora.rank",
        "recipes.r2-vision-only.learning_rate",
        "profiles.tiny.memory.precision",
        "profiles.tiny.device: missing",
    ):
        assert path in message


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
        (("profiles", "tiny", "memory", "quantization"), "as-recipe", r"tiny.memory.quantization: a CPU has no nf4"),
        (("profiles", "tiny", "memory", "precision"), "fp16", r"tiny.memory: fp16"),
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
        (("predictions", "example-sentences", "inputs"), "/srv/unknown.txt", r"example-sentences.inputs"),
    ],
)
def test_contradictions_are_refused(
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


def test_numbers_as_dvc_writes_them_are_numbers(tmp_path: Path) -> None:
    text = SHIPPED.read_text().replace("learning_rate: 1.0e-4", "learning_rate: 1e-05")
    (tmp_path / "params.yaml").write_text(text)
    assert load_params(tmp_path / "params.yaml").recipe("r1-llm-only").learning_rate == 1e-5


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "profile: tiny\nprofile: tiny\n", "42", "\0"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(UserError):
        load_params(tmp_path / "params.yaml")


def test_a_missing_file_says_where_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="top of the repository"):
        load_params(tmp_path / "params.yaml")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    params = load_params(SHIPPED)
    with pytest.raises(UserError, match=r"no recipe is called 'r1-llm' \(did you mean 'r1-llm-only'"):
        params.recipe("r1-llm")
    with pytest.raises(UserError, match="no base of profile tiny is called 'text'"):
        params.base_source("text")
    with pytest.raises(UserError, match="no entry of predictions is called 'example'"):
        params.prediction("example")


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


def small(raw: dict[str, Any]) -> dict[str, Any]:
    """Enough of the shipped file for every kind of entry, and read ten times as fast."""
    chained = ("r1-llm-only", "r3-stage1", "r3-stage2")
    recipes = (*chained, "amr-ptr", "moe-gate-labels", "moe-expert-truthfulqa", "moe-expert-qmsum")
    return {
        **raw,
        "baselines": {"base-moe": raw["baselines"]["base-moe"]},
        "recipes": {name: raw["recipes"][name] for name in recipes},
        "builds": {"moe": raw["builds"]["moe"]},
        "profiles": {"tiny": raw["profiles"]["tiny"], "two-gpus": raw["profiles"]["qwen2-vl-7b-2x48gb"]},
    }


SMALL = small(YAML(typ="safe").load(SHIPPED))
SMALL_TEXT = io.StringIO()
YAML().dump(SMALL, SMALL_TEXT)
STEP = r"""(?:[\w/@+-]+|['"].*)"""
A_REFUSAL = re.compile(rf"\S+ is not YAML: .+|\S+ has \d+ problems?:(\n  (the file|{STEP}(\.{STEP})*): .+)+")
"""Every line but the first is a problem with its path."""


@given(
    content=damaged_tree(SMALL).map(lambda tree: json.dumps(tree).replace("NaN", ".nan").replace("Infinity", ".inf"))
    | damaged_text(
        SMALL_TEXT.getvalue(),
        [*"\t\n:-&*[]{}'\"#", "\n  ", "<<: ", "- ", "*a", "&a ", "~", "1e9", "9" * 400, "\0", "\\ud800"],
    )
)
@quick(80)
def test_any_damage_gives_problems_with_their_paths_or_params_that_resolve(content: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text(content, encoding="utf-8")
    try:
        params = load_params(path)
    except UserError as error:
        assert A_REFUSAL.fullmatch(error.message)
        return
    for name in params.recipes:
        with suppress(UserError):
            assert resolve_plan(params, name, train_samples=7).schedule.num_steps


MISTAKES = [
    (("profile",), "tinny", "profile"),
    (("tracking", "wandb"), "yes", "tracking.wandb"),
    (("more",), {}, "more"),
    (("baselines", "base-moe", "base"), "builds/mo", "baselines.base-moe.base"),
    (("recipes", "r1-llm-only", "lora", "rank"), 0, "recipes.r1-llm-only.lora.rank"),
    (("recipes", "r1-llm-only", "epoch"), 3, "recipes.r1-llm-only.epoch"),
    (("recipes", "r1-llm-only", "data"), "tables", "recipes.r1-llm-only.data"),
    (("recipes", "r3-stage1", "base"), "runs/r3-stage2/merged", "recipes.r3-stage1.base"),
    (("recipes", "r3-stage1", "learning_rate"), "fast", "recipes.r3-stage1.learning_rate"),
    (("recipes", "r3-stage1", "quantization"), "nf4", "recipes.r3-stage1.quantization"),
    (("recipes", "amr-ptr", "parts", "vision"), "lora", "recipes.amr-ptr.lora.targets.vision"),
    (("recipes", "amr-ptr", "base"), "bases/lm", "recipes.amr-ptr.base"),
    (("recipes", "moe-gate-labels", "base"), "bases/dense", "recipes.moe-gate-labels.base"),
    (("recipes", "moe-gate-labels", "seed"), -1, "recipes.moe-gate-labels.seed"),
    (("builds", "moe", "experts"), [{"recipe": "moe-expert-truthfulqa"}, {"recipe": "nobody"}], "builds.moe.experts"),
    (("builds", "moe", "top_k"), 7, "builds.moe.top_k"),
    (("builds", "moe", "router_init"), "zeros", "builds.moe.router_init"),
    (("predictions", "example-sentences", "recipe"), "amr", "predictions.example-sentences.recipe"),
    (("predictions", "example-sentences", "inputs"), "data/../x", "predictions.example-sentences.inputs"),
    (("profiles", "tiny", "images", "min_pixels"), 10**9, "profiles.tiny.images.min_pixels"),
    (("profiles", "tiny", "evaluation", "batch_size"), "many", "profiles.tiny.evaluation.batch_size"),
    (("profiles", "tiny", "memory", "precision"), "fp16", "profiles.tiny.memory"),
    (
        ("profiles", "tiny", "datasets", "both-domains", "mix", "ohter"),
        1,
        "profiles.tiny.datasets.both-domains.mix.ohter",
    ),
    (("profiles", "two-gpus", "device", "count"), 1, "profiles.two-gpus.memory.placement"),
]


@given(mistakes=st.lists(st.sampled_from(MISTAKES), unique_by=lambda mistake: mistake[2], min_size=2))
@example(mistakes=MISTAKES)
@quick(25)
def test_of_several_mistakes_of_any_kind_none_hides_another(mistakes: list[Any], tmp_path_factory: Any) -> None:
    raw = copy.deepcopy(SMALL)
    for (*above, key), value, _ in mistakes:
        at(raw, tuple(above))[key] = value
    message = refusal(raw, tmp_path_factory.getbasetemp())
    assert all(f"\n  {path}: " in message for _, _, path in mistakes)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("profile: other", "profile: set twice, in lines 4 and 5"),
        ("2024: x", "2024: a key has to be text; put it in quotes"),
        ("[a, b]: x", "the file: a key that is a list or a mapping, in line 5"),
        ("more: &a [*a]", "more.0.0.0: lists and mappings are nested more than 50 deep"),
    ],
)
def test_what_yaml_allows_and_we_do_not_is_refused_with_its_path(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(SHIPPED.read_text(encoding="utf-8").replace("profile: tiny\n", f"profile: tiny\n{text}\n", 1))
    with pytest.raises(UserError, match=re.escape(problem)):
        load_params(path)


def test_a_recipe_may_take_its_settings_from_another_by_an_alias(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    text = SHIPPED.read_text(encoding="utf-8").replace("  r1-llm-only:\n", "  r1-llm-only: &r1\n", 1)
    path.write_text(text.replace("  r2-vision-only:\n", "  r1-wide: {<<: *r1, epochs: 9}\n  r2-vision-only:\n", 1))
    params = load_params(path)
    assert params.recipe("r1-wide") == replace(params.recipe("r1-llm-only"), epochs=9)


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
    ("base", "stage"),
    [("bases/vlm", "base@vlm"), ("runs/r3-stage1/merged", "merge@r3-stage1"), ("builds/moe", "build@moe")],
)
def test_every_base_is_made_by_a_stage(base: str, stage: str) -> None:
    assert made_by(base) == stage


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
    assert "r1-llm-only.base" not in message
