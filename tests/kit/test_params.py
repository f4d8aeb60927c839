import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from stages.kit.errors import UserError
from stages.kit.params import Params, load_params

SHIPPED = Path(__file__).parents[2] / "params.yaml"


@pytest.fixture
def raw() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(SHIPPED))


def load(raw: Any, tmp_path: Path) -> Params:
    path = tmp_path / "params.yaml"
    with path.open("w") as file:
        YAML().dump(raw, file)
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


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_damage_gives_a_message_or_valid_params(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Replaces one random value of the shipped file by a random one."""
    raw = YAML(typ="safe").load(SHIPPED)
    here, depth = raw, 0
    while True:
        key = data.draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
        if not isinstance(here[key], dict) or not here[key] or (depth and data.draw(st.integers(0, 3)) == 0):
            break
        here, depth = here[key], depth + 1
    here[key] = data.draw(yaml_values)
    try:
        load(raw, tmp_path_factory.mktemp("params"))
    except UserError as error:
        assert "problem" in error.message
