import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.core.params.schema import DeviceParams
from stages.kit.models.adapters import apply_recipe, count_trainable
from stages.kit.models.load import check_placement, load_model
from stages.kit.planning.plan import Plan, resolve_plan
from stages.kit.training.trainer import MAX_OVERFLOWS, ContractBreach, StartContract, check_gradients, check_start
from tests import ROOT
from tools.plan.available_inputs import root_base

PARAMS = load_params(ROOT / "params.yaml")
CPU = DeviceParams(kind="cpu")


@pytest.fixture
def started(tiny_vlm: Path) -> Callable[[str], tuple[nn.Module, Plan]]:
    """A recipe's model and plan as they are before the first step."""

    def start(recipe: str) -> tuple[nn.Module, Plan]:
        plan = resolve_plan(PARAMS, recipe, train_samples=4)
        model = load_model(tiny_vlm, device=CPU, precision="fp32")
        model = apply_recipe(model, plan.parts, plan.lora, plan.full_targets)
        return model, replace(plan, trainable=asdict(count_trainable(model)))

    return start


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("recipe", [name for name in PARAMS.recipes if root_base(PARAMS, name)[1] is None])
def test_a_run_as_planned_starts(started: Callable[[str], tuple[nn.Module, Plan]], recipe: str) -> None:
    model, plan = started(recipe)
    check_start(model, plan, devices_in_use=1)
    give_gradients(model)
    check_gradients(model, plan)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.language_model.norm.weight", "llm"),
        ("model.visual.patch_embed.proj.weight", "vision"),
        ("model.visual.merger.ln_q.weight", "projector"),
    ],
)
def test_one_more_trained_weight_is_a_breach_that_names_the_part(
    started: Callable[[str], tuple[nn.Module, Plan]], name: str, part: str
) -> None:
    model, plan = started("r1-llm-only")
    model.get_parameter(f"base_model.model.{name}").requires_grad_(True)
    with pytest.raises(ContractBreach, match=rf"{part} has [\d,]+ parameters to train, but the plan says"):
        check_start(model, plan, devices_in_use=1)


def test_data_parallel_is_a_breach(started: Callable[[str], tuple[nn.Module, Plan]]) -> None:
    model, plan = started("r2-vision-only")
    with pytest.raises(ContractBreach, match="DataParallel"):
        check_start(nn.DataParallel(model), plan, devices_in_use=1)
    with pytest.raises(ContractBreach, match="DataParallel"):
        check_start(model, plan, devices_in_use=2)


def test_trained_weights_in_low_precision_are_a_breach(started: Callable[[str], tuple[nn.Module, Plan]]) -> None:
    model, plan = started("r2-vision-only")
    weight = model.get_parameter("model.visual.patch_embed.proj.weight")
    weight.data = weight.data.to(torch.bfloat16)
    with pytest.raises(ContractBreach, match=r"patch_embed.proj.weight is to be trained, but is torch.bfloat16"):
        check_start(model, plan, devices_in_use=1)


@pytest.mark.parametrize("kind", ["weight", "buffer"])
def test_under_fp16_nothing_is_in_bf16(started: Callable[[str], tuple[nn.Module, Plan]], kind: str) -> None:
    model, plan = started("r1-llm-only")
    plan = replace(plan, precision="fp16")
    check_start(model, plan, devices_in_use=1)
    held = model.named_buffers() if kind == "buffer" else model.named_parameters()
    name, tensor = next((name, tensor) for name, tensor in held if not tensor.requires_grad)
    tensor.data = tensor.data.to(torch.bfloat16)
    with pytest.raises(ContractBreach, match=f"precision is fp16, but {re.escape(name)} is bfloat16"):
        check_start(model, plan, devices_in_use=1)


def test_weights_away_from_the_planned_device_are_refused(started: Callable[[str], tuple[nn.Module, Plan]]) -> None:
    model, _ = started("r2-vision-only")
    with pytest.raises(UserError, match=r"offloaded away from cuda: .* on cpu"):
        check_placement(model, DeviceParams(kind="cuda"))
    model.lm_head.to("meta")
    with pytest.raises(UserError, match=r"offloaded away from cpu: lm_head.weight on meta"):
        check_placement(model, CPU)


def test_a_layer_that_accelerate_would_offload_is_refused(started: Callable[[str], tuple[nn.Module, Plan]]) -> None:
    """Offloaded weights can look placed, as accelerate brings them in layer by layer; its map tells."""
    model = nn.Linear(1, 1)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "disk"}  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"model.layers.1 on disk"):
        check_placement(model, DeviceParams(kind="cuda"))


def test_a_gradient_that_is_missing_or_astray_is_a_breach(started: Callable[[str], tuple[nn.Module, Plan]]) -> None:
    model, plan = started("r4-joint")
    give_gradients(model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    name, parameter = trained[0]
    parameter.grad = None
    with pytest.raises(ContractBreach, match=rf"vision is trained, but {name} got no gradient"):
        check_gradients(model, plan)
    give_gradients(model)
    frozen = model.get_parameter("base_model.model.lm_head.weight")
    frozen.grad = torch.zeros_like(frozen)
    with pytest.raises(ContractBreach, match=r"llm is frozen there, but .*lm_head.weight got a gradient"):
        check_gradients(model, plan)


def test_a_gradient_that_is_not_finite_is_a_breach(started: Callable[[str], tuple[nn.Module, Plan]]) -> None:
    model, plan = started("r1-llm-only")
    give_gradients(model)
    next(parameter.grad for parameter in model.parameters() if parameter.grad is not None)[0] = float("nan")
    with pytest.raises(ContractBreach, match=r"gradient of .* \(llm\) is not finite"):
        check_gradients(model, plan)


@pytest.mark.parametrize("gradient", [0.0, float("inf"), float("nan")])
def test_the_first_steps_of_fp16_may_overflow_but_not_forever(
    started: Callable[[str], tuple[nn.Module, Plan]], gradient: float
) -> None:
    """What GradScaler and clipping by an infinite norm leave of a step that overflowed."""
    model, plan = started("r1-llm-only")
    contract = StartContract(replace(plan, precision="fp16"))

    def step() -> None:
        contract.on_pre_optimizer_step(None, None, None, model=model)

    give_gradients(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(gradient)
    for _ in range(MAX_OVERFLOWS):
        step()
    assert not contract.checked
    with pytest.raises(ContractBreach):
        step()
    give_gradients(model)
    step()
    assert contract.checked


def test_a_part_whose_gradients_are_all_zero_is_a_breach(started: Callable[[str], tuple[nn.Module, Plan]]) -> None:
    model, plan = started("r4-joint")
    give_gradients(model)
    for name, parameter in model.named_parameters():
        if "visual" in name and parameter.grad is not None:
            parameter.grad.zero_()
    with pytest.raises(ContractBreach, match="vision is trained, but all its gradients are zero"):
        check_gradients(model, plan)
