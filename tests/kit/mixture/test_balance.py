"""Experts are balanced over the whole effective batch: micro-batches and checkpointing change nothing but memory."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from stages.core.params.schema import DeviceParams, PartsParams
from stages.kit.mixture.balance import LoadBalance
from stages.kit.mixture.merge import merge_experts
from stages.kit.mixture.trainer import BalancedTrainer, make_trainer
from stages.kit.models.load import load_model
from stages.kit.models.parts import apply_recipe, count_trainable
from stages.kit.models.processors import load_processor
from stages.kit.training.collators import ConversationCollator
from stages.kit.training.seed import seed_everything
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.mixture.dense import conversation, save_base, save_expert
from tests.kit.training.test_trainer import plan_for

SAMPLES = [conversation(f"Question {'so then ' * (number % 5)}{number}?", f"{number * 7}.") for number in range(16)]
"""Of different lengths, so that batches are padded."""

Gradients = dict[str, torch.Tensor]


class TakeGradients(TrainerCallback):
    """Keeps what the optimizer is about to be given."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Of a mixture of three experts, by how many of them a token takes. Its routers are far from balanced."""
    made = tmp_path_factory.mktemp("models")
    base_dir = save_base(made / "base")
    experts = {name: save_expert(made / name, base_dir, seed=seed) for seed, name in enumerate("abc", 1)}
    torch.manual_seed(4)
    router = torch.randn(2, 3, 32)

    def folder(top_k: int) -> Path:
        path = made / f"top-{top_k}"
        if not path.exists():
            path.mkdir()
            merge_experts(base_dir, experts, path, top_k=top_k, router=router)
        return path

    return folder


def train(
    folder: Path, scratch_dir: Path, *, micro_batch: int, coefficient: float = 3.0, checkpointing: bool = False
) -> tuple[RecipeTrainer, Gradients]:
    """One step of 16 samples."""
    plan = plan_for(
        "r1-llm-only",
        micro_batch=micro_batch,
        samples=16,
        effective_batch=16,
        epochs=1,
        parts=PartsParams(llm="full"),
        lora=None,
        max_grad_norm=1e9,
    )
    seed_everything(0)
    model = load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32")
    model.config.router_aux_loss_coef = coefficient
    model = apply_recipe(model, plan.parts, None)
    plan = replace(plan, trainable=asdict(count_trainable(model)), gradient_checkpointing=checkpointing)
    processor = load_processor(folder, None)
    taken = TakeGradients()
    trainer = make_trainer(
        plan,
        model=model,
        processor=processor,
        collator=ConversationCollator(processor, SAMPLES, lambda x: x, loss=plan.loss, max_length=plan.max_length),
        callbacks=[taken],
        scratch_dir=scratch_dir,
        report_to="none",
    )
    trainer.train()
    return trainer, taken.gradients


def in_one(folder: Path, coefficient: float) -> tuple[torch.Tensor, Gradients]:
    """The loss and the gradients of transformers itself, of all samples in one batch."""
    model = load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32").train()
    model.router_aux_loss_coef = coefficient
    processor = load_processor(folder, None)
    collator = ConversationCollator(processor, SAMPLES, lambda x: x, loss="assistant-only", max_length=2048)
    output = model(**collator([{"sample": number} for number in range(16)]), output_router_logits=True)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if ".shared_expert" not in name}
    return output.loss.detach(), gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("top_k", [2, 3])
def test_gradients_do_not_depend_on_accumulation(
    folders: Callable[[int], Path], tmp_path: Path, top_k: int, checkpointing: bool
) -> None:
    loss, gradients = in_one(folders(top_k), 3.0)
    for micro_batch in (16, 4, 1):
        trainer, found = train(folders(top_k), tmp_path, micro_batch=micro_batch, checkpointing=checkpointing)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3, msg=name)
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        balances = isinstance(trainer, BalancedTrainer)
        assert balances == ("aux_loss" in logged) == (top_k < 3)
        # Where all three are taken it is 3, whatever the routers do, and left out.
        constant = 0.0 if balances else 3 * 3.0
        assert logged["loss"] == pytest.approx(loss.item() - constant, rel=1e-4)


def test_the_balance_has_a_part_in_the_gradients(folders: Callable[[int], Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.weight"
    with_it, without = (in_one(folders(2), coefficient)[1][name] for coefficient in (3.0, 0.0))
    assert (with_it - without).norm() > 0.1 * without.norm()
    _, found = train(folders(2), tmp_path, micro_batch=4, coefficient=0.0)
    torch.testing.assert_close(found[name], without, atol=2e-5, rtol=1e-3)


def test_a_micro_batch_alone_is_balanced_otherwise_than_the_whole(folders: Callable[[int], Path]) -> None:
    """The mean over micro-batches of their own balance, which SFTTrainer takes, is another loss."""
    folder = folders(2)
    model = load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32")
    processor = load_processor(folder, None)
    collator = ConversationCollator(processor, SAMPLES, lambda x: x, loss="assistant-only", max_length=2048)
    batches = [collator([{"sample": number}]) for number in range(16)]

    def balance(balancer: LoadBalance, batch: dict[str, torch.Tensor]) -> float:
        with torch.no_grad(), balancer.watching():
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return balancer.loss(batch["attention_mask"]).item()

    alone = LoadBalance(model)
    mean = sum(balance(alone, batch) for batch in batches) / len(batches)
    whole = LoadBalance(model)
    whole.begin_step(whole.count(model, batches))
    assert sum(balance(whole, batch) for batch in batches) < mean - 1e-3


def test_a_dense_model_has_nothing_to_balance(folders: Callable[[int], Path]) -> None:
    dense = load_model(folders(2).with_name("base"), device=DeviceParams(kind="cpu"), precision="fp32")
    assert LoadBalance(dense).routers == []
