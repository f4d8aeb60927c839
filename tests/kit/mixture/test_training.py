"""A mixture is trained like any other model, except for its shared expert, which is zero."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, LoraParams, PartsParams
from stages.kit.models.adapters import (
    apply_recipe,
    count_trainable,
    part_of,
    trained_modules,
)
from stages.kit.models.load import load_config, load_model, meta_model

FULL = PartsParams(llm="full")
FIRST = "model.layers.0."


def load(folder: Path) -> torch.nn.Module:
    return load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32")


def test_all_of_a_mixture_is_trained_but_the_idle_shared_expert(mixture_dir: Path) -> None:
    model = load(mixture_dir)
    tokens = torch.arange(3, 40)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) == (".mlp.shared_expert" not in name), name
    apply_recipe(model, FULL, None)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".mlp.shared_expert" in name} != set()
    assert {part_of(name) for name, _ in model.named_parameters()} == {"llm"}
    other = load_config(mixture_dir)
    other.neutral_shared_expert = False  # one that somebody else trained
    assert all(parameter.requires_grad for parameter in apply_recipe(meta_model(other), FULL, None).parameters())


def trained(folder: Path, parts: PartsParams, lora: LoraParams | None, *target: str) -> set[str]:
    """Modules of the first layer, trained and planned."""
    targets: Any = {"llm": target} if target else None
    model, planned = (
        apply_recipe(each, parts, lora, targets) for each in (load(folder), meta_model(load_config(folder)))
    )
    assert count_trainable(planned) == count_trainable(model)
    return {name.removeprefix(FIRST) for name in trained_modules(model) if name.startswith(FIRST)}


def test_targets_reach_gates_and_experts_and_never_the_shared_one(mixture_dir: Path) -> None:
    both = {"mlp.gate", "mlp.experts"}
    assert {name for name in trained(mixture_dir, FULL, None) if "mlp" in name} == both
    assert trained(mixture_dir, FULL, None, "mlp") == both
    assert trained(mixture_dir, FULL, None, "mlp.gate") == {"mlp.gate"}
    for target in ("shared_expert", "gate_proj", "shared_expert_gate"):
        with pytest.raises(UserError, match=rf"full_targets.llm: '{target}' names no module with weights; .* gate, "):
            trained(mixture_dir, FULL, None, target)
    lora = LoraParams(rank=2, alpha=4, targets={"llm": ("q_proj",)})
    assert trained(mixture_dir, PartsParams(llm="lora"), lora) == {"self_attn.q_proj"}
    with pytest.raises(UserError, match=r"lora.targets.llm: 'up_proj' names no linear layer"):
        trained(mixture_dir, PartsParams(llm="lora"), replace(lora, targets={"llm": ("up_proj",)}))
