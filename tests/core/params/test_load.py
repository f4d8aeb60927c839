import copy
import io
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.kit.planning.plan import resolve_plan
from tests.core.params.files import SHIPPED, SHIPPED_RAW, refusal
from tests.damage import at, damaged_text, damaged_tree, quick


def test_the_original_experiments_numbers_are_kept() -> None:
    params = load_params(SHIPPED)
    recipe = params.recipe("r4-joint")
    assert recipe.lora is not None
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.dropout) == (64, 128, 0.1)
    assert (recipe.learning_rate, recipe.effective_batch, recipe.epochs, params.seed) == (1e-4, 16, 3, 42)


def test_every_hub_source_is_pinned_to_a_commit() -> None:
    profiles = load_params(SHIPPED).profiles.values()
    sources = [source for profile in profiles for source in profile.bases.values()]
    sources += [dataset.source for profile in profiles for dataset in profile.datasets.values()]
    pinned = [source for source in sources if source.startswith("hub:")]
    assert pinned
    assert all(re.fullmatch(r"hub:[^@]+@[0-9a-f]{8,40}", source) for source in pinned)


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "leads out of"),
        (lambda path: path.symlink_to(path), "leads out of|cannot be read"),
        (os.mkfifo, "is no plain file"),
        (lambda path: None, "is missing; run from the top"),
    ],
)
def test_a_file_that_is_none_of_its_folder_is_not_read(tmp_path: Path, put: Callable[[Path], None], said: str) -> None:
    put(tmp_path / "params.yaml")
    with pytest.raises(UserError, match=said):
        load_params(tmp_path / "params.yaml")


def test_numbers_as_dvc_writes_them_are_numbers(tmp_path: Path) -> None:
    text = SHIPPED.read_text().replace("learning_rate: 1.0e-4", "learning_rate: 1e-05")
    (tmp_path / "params.yaml").write_text(text)
    assert load_params(tmp_path / "params.yaml").recipe("r1-llm-only").learning_rate == 1e-5


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    params = load_params(SHIPPED)
    with pytest.raises(UserError, match=r"no recipe is called 'r1-llm' \(did you mean 'r1-llm-only'"):
        params.recipe("r1-llm")
    with pytest.raises(UserError, match="no base of profile tiny is called 'text'"):
        params.base_source("text")
    with pytest.raises(UserError, match="no entry of predictions is called 'example'"):
        params.prediction("example")


def small(raw: dict[str, Any]) -> dict[str, Any]:
    """Enough of the shipped file for every kind of entry, and read ten times as fast."""
    chained = ("r1-llm-only", "r2-vision-only", "r3-two-stage")
    recipes = (*chained, "amr-ptr", "moe-gate-labels", "moe-expert-truthfulqa", "moe-expert-qmsum")
    return {
        **raw,
        "baselines": {"base-moe": raw["baselines"]["base-moe"]},
        "recipes": {name: raw["recipes"][name] for name in recipes},
        "builds": {"moe": raw["builds"]["moe"]},
        "profiles": {"tiny": raw["profiles"]["tiny"], "two-gpus": raw["profiles"]["qwen2-vl-7b-2x48gb"]},
    }


SMALL = small(SHIPPED_RAW)
SMALL_TEXT = io.StringIO()
YAML().dump(SMALL, SMALL_TEXT)
STEP = r"""(?:[\w/@+-]+|['"].*)"""
A_REFUSAL = re.compile(
    r"\S+ is not plain YAML: .+|"
    rf"\S+ has \d+ problems?:(\n  (the file|{STEP}(\.{STEP})*): .+)+"
)
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


WRONG_ALONE = [
    (("tracking", "wandb"), "yes", "tracking.wandb: input should be a valid boolean, found 'yes'"),
    (("more",), {}, "more: unknown key"),
    (("recipes", "r1-llm-only", "lora", "rank"), 0, "recipes.r1-llm-only.lora.rank: input should be greater"),
    (("recipes", "r1-llm-only", "epoch"), 3, "recipes.r1-llm-only.epoch: unknown key (did you mean 'epochs'?)"),
    (("recipes", "r2-vision-only", "learning_rate"), "fast", "recipes.r2-vision-only.learning_rate: "),
    (("recipes", "r3-two-stage", "base"), "runs/r2-vision-only", "recipes.r3-two-stage.base: "),
    (("recipes", "moe-gate-labels", "full_targets"), {"llm": []}, "recipes.moe-gate-labels.full_targets.llm: "),
    (("builds", "moe", "experts"), [{"recipe": "a.b", "domian": "c"}, {}], "builds.moe.experts.0.domian: unknown key"),
    (("builds", "moe", "top_k"), 1, "builds.moe.top_k: "),
    (("profiles", "tiny", "datasets", "both-domains", "mix"), {"qmsum": -1}, "both-domains.mix.qmsum: "),
    (("profiles", "tiny", "memory", "precision"), "fp8", "profiles.tiny.memory.precision: "),
]
WRONG_TOGETHER = [
    (("profile",), "tinny", "profile: "),
    (("baselines", "base-moe", "base"), "builds/mo", "baselines.base-moe.base: "),
    (("recipes", "r1-llm-only", "data"), "tables", "recipes.r1-llm-only.data: "),
    (("recipes", "r2-vision-only", "base"), "runs/r3-two-stage/merged", "recipes.r2-vision-only.base: "),
    (("recipes", "r2-vision-only", "quantization"), "nf4", "recipes.r2-vision-only.quantization: "),
    (("builds", "moe", "top_k"), 7, "builds.moe.top_k: "),
    (("profiles", "two-gpus", "device", "count"), 1, "profiles.two-gpus.memory.placement: "),
]


@pytest.mark.parametrize("mistakes", [WRONG_ALONE, WRONG_TOGETHER])
def test_all_problems_are_reported_at_once_with_their_paths(mistakes: list[Any], tmp_path: Path) -> None:
    """First the values that are wrong alone; what depends on them can only be checked once they are right."""
    raw = copy.deepcopy(SMALL)
    for (*above, key), value, _ in mistakes:
        at(raw, tuple(above))[key] = value
    message = refusal(raw, tmp_path)
    assert [problem for _, _, problem in mistakes if problem not in message] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("profile: other", r"is not plain YAML: line \d, column 1: found duplicate key .profile."),
        ("[a, b]: x", "is not plain YAML: "),
        ("more: &a [*a]", r"is not plain YAML: line \d+: the anchor 'a' is refused"),
        ("more: " + "[" * 1000 + "]" * 1000, "is not plain YAML: "),
        ("2024: x", "2024: unknown key"),
        ("more: 2024-13-01", "more: unknown key"),
    ],
)
def test_yaml_that_is_no_json_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(SHIPPED.read_text(encoding="utf-8").replace("profile: tiny\n", f"profile: tiny\n{text}\n", 1))
    with pytest.raises(UserError, match=problem):
        load_params(path)


def test_an_anchor_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    text = SHIPPED.read_text(encoding="utf-8").replace("  r1-llm-only:\n", "  r1-llm-only: &r1\n", 1)
    line = text[: text.index("  r1-llm-only: &r1")].count("\n") + 1
    path.write_text(text.replace("  r2-vision-only:\n", "  r1-wide: {<<: *r1, epochs: 9}\n  r2-vision-only:\n", 1))
    with pytest.raises(UserError, match=rf"line {line}: the anchor 'r1' is refused"):
        load_params(path)
