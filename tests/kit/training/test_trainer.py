import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stages.kit.models.adapters import part_of
from stages.kit.training.batches import ConversationCollator
from stages.kit.training.trainer import ContractBreach, RecipeTrainer
from tests.kit.training.small import PARAMS, plan_for, weights


def test_training_moves_what_is_trained_and_nothing_else(build: Callable[..., RecipeTrainer]) -> None:
    plan = plan_for("r4-joint")
    trainer = build(plan)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == plan.schedule.num_steps == 4
    for name, parameter in trainer.model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(before[name], parameter), name
        elif "lora_B" in name:
            assert not torch.equal(before[name], parameter), name


def test_each_part_has_its_own_learning_rate(build: Callable[..., RecipeTrainer]) -> None:
    trainer = build(plan_for("r4-joint", part_learning_rates={"vision": 3e-5}))
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    rates = {
        part_of(names[id(parameter)]): group["lr"]
        for group in trainer.create_optimizer().param_groups
        for parameter in group["params"]
    }
    scale = PARAMS.active.learning_rate_scale
    assert rates == {"vision": pytest.approx(3e-5 * scale), "llm": pytest.approx(1e-4 * scale)}


def test_accumulation_follows_the_trajectory_of_the_whole_batch(build: Callable[..., RecipeTrainer]) -> None:
    """The loss is weighted by tokens over the whole effective batch, whatever the micro-batch."""
    lora = PARAMS.recipe("r1-llm-only").lora
    assert lora is not None
    lora = replace(lora, dropout=0.0)
    ends = []
    for micro_batch in (4, 2, 1):
        trainer = build(plan_for("r1-llm-only", micro_batch=micro_batch, lora=lora))
        trainer.train()
        ends.append(weights(trainer))
    for other in ends[1:]:
        for name, tensor in ends[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=2e-5)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(build: Callable[..., RecipeTrainer]) -> None:
    ends = []
    for seed in (1, 1, 2):
        trainer = build(plan_for("r1-llm-only", seed=seed))
        trainer.train()
        ends.append(weights(trainer))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


@pytest.mark.parametrize("recipe", ["r1-llm-only", "r2-vision-only", "r4-joint"])
def test_checkpointing_changes_nothing_but_memory(build: Callable[..., RecipeTrainer], recipe: str) -> None:
    ends = []
    for checkpointing in (False, True):
        trainer = build(replace(plan_for(recipe), gradient_checkpointing=checkpointing))
        trainer.train()
        ends.append(weights(trainer))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_sent_back_through_a_frozen_vision_tower(
    build: Callable[..., RecipeTrainer], checkpointing: bool
) -> None:
    trainer = build(replace(plan_for("r1-llm-only"), gradient_checkpointing=checkpointing))
    seen: list[bool] = []
    visual = trainer.model.get_base_model().model.visual
    visual.blocks[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output.requires_grad))
    trainer.train()
    assert seen
    assert not any(seen)


def test_progress_is_shown_once(build: Callable[..., RecipeTrainer]) -> None:
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    trainer = build(plan_for("r1-llm-only"))
    shown = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ProgressCallback)]
    assert shown == []
    assert not any(isinstance(callback, PrinterCallback) for callback in trainer.callback_handler.callbacks)


def test_the_collator_can_go_to_data_loader_workers(build: Callable[..., RecipeTrainer]) -> None:
    trainer = build(plan_for("r1-llm-only"))
    collator = trainer.data_collator
    assert isinstance(collator, ConversationCollator)
    collator.converse = copy.copy
    again = pickle.loads(pickle.dumps(collator))  # noqa: S301 - our own bytes
    assert torch.equal(again([{"sample": 1}])["labels"], collator([{"sample": 1}])["labels"])


def test_a_run_unlike_its_plan_does_not_start(build: Callable[..., RecipeTrainer]) -> None:
    with pytest.raises(ContractBreach, match="llm has"):
        build(plan_for("r1-llm-only"), llm=7)


def test_a_part_without_gradients_stops_the_first_step(build: Callable[..., RecipeTrainer]) -> None:
    trainer = build(plan_for("r2-vision-only"))
    trainer.model.model.visual.merger.register_forward_hook(lambda *_: _[-1].detach())
    trainer.model.model.language_model.embed_tokens.register_forward_hook(lambda *_: _[-1].requires_grad_())
    with pytest.raises(ContractBreach, match=r"vision is trained, but .* got no gradient"):
        trainer.train()
