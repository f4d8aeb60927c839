"""params.yaml: the shipped file, and every mistake refused under its path."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from dvc.utils.serialize import modify_yaml
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params import cross_checks, load_params
from stages.core.params.schema import OPTIMIZERS, DeviceParams, Optimizer, Params, made_by
from stages.planning.resolve import resolve_plan
from tests import ROOT
from tests.damage import at

SHIPPED = ROOT / "params.yaml"
RAW: dict[str, Any] = YAML(typ="safe").load(SHIPPED)
R1, R2, TINY = "recipes.r1-llm-only", "recipes.r2-vision-only", "profiles.tiny"
DATASETS, BUILD, LABELS = f"{TINY}.datasets", "builds.moe", "recipes.moe-gate-labels"

EXPORT = {"recipe": "chat-lora", "task": "chat", "data": "conversations", "format": "gguf", "quantization": "q8_0"}


def load(raw: Any, tmp_path: Path) -> Params:
    path = tmp_path / "params.yaml"
    path.write_text(json.dumps(raw), encoding="utf-8")  # JSON is YAML too
    return load_params(path)


def refusal(raw: Any, tmp_path: Path) -> str:
    with pytest.raises(UserError) as error:
        load(raw, tmp_path)
    return error.value.message


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The shipped file with other values at dotted paths."""
    raw: dict[str, Any] = copy.deepcopy(RAW)
    for path, value in changes.items():
        *above, key = path.split(".")
        at(raw, tuple(int(step) if step.isdigit() else step for step in above))[key] = value
    return raw


def test_every_shipped_hub_source_is_pinned_and_licensed_and_every_profile_is_documented() -> None:
    params, page = load_params(SHIPPED), (ROOT / "docs/servers.md").read_text()
    sources = [source for profile in params.profiles.values() for source in profile.bases.values()]
    sources += [dataset.source for profile in params.profiles.values() for dataset in profile.datasets.values()]
    hub = [source for source in sources if source.startswith("hub:")]
    assert [source for source in hub if not re.fullmatch(r"hub:[^@]+@[0-9a-f]{8,40}", source)] == []
    known = [*hub, "folder:data/tiny/qwen2-vl"]
    assert [source for source in known if params.license_of(source.partition("@")[0]) is None] == []
    assert [name for name in params.profiles if f"| `{name}` |" not in page] == []


def test_dvc_writes_a_variant_that_is_read_again(tmp_path: Path) -> None:
    """`-S` writes the whole file, and a value in flow style loses its quotes."""
    path = tmp_path / "params.yaml"
    path.write_bytes(SHIPPED.read_bytes())
    with modify_yaml(str(path)) as written:
        written["seed"] = 7
    assert load_params(path) == replace(load_params(SHIPPED), seed=7)


@pytest.mark.parametrize(
    ("gpu", "gpus", "device", "precision", "placement"),
    [
        (24, None, DeviceParams(kind="cuda", memory_gb=24), "bf16", "single"),
        ("48 GB", 2, DeviceParams(kind="cuda", memory_gb=48, count=2), "bf16", "ddp"),
        ("RTX 4090", None, DeviceParams(kind="cuda", card="RTX 4090"), "bf16", "single"),
        ("Quadro RTX 6000", 4, DeviceParams(kind="cuda", card="Quadro RTX 6000", count=4), "fp16", "ddp"),
    ],
)
def test_a_gpu_by_size_or_name_becomes_the_device_and_decides_what_is_auto(
    gpu: float | str, gpus: int | None, device: DeviceParams, precision: str, placement: str
) -> None:
    params = replace(load_params(SHIPPED).on("qwen25-7b"), gpu=gpu, gpus=gpus)
    assert list(cross_checks(params)) == []
    assert params.active.device == device
    assert (params.active.memory.precision, params.active.memory.placement) == (precision, placement)


def test_the_profiles_own_device_and_settings_hold_unless_they_are_auto() -> None:
    params = load_params(SHIPPED)
    assert params.active.device == DeviceParams(kind="cpu")
    assert (params.active.memory.precision, params.active.memory.placement) == ("fp32", "single")
    own = replace(
        params.active,
        device=DeviceParams(kind="cuda", count=2, memory_gb=80, card="H100"),
        memory=replace(params.active.memory, precision="fp16", placement="sharded", quantization="none"),
    )
    params = replace(params, profiles={"tiny": own})
    assert params.active == own
    assert replace(params, gpu=24).active.device == DeviceParams(kind="cuda", count=2, memory_gb=24)


def test_what_recipes_and_builds_are_made_of_is_found() -> None:
    params = load_params(SHIPPED)
    bases = [params.recipe(name).base for name in ("moe-gate-labels", "moe-gate", "r1-llm-only")]
    assert [made_by(base) for base in bases] == ["build@moe", "merge@moe-gate-labels", "base@vlm"]
    assert (
        params.subject("base-moe").base == params.root("moe-gate-labels") == params.root("moe-finetune") == "builds/moe"
    )
    assert params.domains("moe-gate-labels") == params.domains("moe-gate") == ("truthfulqa", "qmsum")
    assert params.domains("r1-llm-only") == ()
    assert resolve_plan(params, "moe-gate-labels", train_samples=16).domains == ("truthfulqa", "qmsum")
    assert resolve_plan(params, "moe-gate", train_samples=16).domains == ()


@pytest.mark.parametrize(
    ("find", "problem"),
    [
        (lambda params: params.recipe("r1-llm"), r"no recipe is called 'r1-llm' \(did you mean 'r1-llm-only'"),
        (lambda params: params.build("mo"), r"no build is called 'mo' \(did you mean 'moe'"),
        (lambda params: params.base_source("text"), "no base of profile tiny is called 'text'"),
        (lambda params: params.prediction("x"), "no entry of predictions is called 'x'; there are: example-sentences"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(find: Callable[[Params], object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        find(load_params(SHIPPED))


WRONG_ALONE = {
    "tracking.to": "yes",
    "tracking.project": "a\nb",
    "recipes.r4-joint.base": f"bases/{'x' * 101}",
    "more": {},
    f"{R1}.lora.rank": 0,
    f"{R1}.max_length": 2**31 - 1,
    f"{R1}.epochs": 2**31 - 1,
    f"{R1}.neftune_alpha": 0,
    f"{R1}.optimizer": "lion",
    f"{R1}.warmup_steps": -1,
    "slurm.gpu": "--hold",
    f"{R1}.epoch": 3,
    f"{R2}.learning_rate": "fast",
    "recipes.r3-two-stage.base": "runs/r2-vision-only",
    "recipes.moe-gate-labels.full_targets.llm": [],
    "builds.moe.experts.0.domian": "c",
    "builds.moe.top_k": 1,
    f"{DATASETS}.both-domains.mix.qmsum": -1,
    f"{TINY}.memory.precision": "fp8",
    "predictions.example-sentences.inputs": "data/../x.txt",
    "baselines.base-vlm.base": "vlm",
    f"{DATASETS}.visempar.source": "data/visempar",
    f"{TINY}.bases.vlm": "data/vlm",
}


def test_every_number_has_limits_and_those_of_a_step_are_far_below_2_to_the_31() -> None:
    def numbers(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        if isinstance(schema, dict):
            if schema.get("type") in ("integer", "number"):
                yield path, schema
            for key, inner in schema.items():
                yield from numbers(inner, f"{path}.{key}")
        elif isinstance(schema, list):
            for inner in schema:
                yield from numbers(inner, path)

    found = dict(numbers(TypeAdapter(Params).json_schema()))
    limits = {path: each.get("maximum", each.get("exclusiveMaximum")) for path, each in found.items()}
    assert len(limits) > 30
    assert [path for path, limit in limits.items() if limit is None] == []
    assert [path for path, each in found.items() if each["type"] == "integer" and limits[path] > 2**32] == []


def test_all_values_that_are_wrong_alone_are_reported_at_once_with_the_nearest_key(tmp_path: Path) -> None:
    message = refusal(changed(WRONG_ALONE), tmp_path)
    assert [path for path in WRONG_ALONE if f"\n  {path}: " not in message] == []
    assert "sentences.inputs: expected a file below data/, found 'data/../x.txt'" in message
    assert "^" not in message, "no regular expression"
    assert f"{R1}.epoch: unknown key (did you mean 'epochs'?)" in message


def test_of_very_many_problems_the_first_are_shown(tmp_path: Path) -> None:
    lines = refusal(RAW | {f"unknown{n}": 1 for n in range(1200)}, tmp_path).splitlines()
    assert lines[0].endswith("params.yaml has 1,200 problems:")
    assert len(lines) == 1 + 50 + 1
    assert lines[-1] == "  and 1,150 more"


NO_DOMAINS = [{"recipe": "moe-expert-truthfulqa"}, {"recipe": "moe-expert-qmsum"}]
SHARDED = {f"{TINY}.memory.placement": "sharded"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"profile": "tinny"}, "profile: no profile is called 'tinny' (did you mean 'tiny'?)"),
        ({f"{R1}.base": "bases/vml"}, f"{R1}.base: no profile has a base 'vml' (did you mean 'vlm'?)"),
        ({f"{R1}.base": "runs/r1-lm/merged"}, f"{R1}.base: no recipe is called 'r1-lm'"),
        ({f"{BUILD}.base": "bases/vml"}, f"{BUILD}.base: "),
        ({f"{R1}.data": "tables"}, f"{R1}.data: no profile has a dataset 'tables'"),
        ({"gpu": 4090}, "gpu: expected a size in GB, or a card by its whole name, e.g. 'RTX 4090', found 4090"),
        ({"gpu": "24576"}, "gpu: expected a size in GB, or a card"),
        ({"gpu": "0GB"}, "gpu: input should be greater than 0"),
        ({f"{R1}.base": "runs/r1-llm-only/merged"}, f"{R1}.base: forms a cycle: r1-llm-only -> r1-llm-only"),
        (
            {f"{R2}.base": "runs/r3-two-stage/merged"},
            f"{R2}.base: forms a cycle: r2-vision-only -> r3-two-stage -> r2-vision-only",
        ),
        # Recipes
        ({f"{R1}.parts": {}}, f"{R1}.parts: "),
        ({f"{R1}.lora": None}, f"{R1}.lora: missing"),
        ({f"{R2}.lora": {"rank": 4, "alpha": 8, "targets": {}, "dora": True}}, f"{R2}.lora: set, though no part is"),
        ({f"{R1}.lora.init": "pissa"}, f"{R1}.lora.init: pissa with nf4"),
        ({f"{R1}.lora.init": "olora"}, f"{R1}.lora.init: olora with nf4"),
        ({f"{R1}.lora.init": "eva"}, f"{R1}.lora.init: "),
        ({f"{R1}.lora.loraplus_lr_ratio": 0}, f"{R1}.lora.loraplus_lr_ratio: "),
        ({f"{R1}.lora.bias": "all"}, f"{R1}.lora.bias: unknown key"),
        ({f"{R1}.parts.vision": "lora"}, f"{R1}.lora.targets.vision: missing"),
        ({"recipes.r4-joint.parts.vision": "frozen"}, "recipes.r4-joint.lora.targets.vision: set"),
        ({f"{R2}.quantization": "nf4"}, f"{R2}.quantization: "),
        ({f"{R1}.part_learning_rates": {"vision": 1.0}}, f"{R1}.part_learning_rates.vision: set"),
        ({f"{LABELS}.full_targets.vision": ["attn"]}, f"{LABELS}.full_targets.vision: set"),
        ({f"{R1}.warmup_steps": 100, f"{R1}.warmup_ratio": 0.1}, f"{R1}.warmup_steps: set, though warmup_ratio is"),
        ({f"{R1}.lr_schedule": "cosine_with_min_lr"}, f"{R1}.lr_schedule_options.min_lr_ratio: missing, though lr_sch"),
        (
            {f"{R1}.lr_schedule": "polynomial", f"{R1}.lr_schedule_options": {"min_lr_ratio": 0}},
            f"{R1}.lr_schedule_options.power: missing, though lr_schedule is polynomial",
        ),
        ({f"{R1}.lr_schedule_options": {"min_lr_ratio": 1}}, f"{R1}.lr_schedule_options.min_lr_ratio: "),
        ({f"{R1}.lr_schedule_options": {"decay_ratio": 1.5}}, f"{R1}.lr_schedule_options.decay_ratio: "),
        ({f"{R1}.lr_schedule_options": {"power": 2}}, f"{R1}.lr_schedule_options.power: set, though lr_schedule is co"),
        ({f"{R1}.optimizer": "adamw_8bit"}, f"{R1}.optimizer: adamw_8bit needs device.kind: cuda"),
        ({**SHARDED, f"{R1}.optimizer": "muon"}, f"{R1}.optimizer: muon cannot be sharded"),
        ({f"{LABELS}.neftune_alpha": 5}, f"{LABELS}.neftune_alpha: set, though loss router-labels"),
        ({f"{R1}.validation": {"every_steps": 0}}, f"{R1}.validation.every_steps: "),
        ({f"{R1}.epochs": 1.5}, f"{R1}.epochs: input should be a valid integer, found 1.5"),
        ({"profiles.tiny.device.card": "H100"}, "profiles.tiny.device.card: H100, though kind is cpu"),
        ({f"{R1}.keep": "best", f"{R1}.validation": None}, f"{R1}.keep: chooses by validations"),
        (
            {f"{R1}.early_stopping": {"patience": 3}, f"{R1}.validation": {"by": "score", "score_samples": 0}},
            f"{R1}.validation.score_samples: 0",
        ),
        (
            {
                f"{R1}.keep": "best",
                f"{R1}.validation": {"by": "score"},
                f"{TINY}.validation_limit": {"samples": 4, "score_samples": 0},
            },
            f"{TINY}.validation_limit.score_samples: 0, though {R1}.keep",
        ),
        ({f"{R1}.keep": "best"}, f"{R1}.keep: chooses weights by the split val"),
        ({f"{R1}.early_stopping": {"patience": 3}}, f"{R1}.early_stopping: chooses weights by the split val"),
        (
            {f"{R1}.keep": "best", "data.selection": 0.15, "scored": "selection"},
            f"{R1}.keep: chooses weights by the split selection",
        ),
        # Questions
        ({"compare.against": {"r1-llm": "r4-joint"}}, "compare.against.r1-llm: no recipe is called 'r1-llm'"),
        ({"compare.against": {"r4-joint": "r1-llm"}}, "compare.against.r4-joint: no recipe is called 'r1-llm'"),
        ({"compare.against": {"r4-joint": "r4-joint"}}, "compare.against.r4-joint: r4-joint, which is not another"),
        ({"compare.against": {"chat-lora": "r4-joint"}}, "compare.against.chat-lora: r4-joint, which is not another"),
        # Profiles
        ({f"{TINY}.memory.attn": "flash_attention_2"}, f"{TINY}.memory.attn: flash_attention_2 needs"),
        ({f"{TINY}.memory.optimizer": "adamw_8bit"}, f"{TINY}.memory.optimizer: adamw_8bit needs device.kind: cuda"),
        ({f"{TINY}.memory.placement": "balanced"}, f"{TINY}.memory.placement: "),
        (
            {f"{TINY}.device.count": 2, f"{TINY}.memory.placement": "single"},
            f"{TINY}.memory.placement: single with 2 device(s)",
        ),
        ({f"{TINY}.memory.placement": "ddp"}, f"{TINY}.memory.placement: ddp with 1 device(s); auto goes with any"),
        (
            {**SHARDED, f"{TINY}.memory.optimizer": "adamw_8bit"},
            f"{TINY}.memory.optimizer: adamw_8bit cannot be sharded",
        ),
        ({**SHARDED, f"{TINY}.memory.quantization": None}, f"{TINY}.memory.quantization: "),
        ({f"{TINY}.images.min_pixels": 10**9}, f"{TINY}.images.min_pixels: "),
        ({f"{TINY}.evaluation.max_length": 1}, f"{TINY}.evaluation.max_length: "),
        # The GPU
        ({"gpu": 24}, "gpu: 24, though profile tiny runs on a CPU; on a GPU run: qwen2-vl-2b, "),
        ({"gpus": 2}, "gpus: 2, though profile tiny runs on a CPU"),
        ({f"{TINY}.device.kind": "cuda"}, "gpu: missing, though profile tiny runs on a GPU; give its size in GB or"),
        (
            {"profile": "moe"},
            "gpu: missing, though profile moe runs on a GPU; give its size in GB or its name: -S gpu=24, ",
        ),
        ({"profile": "moe"}, "(make plan: GPU=24)"),
        (
            {"profile": "moe", "gpu": "NVIDIA T4", "profiles.moe.memory.precision": "bf16"},
            "profiles.moe.memory.precision: bf16, which NVIDIA T4 does not compute in; set it to auto or fp16",
        ),
        ({f"{TINY}.evaluation.engine": "vllm", "models": {"keep_merged": False}}, f"{TINY}.evaluation.engine: "),
        # Mixes
        ({f"{DATASETS}.both-domains.mix": None}, f"{DATASETS}.both-domains.mix: missing"),
        ({f"{DATASETS}.both-domains.source": "folder:x"}, f"{DATASETS}.both-domains.mix: set"),
        ({f"{DATASETS}.both-domains.limit": {"train": 3}}, f"{DATASETS}.both-domains.limit: set"),
        (
            {f"{DATASETS}.visempar.limit": {"test": 3}},
            f"{DATASETS}.visempar.limit.test: 3, though splits.test names no files",
        ),
        ({f"{DATASETS}.both-domains.splits": {"test": "*.txt"}}, f"{DATASETS}.both-domains.splits: not for a mix"),
        ({f"{DATASETS}.visempar.splits": {"tset": "*.txt"}}, "splits.tset: unknown key (did you mean 'test'?)"),
        ({"scored": "test"}, "scored: is test, but no dataset of profiles.tiny has files below splits.test"),
        (
            {f"{DATASETS}.both-domains.mix": {"qmsm": 3}},
            "both-domains.mix.qmsm: the profile has no such dataset (did you mean",
        ),
        (
            {f"{DATASETS}.qmsum.repeat": {"*": 3}},
            f"{DATASETS}.both-domains.mix.qmsum: repeats samples itself; let the mix repeat them: {{qmsum/*: 3}}",
        ),
        ({f"{DATASETS}.visempar.repeat": {"*": 1}}, f"{DATASETS}.visempar.repeat.'*': input should be"),
        ({f"{DATASETS}.both-domains.mix": {"nutrition-tables": 3}}, "has the task detection, this one moe"),
        # Builds
        ({f"{BUILD}.experts.1.recipe": "r1"}, f"{BUILD}.experts: no recipe is called 'r1'"),
        (
            {f"{BUILD}.experts.1.recipe": "moe-expert-truthfulqa"},
            "experts: moe-expert-truthfulqa is named more than once",
        ),
        ({f"{BUILD}.experts.1.domain": None}, f"{BUILD}.experts: some have a `domain`"),
        (
            {f"{BUILD}.experts.1.recipe": "moe-gate-labels"},
            "moe-gate-labels comes from builds/moe, not from bases/dense",
        ),
        (
            {f"{BUILD}.experts.1.recipe": "moe-gate-labels"},
            f"{LABELS}.base: forms a cycle: moe-gate-labels -> builds/moe -> moe-gate-labels",
        ),
        ({f"{BUILD}.top_k": 3}, f"{BUILD}.top_k: 3, though there are 2 experts"),
        ({f"{BUILD}.task": "amr"}, f"{BUILD}.experts: moe-expert-truthfulqa has the task moe, not amr"),
        # Router labels
        ({f"{BUILD}.experts": NO_DOMAINS}, f"{LABELS}.base: goes back to builds/moe"),
        ({f"{LABELS}.full_targets": {}}, f"{LABELS}.full_targets: "),
        ({f"{LABELS}.full_targets.llm": ["mlp.gate", "norm"]}, f"{LABELS}.full_targets: "),
        # Predictions
        ({"predictions.example-sentences.recipe": "amr-prt"}, "sentences.recipe: no recipe is called 'amr-prt'"),
        ({"predictions.example-sentences.recipe": "r1-llm-only"}, "example-sentences.task: amr"),
        ({"guards": {"qmsum": {"source": "folder:x"}}}, "guards.qmsum: is the name of a dataset of tiny too"),
        ({"exports": {"chat-lora": EXPORT}}, "exports.chat-lora: is the name of a recipe"),
        ({"exports": {"x": EXPORT | {"data": "visempar"}}}, "exports.x.data: visempar, though recipe chat-lora has"),
        ({"exports": {"x": EXPORT | {"recipe": "chat-lara"}}}, "exports.x.recipe: no recipe is called 'chat-lara'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem in refusal(changed(changes), tmp_path)


@pytest.mark.parametrize("changes", [{f"{R1}.lora.init": "pissa"}, {f"{R2}.quantization": "nf4"}])
def test_a_recipe_is_checked_as_the_profile_leaves_it(changes: dict[str, Any], tmp_path: Path) -> None:
    assert "nf4" in refusal(changed(changes), tmp_path)
    unquantized = load(changed({**changes, f"{TINY}.memory.quantization": "none"}), tmp_path)
    names = [path.split(".")[1] for path in changes]
    plans = [resolve_plan(unquantized, name, train_samples=64) for name in names]
    assert [(plan.quantization, plan.may_quantize) for plan in plans] == [("none", False)]
    assert resolve_plan(unquantized, "r3-two-stage", train_samples=64).may_quantize


def test_a_missing_file_names_the_folder_to_run_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing; run from the top"):
        load_params(tmp_path / "params.yaml")


def test_every_optimizer_has_its_row_of_properties() -> None:
    assert tuple(OPTIMIZERS) == get_args(Optimizer)


def test_changes_are_merged_as_those_of_dvc_and_whole_numbers_may_be_written_as_floats() -> None:
    lora = f"{R1}.lora={{rank: 8, targets: {{llm: [all-linear]}}}}"
    settings = (load_params(SHIPPED, changes=changes) for changes in ((), (lora, f"{R1}.epochs=2.0")))
    before, after = (params.recipes["r1-llm-only"] for params in settings)
    assert before.lora is not None
    assert after.lora == replace(before.lora, rank=8, targets=before.lora.targets | {"llm": ("all-linear",)})
    assert (after.epochs, type(after.epochs)) == (2, int)
    assert load_params(SHIPPED, changes=["licenses={}"]) == load_params(SHIPPED)
