"""Experts are balanced, and routers labelled, over the whole effective batch: micro-batches and checkpointing change
nothing but memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, PartsParams
from stages.kit.mixture.build import merge_experts
from stages.kit.mixture.routing import outputs_of, routers_of
from stages.kit.mixture.trainer import BalancedTrainer, RouterTrainer, make_trainer, router_loss
from stages.kit.models.adapters import apply_recipe, count_trainable
from stages.kit.models.load import load_config, load_model
from stages.kit.models.prompts import load_processor
from stages.kit.planning.plan import Plan
from stages.kit.training.batches import ConversationCollator, experts_of
from stages.kit.training.resume import seed_everything
from stages.kit.training.trainer import RecipeTrainer
from stages.tasks.moe import samples as moe_samples
from tests.kit.mixture.dense import conversation, set_routers
from tests.kit.training.small import TakeGradients, plan_for
from tests.tasks.moe.made_up import fact, meeting

QUESTIONS = ("What is {}?", "Chair: {}. Clerk: so then, so then. What was agreed?", "Tell me {} again")
SAMPLES = [conversation(QUESTIONS[number % 3].format("now " * (number % 4)), f"{number}.") for number in range(8)]
"""Samples of three domains in turn, with different lengths, so that batches are padded."""
EXPERTS = [number % 3 for number in range(8)]
GATES = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}

Gradients = dict[str, torch.Tensor]


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32", **options)


def labels_plan(*, micro_batch: int = 8, **changes: Any) -> Plan:
    """One step of 8 samples for the gates alone, by labels, unless changed."""
    domains = changes.pop("domains", ("facts", "meetings", "orders"))
    settings: dict[str, Any] = {"effective_batch": 8, "epochs": 1, "max_grad_norm": 1e9, "lora": None}
    settings |= {"parts": PartsParams(llm="full"), "full_targets": {"llm": ("mlp.gate",)}, "loss": "router-labels"}
    return replace(plan_for("r1-llm-only", micro_batch=micro_batch, **{**settings, **changes}), domains=domains)


def tokens_plan(**changes: Any) -> Plan:
    """A plan of the same step with the loss of the next token."""
    return labels_plan(loss="assistant-only", domains=(), **changes)


def collator_of(folder: Path, loss: Any = "router-labels", *, packed: bool = False) -> ConversationCollator:
    return ConversationCollator(
        *(load_processor(folder, None), SAMPLES, lambda it: it),
        loss=loss,
        max_length=2048,
        experts=EXPERTS if loss == "router-labels" else None,
        packed_for=load_config(folder) if packed else None,
    )


def batch_of(folder: Path, numbers: Sequence[int] = range(8), loss: Any = "router-labels") -> dict[str, torch.Tensor]:
    return collator_of(folder, loss)([{"sample": number} for number in numbers])


def trainer_of(plan: Plan, folder: Path, scratch_dir: Path, coefficient: float = 3.0) -> RecipeTrainer:
    seed_everything(0)
    model = load(folder, attn=plan.attn, padding_free=plan.padding_free)
    model.config.router_aux_loss_coef = coefficient
    model = apply_recipe(model, plan.parts, None, plan.full_targets)
    return make_trainer(
        replace(plan, trainable=count_trainable(model)),
        model=model,
        processor=load_processor(folder, None),
        collator=collator_of(folder, plan.loss, packed=plan.padding_free),
        report_to="none",
    )


def train(plan: Plan, folder: Path, scratch_dir: Path, **options: Any) -> tuple[RecipeTrainer, Gradients]:
    trainer = trainer_of(plan, folder, scratch_dir, **options)
    trainer.add_callback(taken := TakeGradients())
    trainer.train()
    return trainer, taken.gradients


def logged(trainer: RecipeTrainer, name: str) -> float:
    (value,) = [entry[name] for entry in trainer.state.log_history if name in entry]
    return float(value)


def in_one(folder: Path, coefficient: float) -> tuple[float, Gradients]:
    """transformers' own loss and gradients with all samples in one batch."""
    model = load(folder).train()
    model.router_aux_loss_coef = coefficient
    output = model(**batch_of(folder, loss="assistant-only"), output_router_logits=True)
    output.loss.backward()
    return output.loss.item(), {name: p.grad for name, p in model.named_parameters() if ".shared_expert" not in name}


@pytest.mark.parametrize(
    ("top_k", "micro_batch", "checkpointing"), [(2, 8, False), (2, 2, False), (2, 2, True), (2, 1, False), (3, 2, True)]
)
def test_balanced_gradients_do_not_depend_on_accumulation(
    base_dir: Path, experts: dict[str, Path], tmp_path: Path, top_k: int, micro_batch: int, checkpointing: bool
) -> None:
    folder = tmp_path / "mixture"
    folder.mkdir()
    torch.manual_seed(4)
    merge_experts(base_dir, experts, folder, top_k=top_k)
    set_routers(folder, torch.randn(2, 3, 32))
    loss, gradients = in_one(folder, 3.0)
    plan = replace(tokens_plan(micro_batch=micro_batch, full_targets={}), gradient_checkpointing=checkpointing)
    trainer, found = train(plan, folder, tmp_path)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3, msg=name)
    assert isinstance(trainer, BalancedTrainer) == (top_k < 3)
    # If all three are taken, the balance is 3, whatever the routers do, and left out.
    assert logged(trainer, "loss") == pytest.approx(loss - (0.0 if top_k < 3 else 3 * 3.0), rel=1e-4)
    assert any("aux_loss" in entry for entry in trainer.state.log_history) == (top_k < 3)


def test_the_balance_reaches_a_gate_trained_alone(mixture_dir: Path, tmp_path: Path) -> None:
    with_it, without = (in_one(mixture_dir, coefficient)[1] for coefficient in (3.0, 0.0))
    for coefficient, expected in ((3.0, with_it), (0.0, without)):
        _, found = train(tokens_plan(), mixture_dir, tmp_path, coefficient=coefficient)
        assert found.keys() == GATES
        for name in GATES:
            torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=1e-3)
            assert (with_it[name] - without[name]).norm() > 0.1 * without[name].norm()


@pytest.fixture(scope="module")
def by_hand(mixture_dir: Path) -> tuple[float, float, Gradients]:
    """The loss, the accuracy and each router's gradient, sample by sample and layer by layer, from the outputs of the
    layers' norms."""
    model = load(mixture_dir)
    routers = {name: model.get_parameter(name) for name in sorted(GATES)}
    norms = [layer.post_attention_layernorm for layer in model.model.layers]
    losses, correct = [], []
    for number in range(8):
        with torch.no_grad(), outputs_of(norms) as handed_on:
            model(input_ids=batch_of(mixture_dir, [number])["input_ids"])
        for hidden, weight in zip(handed_on, routers.values(), strict=True):
            logits = hidden[0] @ weight.T
            losses.append(F.cross_entropy(logits, torch.full((len(logits),), EXPERTS[number]), reduction="none"))
            correct.append(logits.argmax(-1) == EXPERTS[number])
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: weight.grad for name, weight in routers.items() if weight.grad is not None}
    return loss.item(), torch.cat(correct).float().mean().item(), gradients


@pytest.mark.parametrize(("micro_batch", "checkpointing"), [(8, False), (2, True), (1, False)])
def test_router_labels_train_each_layer_independently_of_micro_batches(
    mixture_dir: Path, tmp_path: Path, by_hand: Any, micro_batch: int, checkpointing: bool
) -> None:
    loss, accuracy, gradients = by_hand
    plan = replace(labels_plan(micro_batch=micro_batch), gradient_checkpointing=checkpointing)
    trainer, found = train(plan, mixture_dir, tmp_path)
    assert isinstance(trainer, RouterTrainer)  # the balance of experts has no part
    assert found.keys() == gradients.keys() == GATES
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    assert logged(trainer, "loss") == pytest.approx(loss, rel=1e-5)
    assert logged(trainer, "router_accuracy") == pytest.approx(accuracy, rel=1e-5)


def test_router_labels_reach_only_routers_and_keep_no_activations(mixture_dir: Path) -> None:
    batch, seen = batch_of(mixture_dir), []
    for targets in (None, {"llm": ("mlp.gate",)}):
        model: Any = apply_recipe(load(mixture_dir), PartsParams(llm="full"), None, targets)  # type: ignore[arg-type]
        hook = model.lm_head.register_forward_hook(lambda _module, args, _output: seen.append(args[0].requires_grad))
        loss, _ = router_loss(routers_of(model), model, batch)
        loss.backward()
        assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == GATES
    assert not seen[-1]
    model(**batch)
    assert seen[-1]  # later passes are as they were
    hook.remove()


def test_experts_are_numbered_in_the_order_of_the_domains_and_unknown_ones_refused() -> None:
    records = [fact(1), meeting(2), fact(3)]
    assert experts_of(labels_plan(domains=("qmsum", "truthfulqa")), records, moe_samples) == [1, 0, 1]
    with pytest.raises(UserError, match=r"of truthfulqa \(2\), qmsum \(1\), but .* qmsum, poems;"):
        experts_of(labels_plan(task="moe", domains=("qmsum", "poems")), records, moe_samples)
