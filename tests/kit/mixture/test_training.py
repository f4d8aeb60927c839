"""A mixture is trained, saved and put back together like any other model."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, LoraParams, PartsParams
from stages.kit.mixture.merge import merge_experts
from stages.kit.models.load import load_config, load_model, meta_model
from stages.kit.models.parts import apply_recipe, count_trainable, part_of, trained_modules
from stages.kit.models.trained import load_trained, merge_trained, save_trained
from tests.kit.mixture.dense import save_base, save_expert

CPU = DeviceParams(kind="cpu")
FULL = PartsParams(llm="full")


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    base_dir = save_base(made / "base")
    experts = {name: save_expert(made / name, base_dir, seed=seed) for seed, name in enumerate("ab", 1)}
    (made / "moe").mkdir()
    torch.manual_seed(0)
    merge_experts(base_dir, experts, made / "moe", top_k=2, router=torch.randn(2, 2, 32))
    return made / "moe"


def load(folder: Path) -> torch.nn.Module:
    return load_model(folder, device=CPU, precision="fp32")


def test_all_of_a_mixture_is_trained_but_the_shared_expert_that_is_nothing(mixture_dir: Path) -> None:
    model = apply_recipe(load(mixture_dir), FULL, None)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".mlp.shared_expert" in name} != set()
    assert {part_of(name) for name, _ in model.named_parameters()} == {"llm"}
    assert {"model.layers.0.mlp.gate", "model.layers.0.mlp.experts"} <= trained_modules(model)
    planned = count_trainable(apply_recipe(meta_model(load_config(mixture_dir)), FULL, None))
    assert asdict(planned) == asdict(count_trainable(model))


def test_what_is_frozen_there_would_get_no_gradient(mixture_dir: Path) -> None:
    model = load(mixture_dir)
    tokens = torch.arange(3, 40)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) == (".mlp.shared_expert" not in name), name


def test_a_shared_expert_of_another_mixture_is_trained(mixture_dir: Path) -> None:
    config = load_config(mixture_dir)
    config.neutral_shared_expert = False
    assert all(parameter.requires_grad for parameter in apply_recipe(meta_model(config), FULL, None).parameters())


def test_lora_does_not_reach_the_shared_expert_that_is_nothing(mixture_dir: Path) -> None:
    lora = LoraParams(rank=2, alpha=4, targets={"llm": ("q_proj",)})
    model = apply_recipe(load(mixture_dir), PartsParams(llm="lora"), lora)
    assert trained_modules(model) == {f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)}
    lora = LoraParams(rank=2, alpha=4, targets={"llm": ("up_proj",)})
    with pytest.raises(UserError, match=r"lora.targets.llm: 'up_proj' names no linear layer"):
        apply_recipe(load(mixture_dir), PartsParams(llm="lora"), lora)


def test_a_gate_alone_is_trained_where_it_is_named(mixture_dir: Path) -> None:
    model = apply_recipe(load(mixture_dir), FULL, None, {"llm": ("mlp.gate",)})
    assert trained_modules(model) == {f"model.layers.{layer}.mlp.gate" for layer in range(2)}
    assert count_trainable(model).llm == 2 * 2 * 32
    planned = apply_recipe(meta_model(load_config(mixture_dir)), FULL, None, {"llm": ("mlp.gate",)})
    assert asdict(count_trainable(planned)) == asdict(count_trainable(model))


def test_the_shared_expert_that_is_nothing_cannot_be_named(mixture_dir: Path) -> None:
    for target in ("shared_expert", "gate_proj", "shared_expert_gate"):
        with pytest.raises(UserError, match=rf"full_targets.llm: '{target}' names no module with weights; .* gate, "):
            apply_recipe(load(mixture_dir), FULL, None, {"llm": (target,)})
    trained = trained_modules(apply_recipe(load(mixture_dir), FULL, None, {"llm": ("mlp",)}))
    assert trained == {f"model.layers.{layer}.mlp.{end}" for layer in range(2) for end in ("gate", "experts")}


def test_a_trained_mixture_is_saved_and_put_back_exactly(mixture_dir: Path, tmp_path: Path) -> None:
    model = apply_recipe(load(mixture_dir), FULL, None)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.01 * torch.randn_like(parameter)
    (tmp_path / "trained").mkdir()
    save_trained(model, tmp_path / "trained", base_dir="data/builds/moe")
    merge_trained(load_trained(load(mixture_dir), tmp_path / "trained")).save_pretrained(tmp_path / "merged")
    found = dict(load(tmp_path / "merged").named_parameters())
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())
