import copy
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.core.params.schema import made_by
from stages.kit.planning.plan import resolve_plan
from tests.core.params.files import SHIPPED_RAW, load, refusal

R1, R2, TINY = "recipes.r1-llm-only", "recipes.r2-vision-only", "profiles.tiny"
TWO_EXPERTS = [{"recipe": "r1-llm-only", "domain": "tables"}, {"recipe": "r2-vision-only", "domain": "prices"}]


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The shipped file with other values at dotted paths, where there is more:

    two datasets and their mix; a build of two recipes, with a recipe and a baseline that start from it; a
    recipe that labels its routers, and one that goes on from there.
    """
    raw: dict[str, Any] = copy.deepcopy(SHIPPED_RAW)
    for name in ("one", "other"):
        raw["profiles"]["tiny"]["datasets"][name] = {"task": "moe", "source": f"folder:data/{name}"}
    raw["profiles"]["tiny"]["datasets"]["both"] = {"task": "moe", "source": "mix", "mix": {"one": 4, "other": None}}
    raw["builds"]["mixture"] = {"task": "detection", "base": "bases/vlm", "experts": copy.deepcopy(TWO_EXPERTS)}
    r1 = raw["recipes"]["r1-llm-only"]
    gate = {**r1, "parts": {"llm": "full"}, "full_targets": {"llm": ["mlp.gate"]}, "lora": None, "quantization": "none"}
    raw["recipes"] |= {
        "after": {**copy.deepcopy(r1), "base": "builds/mixture"},
        "labels": {**copy.deepcopy(gate), "base": "builds/mixture", "loss": "router-labels"},
        "gate": {**gate, "base": "runs/labels/merged"},
    }
    raw["baselines"]["base-mixture"] = {**raw["baselines"]["base-vlm"], "base": "builds/mixture"}
    for path, value in changes.items():
        *above, key = path.split(".")
        here: Any = raw
        for step in above:
            here = here[int(step)] if isinstance(here, list) else here[step]
        here[key] = value
    return raw


def test_what_is_changed_here_is_right_unchanged(tmp_path: Any) -> None:
    params = load(changed({}), tmp_path)
    assert params.subject("base-mixture").base == params.subject("after").base == "builds/mixture"
    assert (params.recipe("after").base_build(), params.recipe("after").base_recipe()) == ("mixture", None)
    assert params.recipe("r3-two-stage").base_build() is None
    with pytest.raises(UserError, match=r"no build is called 'mixtur' \(did you mean 'mixture'\?\)"):
        params.build("mixtur")
    bases = [params.recipe(name).base for name in ("after", "gate", "r1-llm-only")]
    assert [made_by(base) for base in bases] == ["build@mixture", "merge@labels", "base@vlm"]
    assert params.domains("labels") == params.domains("gate") == ("tables", "prices")
    assert params.domains("r1-llm-only") == ()
    assert resolve_plan(params, "labels", train_samples=16).domains == ("tables", "prices")
    assert resolve_plan(params, "gate", train_samples=16).domains == ()
    assert params.recipe("labels").full_targets == {"llm": ("mlp.gate",)}


NO_DOMAINS = [{"recipe": "r1-llm-only"}, {"recipe": "r2-vision-only"}]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"profile": "tinny"}, "profile: no profile is called 'tinny' (did you mean 'tiny'?)"),
        ({"scored": "selection"}, "scored: is selection, but data.selection sets no samples aside; e.g. 0.15"),
        ({f"{R1}.base": "bases/vml"}, f"{R1}.base: no profile has a base 'vml'"),
        ({f"{R1}.base": "runs/r3-stage/merged"}, f"{R1}.base: no recipe is called 'r3-stage'"),
        ({f"{R1}.base": "builds/mixtur"}, f"{R1}.base: no build is called 'mixtur' (did you mean 'mixture'?)"),
        ({"baselines.base-vlm.base": "bases/other"}, "baselines.base-vlm.base: no profile has a base 'other'"),
        (
            {"builds.mixture.base": "bases/vml"},
            "builds.mixture.base: no profile has a base 'vml' (did you mean 'vlm'?)",
        ),
        ({f"{R1}.data": "tables"}, f"{R1}.data: no profile has a dataset 'tables'"),
        ({f"{R1}.base": "runs/r1-llm-only/merged"}, f"{R1}.base: forms a cycle: r1-llm-only -> r1-llm-only"),
        (
            {"recipes.r2-vision-only.base": "runs/r3-two-stage/merged"},
            "recipes.r2-vision-only.base: forms a cycle: r2-vision-only -> r3-two-stage -> r2-vision-only",
        ),
        ({"slurm.cpu.options": ["--output=/etc/x"]}, "slurm.cpu.options: --output=/etc/x belongs to the launcher"),
        ({"slurm.gpu.options": ["--qos=high", "--wra=x"]}, "slurm.gpu.options: --wra=x belongs to the launcher"),
        # Of a recipe
        ({f"{R1}.parts": {}}, f"{R1}.parts: every part is frozen"),
        ({f"{R1}.lora": None}, f"{R1}.lora: missing, though parts ask for it"),
        ({f"{R1}.parts.vision": "lora"}, f"{R1}.lora.targets.vision: missing, though parts.vision is lora"),
        ({"recipes.r4-joint.parts.vision": "frozen"}, "lora.targets.vision: set, though parts.vision is frozen"),
        ({f"{R2}.quantization": "nf4"}, f"{R2}.quantization: nf4 weights cannot be trained in full"),
        ({f"{R1}.part_learning_rates": {"vision": 1.0}}, f"{R1}.part_learning_rates.vision: set, though"),
        (
            {"recipes.labels.full_targets": {"llm": ["mlp.gate"], "vision": ["attn"]}},
            "recipes.labels.full_targets.vision: set, though parts.vision is frozen",
        ),
        # Of a profile
        ({f"{TINY}.memory.attn": "flash_attention_2"}, f"{TINY}.memory: flash attention and 8-bit optimizers need"),
        ({f"{TINY}.memory.placement": "balanced"}, f"{TINY}.memory.placement: balanced needs several CUDA devices"),
        ({f"{TINY}.device.count": 2}, f"{TINY}.memory.placement: single with device.count 2"),
        (
            {f"{TINY}.memory.placement": "sharded", f"{TINY}.memory.optimizer": "paged_adamw_8bit"},
            f"{TINY}.memory.optimizer: an 8-bit optimizer cannot be sharded; take adamw_torch_fused",
        ),
        (
            {f"{TINY}.memory.placement": "sharded", f"{TINY}.memory.quantization": None},
            f"{TINY}.memory.quantization: nf4 weights cannot be sharded; set it to none, or take placement ddp",
        ),
        ({f"{TINY}.images.min_pixels": 10**9}, f"{TINY}.images.min_pixels: larger than max_pixels"),
        ({f"{TINY}.evaluation.max_length": 1}, f"{TINY}.evaluation.max_length: not more than max_new_tokens"),
        (
            {f"{TINY}.evaluation.batch_size": "auto", f"{TINY}.device.kind": "cuda"},
            f"{TINY}.evaluation.batch_size: auto needs device.memory_gb",
        ),
        # Of a mix
        ({f"{TINY}.datasets.both.mix": None}, "both.mix: missing, though the source is mix"),
        ({f"{TINY}.datasets.both.source": "folder:x"}, "both.mix: set, though the source is folder:x"),
        ({f"{TINY}.datasets.both.limit": {"train": 3}}, "both.limit: set, though mix says how much of each dataset"),
        ({f"{TINY}.datasets.both.mix": {"one": 0}}, "both.mix: takes no training sample of any dataset"),
        ({f"{TINY}.datasets.both.mix": {"ohter": 3}}, "both.mix.ohter: the profile has no such dataset (did you mean"),
        ({f"{TINY}.datasets.both.mix": {"both": 3}}, "both.mix.both: is a mix itself"),
        ({f"{TINY}.datasets.both.mix": {"nutrition-tables": 3}}, "has the task detection, this one moe"),
        # Of a build
        ({"builds.mixture.experts.1.recipe": "r1"}, "builds.mixture.experts: no recipe is called 'r1'"),
        ({"builds.mixture.experts.1.recipe": "r1-llm-only"}, "mixture.experts: r1-llm-only is named more than once"),
        ({"builds.mixture.experts.1.domain": "tables"}, "builds.mixture.experts: tables is named more than once"),
        ({"builds.mixture.experts.1.domain": None}, "mixture.experts: some have a `domain` and others have none"),
        ({"builds.mixture.experts.1.recipe": "after"}, "after comes from builds/mixture, not from bases/vlm"),
        ({"builds.mixture.experts.1.recipe": "after"}, "after.base: forms a cycle: after -> builds/mixture -> after"),
        ({"builds.mixture.top_k": 3}, "builds.mixture.top_k: 3, though there are 2 experts"),
        ({"builds.mixture.task": "amr"}, "mixture.experts: r1-llm-only has the task detection, not amr"),
        # Of a recipe that labels routers
        ({"builds.mixture.experts": NO_DOMAINS}, "labels.base: goes back to builds/mixture, whose experts have no"),
        ({"recipes.labels.base": "runs/r1-llm-only/merged"}, "labels.base: goes back to bases/vlm, a dense model"),
        ({"recipes.labels.full_targets": {}}, "labels.full_targets: loss router-labels trains routers and nothing"),
        ({"recipes.labels.full_targets.llm": ["mlp.gate", "norm"]}, "labels.full_targets: loss router-labels trains"),
        ({"recipes.labels.parts.vision": "full"}, "labels.full_targets: loss router-labels trains routers"),
        # Of predictions
        (
            {"predictions.example-sentences.recipe": "amr-prt"},
            "example-sentences.recipe: no recipe is called 'amr-prt'",
        ),
        (
            {f"{TINY}.evaluation.engine": "vllm", "models": {"keep_merged": False}},
            f"{TINY}.evaluation.engine: vllm reads merged models; models.keep_merged leaves none",
        ),
        ({"predictions.example-sentences.recipe": "r1-llm-only"}, "example-sentences.task: amr, though recipe"),
        *(
            ({"predictions.example-sentences.inputs": inputs}, "example-sentences.inputs: string should match")
            for inputs in ("/srv/x.txt", "https://x.org/x.txt", "data/https://x.org/x.txt", "data/../x.txt", "data", "")
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], problem: str, tmp_path: Any) -> None:
    assert problem in refusal(changed(changes), tmp_path)


def test_a_cycle_through_several_builds_is_found(tmp_path: Any) -> None:
    other = {"task": "detection", "base": "bases/vlm", "experts": [{"recipe": "after"}, {"recipe": "r1-llm-only"}]}
    raw = changed({"builds.other": other, f"{R2}.base": "builds/other"})
    message = refusal(raw, tmp_path)
    assert (
        "recipes.after.base: forms a cycle: after -> builds/mixture -> r2-vision-only -> builds/other -> after"
        in message
    )
