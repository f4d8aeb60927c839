"""Routers learn from labels, each layer from its own alone, whatever the micro-batches and with checkpointing."""

from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, PartsParams
from stages.kit.mixture.merge import merge_experts
from stages.kit.mixture.router_labels import RouterLabels
from stages.kit.mixture.routing import outputs_of
from stages.kit.mixture.trainer import BalancedTrainer, RouterTrainer, make_trainer
from stages.kit.models.load import load_model
from stages.kit.models.parts import apply_recipe, count_trainable
from stages.kit.models.processors import Processor, load_processor
from stages.kit.planning.plan import Plan
from stages.kit.training.collators import IGNORED, ConversationCollator, experts_of
from stages.kit.training.rehearsal import largest_batch
from stages.kit.training.seed import seed_everything
from stages.kit.training.trainer import RecipeTrainer
from stages.tasks.amr import samples as amr_samples
from stages.tasks.moe import samples as moe_samples
from tests.kit.mixture.dense import conversation, save_base, save_expert
from tests.kit.mixture.test_balance import TakeGradients
from tests.kit.training.test_trainer import plan_for
from tests.tasks.moe.made_up import fact, meeting

CPU = DeviceParams(kind="cpu")
QUESTIONS = ("What is {}?", "Chair: {}. Clerk: so then, so then. What was agreed?", "Tell me {} again")
SAMPLES = [conversation(QUESTIONS[number % 3].format("now " * (number % 4)), f"{number}.") for number in range(8)]
"""Of three domains in turn, and of different lengths, so that batches are padded."""
EXPERTS = [number % 3 for number in range(8)]
GATES = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a mixture of three experts, of which a token takes two."""
    made = tmp_path_factory.mktemp("models")
    base_dir = save_base(made / "base")
    experts = {name: save_expert(made / name, base_dir, seed=seed) for seed, name in enumerate("abc", 1)}
    torch.manual_seed(4)
    (made / "moe").mkdir()
    merge_experts(base_dir, experts, made / "moe", top_k=2, router=torch.randn(2, 3, 32))
    return made / "moe"


def labels_plan(*, micro_batch: int = 8, **changes: Any) -> Plan:
    """One step of 8 samples, unless changed."""
    settings: dict[str, Any] = {"effective_batch": 8, "epochs": 1, "max_grad_norm": 1e9, "lora": None}
    settings |= {"parts": PartsParams(llm="full"), "full_targets": {"llm": ("mlp.gate",)}}
    settings |= {"loss": "router-labels"}
    domains = changes.pop("domains", ("facts", "meetings", "orders"))
    return replace(plan_for("r1-llm-only", micro_batch=micro_batch, **{**settings, **changes}), domains=domains)


def trainer_of(plan: Plan, folder: Path, scratch_dir: Path, *callbacks: Any) -> RecipeTrainer:
    seed_everything(0)
    model = load_model(folder, device=CPU, precision="fp32")
    model.config.router_aux_loss_coef = 3.0  # would be seen
    model = apply_recipe(model, plan.parts, None, plan.full_targets)
    processor = load_processor(folder, None)
    return make_trainer(
        replace(plan, trainable=asdict(count_trainable(model))),
        model=model,
        processor=processor,
        collator=collator_of(plan, processor),
        callbacks=list(callbacks),
        scratch_dir=scratch_dir,
        report_to="none",
    )


def collator_of(plan: Plan, processor: Processor) -> ConversationCollator:
    experts = EXPERTS if plan.loss == "router-labels" else None
    return ConversationCollator(
        processor, SAMPLES, lambda sample: sample, loss=plan.loss, max_length=plan.max_length, experts=experts
    )


def logged(trainer: RecipeTrainer, name: str) -> float:
    (value,) = [entry[name] for entry in trainer.state.log_history if name in entry]
    return float(value)


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The loss, the accuracy and each router's gradient, sample by sample and layer by layer, from what the layers'
    norms hand on."""
    model = load_model(folder, device=CPU, precision="fp32")
    processor = load_processor(folder, None)
    routers = {name: model.get_parameter(name) for name in sorted(GATES)}
    losses, correct = [], []
    for number, sample in enumerate(SAMPLES):
        collator = ConversationCollator(processor, [sample], lambda it: it, loss="all-tokens", max_length=2048)
        ids = collator([{"sample": 0}])["input_ids"]
        norms = [layer.post_attention_layernorm for layer in model.model.layers]
        with torch.no_grad(), outputs_of(norms) as handed_on:
            model(input_ids=ids)
        for hidden, weight in zip(handed_on, routers.values(), strict=True):
            logits = hidden[0] @ weight.T
            losses.append(F.cross_entropy(logits, torch.full((len(logits),), EXPERTS[number]), reduction="none"))
            correct.append(logits.argmax(-1) == EXPERTS[number])
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: weight.grad for name, weight in routers.items() if weight.grad is not None}
    return loss.item(), torch.cat(correct).float().mean().item(), gradients


@pytest.mark.parametrize(("micro_batch", "checkpointing"), [(8, False), (4, False), (4, True), (1, False)])
def test_each_router_learns_from_its_own_layer_whatever_the_micro_batches(
    folder: Path, tmp_path: Path, by_hand: Any, micro_batch: int, checkpointing: bool
) -> None:
    loss, accuracy, gradients = by_hand
    taken = TakeGradients()
    plan = replace(labels_plan(micro_batch=micro_batch), gradient_checkpointing=checkpointing)
    trainer = trainer_of(plan, folder, tmp_path, taken)
    trainer.train()
    assert taken.gradients.keys() == gradients.keys() == GATES
    for name, gradient in gradients.items():
        torch.testing.assert_close(taken.gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    assert logged(trainer, "loss") == pytest.approx(loss, rel=1e-5)
    assert logged(trainer, "router_accuracy") == pytest.approx(accuracy, rel=1e-5)


def test_a_loss_of_labels_reaches_routers_alone_even_where_all_is_trained(folder: Path) -> None:
    model = apply_recipe(load_model(folder, device=CPU, precision="fp32"), PartsParams(llm="full"), None)
    loss, _ = RouterLabels(model, "abc").loss(model, batch_of_all(folder))
    loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == GATES


def test_nothing_of_the_forward_pass_is_kept_for_a_backward_pass(folder: Path) -> None:
    """Else activations of the whole mixture would be."""
    model = load_model(folder, device=CPU, precision="fp32")
    model = apply_recipe(model, PartsParams(llm="full"), None, {"llm": ("mlp.gate",)})
    seen = []
    model.lm_head.register_forward_hook(lambda _module, args, _output: seen.append(args[0].requires_grad))
    batch = batch_of_all(folder)
    loss, _ = RouterLabels(model, "abc").loss(model, batch)
    assert loss.requires_grad
    assert seen == [False]
    model(**batch)
    assert seen == [False, True]  # and later passes are as they were


def batch_of_all(folder: Path) -> dict[str, torch.Tensor]:
    return collator_of(labels_plan(), load_processor(folder, None))([{"sample": number} for number in range(8)])


def test_routers_learn_to_tell_domains_apart(folder: Path, tmp_path: Path) -> None:
    """As far as they differ: how they begin they have in common."""
    trainer = trainer_of(labels_plan(epochs=30, learning_rate=2e-2, lr_schedule="constant"), folder, tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, parameter in trainer.model.named_parameters() if not parameter.equal(before[name])}
    assert changed == GATES
    first, *_, last = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert last["loss"] < 0.4 * first["loss"]
    assert last["router_accuracy"] > first["router_accuracy"] + 0.15


def test_a_gate_learns_from_the_next_token_too(folder: Path, tmp_path: Path) -> None:
    """With checkpointing, with accumulation, and balanced, as every mixture's training."""
    found = []
    for micro_batch, checkpointing in ((8, False), (2, False), (2, True)):
        taken = TakeGradients()
        plan = labels_plan(micro_batch=micro_batch, loss="assistant-only", domains=())
        trainer = trainer_of(replace(plan, gradient_checkpointing=checkpointing), folder, tmp_path, taken)
        trainer.train()
        assert taken.gradients.keys() == GATES
        assert logged(trainer, "aux_loss") > 0
        found.append(taken.gradients)
    for name in GATES:
        torch.testing.assert_close(found[1][name], found[0][name], atol=2e-5, rtol=1e-3)
        torch.testing.assert_close(found[2][name], found[1][name], atol=2e-6, rtol=1e-4)


def test_the_balance_of_experts_has_no_part_where_they_are_labelled(folder: Path, tmp_path: Path) -> None:
    balanced = trainer_of(labels_plan(loss="assistant-only", domains=()), folder, tmp_path)
    assert isinstance(balanced, BalancedTrainer)
    assert balanced.balance_coefficient == 3.0
    assert isinstance(trainer_of(labels_plan(), folder, tmp_path), RouterTrainer)


def test_every_token_is_labelled_with_its_samples_expert_and_padding_with_none(folder: Path) -> None:
    collator = collator_of(labels_plan(), load_processor(folder, None))
    batch = collator([{"sample": number} for number in (4, 0, 7)])
    assert (batch["attention_mask"] == 0).any()
    for row, number in enumerate((4, 0, 7)):
        is_text = batch["attention_mask"][row].bool()
        assert set(batch["labels"][row, is_text].tolist()) == {EXPERTS[number]}
        assert set(batch["labels"][row, ~is_text].tolist()) <= {IGNORED}
    assert largest_batch(collator, 2)["labels"].shape[0] == 2


def test_a_dense_model_and_another_number_of_experts_are_refused(folder: Path, tmp_path: Path) -> None:
    plan = labels_plan(domains=("facts", "meetings"))
    with pytest.raises(UserError, match=r"domains are 2 \(facts, meetings\), but the model has 3 experts"):
        trainer_of(plan, folder, tmp_path)
    dense = load_model(folder.with_name("base"), device=CPU, precision="fp32")
    with pytest.raises(UserError, match="the routers of a mixture, and Qwen2ForCausalLM has none"):
        RouterLabels(dense, ("facts", "meetings"))


@pytest.mark.parametrize(
    ("domains", "samples", "problem"),
    [
        (("qmsum", "truthfulqa"), amr_samples, "task moe knows no domains of its samples"),
        (("qmsum", "poems"), moe_samples, r"of the domain truthfulqa, 2 of 3, which no expert has; .* qmsum, poems$"),
        (("qmsum", "truthfulqa", "poems"), moe_samples, r"no training sample of the domain poems, .* it has truth"),
    ],
)
def test_domains_that_samples_do_not_have_are_refused(
    domains: tuple[str, ...], samples: ModuleType, problem: str
) -> None:
    plan = labels_plan(task="moe", domains=domains)
    with pytest.raises(UserError, match=problem):
        experts_of(plan, [fact(1), meeting(2), fact(3)], samples)


def test_experts_are_numbered_in_the_order_of_the_domains() -> None:
    records = [fact(1), meeting(2), fact(3)]
    assert experts_of(labels_plan(domains=("qmsum", "truthfulqa")), records, moe_samples) == [1, 0, 1]
    assert experts_of(labels_plan(domains=("truthfulqa", "qmsum")), records, moe_samples) == [0, 1, 0]
