import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import GPT2Config, GPT2LMHeadModel

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.params.schema import BuildParams, LoraParams
from stages.mixture.build import mixture_config
from stages.models.adapters import (
    apply_recipe,
    count_trainable,
    lora_config,
    part_of,
    trained_modules,
)
from stages.models.folders import GEOMETRIES_DIR
from stages.models.load import load_config, meta_model
from tests import ROOT
from tests.plans import recipe_of
from tools.plan import root_base, trainable_recipes

PARAMS = load_params(ROOT / "params.yaml")


def meta(base: str, build: BuildParams | None = None) -> torch.nn.Module:
    """base: a folder of the checkout, or a repository of the hub. build: a mixture of models like it."""
    warnings.simplefilter("ignore", FutureWarning)
    config = load_config(ROOT / base if base.startswith("data/") else GEOMETRIES_DIR / base)
    return meta_model(mixture_config(config, experts=len(build.experts), top_k=build.top_k) if build else config)


@cache
def counts(recipe: str, base: str) -> dict[str, int]:
    params, (_, build) = PARAMS.recipe(recipe), root_base(PARAMS, recipe)
    return count_trainable(apply_recipe(meta(base, build), params))


def recipes_and_bases() -> set[tuple[str, str]]:
    """Recipes with the bases that profiles give them; of those that train alike, one for each base."""
    found = {}
    for params in map(PARAMS.on, PARAMS.profiles):
        for recipe in trainable_recipes(params):
            source = params.base_source(root_base(params, recipe)[0])
            base, trains = source.partition(":")[2].partition("@")[0], params.recipe(recipe)
            alike = (trains.parts, trains.lora, trains.full_targets, root_base(params, recipe)[1], base)
            found[repr(alike)] = recipe, base
    return {*found.values()}


@pytest.mark.parametrize(("recipe", "base"), sorted(recipes_and_bases()))
def test_every_recipe_trains_what_it_says_on_every_base(recipe: str, base: str) -> None:
    parts = PARAMS.recipe(recipe).parts
    found = counts(recipe, base)
    for part in ("vision", "projector", "llm"):
        assert (found[part] > 0) == (part in parts.trained()), part
    assert found["total"] == found["vision"] + found["projector"] + found["llm"]


@pytest.mark.parametrize(
    ("recipe", "vision", "projector", "llm"),
    [
        ("r1-llm-only", 0, 0, 161_480_704),
        ("r2-vision-only", 631_183_360, 44_575_744, 0),
        ("r3-two-stage", 0, 0, 161_480_704),
        ("r4-joint", 41_943_040, 0, 161_480_704),
    ],
)
def test_counts_on_qwen2_vl_7b(recipe: str, vision: int, projector: int, llm: int) -> None:
    found = counts(recipe, "Qwen/Qwen2-VL-7B-Instruct")
    assert (found["vision"], found["projector"], found["llm"]) == (vision, projector, llm)


@pytest.mark.parametrize("other", ["q_proj", "all-linear"])
@pytest.mark.parametrize("wrong", ["query", "lm_head"])
def test_an_unknown_target_and_a_head_are_refused_with_the_known_ones(wrong: str, other: str) -> None:
    lora = LoraParams(rank=4, alpha=8, targets={"llm": (other, wrong)})
    with pytest.raises(UserError, match=rf"lora.targets.llm: '{wrong}' names no .*; the llm's end in .*q_proj"):
        lora_config(meta("Qwen/Qwen2-VL-2B-Instruct"), lora)
    with pytest.raises(UserError, match="has no vision"):
        apply_recipe(meta("data/tiny/qwen2"), recipe_of(vision="full"))


def test_an_adapter_cannot_start_as_more_of_a_weight_than_there_is() -> None:
    lora = LoraParams(rank=65, alpha=8, targets={"llm": ("all-linear",)}, init="pissa")
    with pytest.raises(UserError, match=r"lora.rank: 65, but pissa finds at most 64 directions in .*k_proj"):
        lora_config(meta("data/tiny/qwen2"), lora)
    lora_config(meta("data/tiny/qwen2"), replace(lora, rank=64))
    lora_config(meta("data/tiny/qwen2"), replace(lora, init="gaussian"))
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    lora = replace(lora, rank=2, targets={"llm": ("c_attn",)})
    lora_config(gpt2, lora)
    with pytest.raises(UserError, match=r"olora does not know weights with inputs first, as of .*c_attn; use pissa"):
        lora_config(gpt2, replace(lora, init="olora"))


MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def test_full_targets_train_these_modules_and_those_inside_them() -> None:
    model = apply_recipe(meta("data/tiny/qwen2"), recipe_of(llm="full", full_targets={"llm": MLP}))
    layers = range(load_config(ROOT / "data/tiny/qwen2").num_hidden_layers)
    assert trained_modules(model) == {f"model.layers.{layer}.{end}" for layer in layers for end in MLP}
    found = count_trainable(model)
    assert found["llm"] == found["total"] == sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)
    recipe = recipe_of(llm="full", full_targets={"llm": ("layers.1.mlp", "model.norm")})
    model = apply_recipe(meta("data/tiny/qwen2"), recipe)
    assert trained_modules(model) == {"model.norm", *(f"model.layers.1.{end}" for end in MLP)}


def test_parts_without_targets_are_trained_whole_beside_adapters() -> None:
    lora = LoraParams(rank=4, alpha=8, targets={"vision": ("attn.proj",)})
    recipe = recipe_of(
        vision="lora", projector="full", llm="full", lora=lora, full_targets={"llm": ("self_attn.o_proj",)}
    )
    model = apply_recipe(meta("data/tiny/qwen2-vl"), recipe)
    trained = trained_modules(model)
    whole = {name.rpartition(".")[0] for name, _ in meta("data/tiny/qwen2-vl").named_parameters()}
    assert {name for name in trained if part_of(f"{name}.") == "projector"} == {
        name for name in whole if part_of(f"{name}.") == "projector"
    }
    assert {name.split(".", 4)[-1] for name in trained if part_of(name) == "llm"} == {"self_attn.o_proj"}


@pytest.mark.parametrize("target", ["proj", "layers.99.mlp", ""])
def test_a_target_that_names_no_module_is_refused_with_what_there_is(target: str) -> None:
    reason = rf"full_targets.llm: '{target}' names no module with weights; the llm's end in .*down_proj, embed_tokens"
    with pytest.raises(UserError, match=reason):
        apply_recipe(meta("data/tiny/qwen2"), recipe_of(llm="full", full_targets={"llm": ("mlp.up_proj", target)}))


def test_trained_weights_are_kept_in_fp32() -> None:
    model = meta("data/tiny/qwen2-vl").to(torch.bfloat16)
    adapted = apply_recipe(model, PARAMS.recipe("r4-joint"))
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in adapted.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    layers = [layer for layer in adapted.modules() if isinstance(layer, LoraLayer)]
    assert layers
    assert not any(layer.cast_input_dtype_enabled for layer in layers), "inputs would go to fp32 and back"
