"""Experts are balanced, and routers labelled, over the whole effective batch: micro-batches, checkpointing and rows
without padding change nothing but memory. All else of a mixture is trained like any other model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stages.core.errors import UserError
from stages.core.params.schema import LoraParams, PartsParams
from stages.mixture.routing import outputs_of, routers_of
from stages.mixture.trainer import BalancedTrainer, RouterTrainer, router_loss
from stages.models.adapters import apply_recipe, count_trainable, part_of, trained_modules
from stages.models.load import load_config, meta_model
from stages.models.prompts import load_processor
from stages.planning.plan import Plan
from stages.tasks.moe import samples as moe_samples
from stages.training.batches import ConversationCollator, experts_of
from stages.training.trainer import RecipeTrainer
from tests.mixture.dense import conversation, load, merged, set_routers
from tests.plans import changed, recipe_of
from tests.tasks.moe.made_up import fact, meeting
from tests.training.small import TakeGradients, plan_for, trainer_on

QUESTIONS = ("What is {}?", "Chair: {}. Clerk: so then, so then. What was agreed?", "Tell me {} again")
SAMPLES = [conversation(QUESTIONS[number % 3].format("now " * (number % 4)), f"{number}.") for number in range(8)]
"""Samples of three domains in turn, with different lengths, so that batches are padded."""
EXPERTS = [number % 3 for number in range(8)]
FULL = PartsParams(llm="full")
FIRST = "model.layers.0."
GATES = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}

Gradients = dict[str, torch.Tensor]


def labels_plan(*, micro_batch: int = 8, **changes: Any) -> Plan:
    """One step of 8 samples for the gates alone, by labels, unless changed."""
    domains = changes.pop("domains", ("facts", "meetings", "orders"))
    settings: dict[str, Any] = {"effective_batch": 8, "epochs": 1, "max_grad_norm": 1e9, "lora": None}
    settings |= {"quantization": "none", "parts": FULL, "full_targets": {"llm": ("mlp.gate",)}, "loss": "router-labels"}
    return replace(plan_for("r1-llm-only", micro_batch=micro_batch, **{**settings, **changes}), domains=domains)


def tokens_plan(**changes: Any) -> Plan:
    """A plan of the same step with the loss of the next token."""
    return labels_plan(loss="assistant-only", domains=(), **changes)


def experts_for(loss: str) -> list[int] | None:
    return EXPERTS if loss == "router-labels" else None


def collator_of(folder: Path, loss: Any = "router-labels", *, packed: bool = False) -> ConversationCollator:
    return ConversationCollator(
        *(load_processor(folder, None), SAMPLES, lambda it: it),
        loss=loss,
        max_length=2048,
        experts=experts_for(loss),
        packed_for=load_config(folder) if packed else None,
    )


def batch_of(folder: Path, numbers: Sequence[int] = range(8), loss: Any = "router-labels") -> dict[str, torch.Tensor]:
    return collator_of(folder, loss)([{"sample": number} for number in numbers])


def train(plan: Plan, folder: Path, coefficient: float = 3.0) -> tuple[RecipeTrainer, Gradients]:
    trainer = trainer_on(folder, SAMPLES, plan, experts=experts_for(plan.recipe.loss), aux_loss=coefficient)
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
    ("top_k", "micro_batch", "checkpointing"), [(2, 8, False), (2, 2, True), (2, 1, False), (3, 2, True)]
)
def test_balanced_gradients_do_not_depend_on_accumulation(
    base_dir: Path, experts: dict[str, Path], tmp_path: Path, top_k: int, micro_batch: int, checkpointing: bool
) -> None:
    folder = merged(base_dir, experts, tmp_path / "mixture", top_k=top_k)
    torch.manual_seed(4)
    set_routers(folder, torch.randn(2, 3, 32))
    loss, gradients = in_one(folder, 3.0)
    plan = changed(tokens_plan(micro_batch=micro_batch, full_targets={}), gradient_checkpointing=checkpointing)
    trainer, found = train(plan, folder)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3, msg=name)
    assert isinstance(trainer, BalancedTrainer) == (top_k < 3)
    # If all three are taken, the balance is 3, whatever the routers do, and left out.
    assert logged(trainer, "loss") == pytest.approx(loss - (0.0 if top_k < 3 else 3 * 3.0), rel=1e-4)
    assert any("aux_loss" in entry for entry in trainer.state.log_history) == (top_k < 3)


def test_the_balance_reaches_a_gate_trained_alone(mixture_dir: Path) -> None:
    with_it, without = (in_one(mixture_dir, coefficient)[1] for coefficient in (3.0, 0.0))
    for coefficient, expected in ((3.0, with_it), (0.0, without)):
        _, found = train(tokens_plan(), mixture_dir, coefficient)
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
    mixture_dir: Path, by_hand: Any, micro_batch: int, checkpointing: bool
) -> None:
    loss, accuracy, gradients = by_hand
    plan = changed(labels_plan(micro_batch=micro_batch), gradient_checkpointing=checkpointing)
    trainer, found = train(plan, mixture_dir)
    assert isinstance(trainer, RouterTrainer)  # the balance of experts has no part
    assert found.keys() == gradients.keys() == GATES
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    assert logged(trainer, "loss") == pytest.approx(loss, rel=1e-5)
    assert logged(trainer, "router_accuracy") == pytest.approx(accuracy, rel=1e-5)


def test_router_labels_reach_only_routers_and_keep_no_activations(mixture_dir: Path) -> None:
    batch, seen = batch_of(mixture_dir), []
    for targets in (None, {"llm": ("mlp.gate",)}):
        model: Any = apply_recipe(load(mixture_dir), recipe_of(llm="full", full_targets=targets))
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


WHOLE: Any = {"full_targets": {}}


@pytest.mark.parametrize(
    ("of", "micro_batch", "attn"),
    [
        *(("a mixture", 8, "sdpa"), ("a mixture", 4, "eager")),
        *(("a mixture's gates", 4, "sdpa"), ("routers by labels", 4, "sdpa")),
    ],
)
def test_loss_and_gradients_of_a_row_without_padding_are_those_of_a_padded_batch(
    mixture_dir: Path, of: str, micro_batch: int, attn: Any
) -> None:
    plan = labels_plan if of == "routers by labels" else tokens_plan
    settings = {} if of in ("routers by labels", "a mixture's gates") else WHOLE
    padded: Plan = changed(plan(micro_batch=micro_batch, **settings), attn=attn)
    one, expected = train(padded, mixture_dir)
    other, found = train(replace(padded, padding_free=True), mixture_dir)
    names = ["loss", "grad_norm", *(["aux_loss"] if of.startswith("a mixture") else [])]
    assert [logged(other, name) for name in names] == pytest.approx([logged(one, name) for name in names], rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()) + 1e-9)


def test_every_tokens_router_has_its_label_and_a_samples_first_token_is_no_next_one(mixture_dir: Path) -> None:
    numbers = [{"sample": number} for number in (3, 0, 7)]
    routers, tokens = (collator_of(mixture_dir, loss, packed=True)(numbers) for loss in ("router-labels", "all-tokens"))
    starts = routers["position_ids"][0] == 0
    assert starts.sum() == 3
    assert (routers["labels"][0] != -100).all()
    assert torch.equal(tokens["labels"][0] == -100, starts)
    assert torch.equal(tokens["input_ids"], routers["input_ids"])
    lengths = collator_of(mixture_dir).lengths
    assert routers["labels"][0].tolist() == [0] * lengths[3] + [0] * lengths[0] + [1] * lengths[7]


def test_all_of_a_mixture_is_trained_but_the_idle_shared_expert(mixture_dir: Path) -> None:
    model = load(mixture_dir)
    tokens = torch.arange(3, 40)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) == (".mlp.shared_expert" not in name), name
    apply_recipe(model, recipe_of(llm="full"))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".mlp.shared_expert" in name} != set()
    assert {part_of(name) for name, _ in model.named_parameters()} == {"llm"}
    other = load_config(mixture_dir)
    other.neutral_shared_expert = False  # one that somebody else trained
    model = apply_recipe(meta_model(other), recipe_of(llm="full"))
    assert all(parameter.requires_grad for parameter in model.parameters())


def trained(folder: Path, *target: str, llm: str = "full", lora: LoraParams | None = None) -> set[str]:
    """Modules of the first layer, trained and planned."""
    recipe = recipe_of(llm=llm, lora=lora, full_targets={"llm": target} if target else None)
    model, planned = (apply_recipe(each, recipe) for each in (load(folder), meta_model(load_config(folder))))
    assert count_trainable(planned) == count_trainable(model)
    return {name.removeprefix(FIRST) for name in trained_modules(model) if name.startswith(FIRST)}


def test_targets_reach_gates_and_experts_and_never_the_shared_one(mixture_dir: Path) -> None:
    both = {"mlp.gate", "mlp.experts"}
    assert {name for name in trained(mixture_dir) if "mlp" in name} == both
    assert trained(mixture_dir, "mlp") == both
    assert trained(mixture_dir, "mlp.gate") == {"mlp.gate"}
    for target in ("shared_expert", "gate_proj", "shared_expert_gate"):
        with pytest.raises(UserError, match=rf"full_targets.llm: '{target}' names no module with weights; .* gate, "):
            trained(mixture_dir, target)
    lora = LoraParams(rank=2, alpha=4, targets={"llm": ("q_proj",)})
    assert trained(mixture_dir, llm="lora", lora=lora) == {"self_attn.q_proj"}
    with pytest.raises(UserError, match=r"lora.targets.llm: 'up_proj' names no linear layer"):
        trained(mixture_dir, llm="lora", lora=replace(lora, targets={"llm": ("up_proj",)}))
