"""The largest batch goes through first, and leaves nothing behind."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.kit.data.conversation import Conversation
from stages.kit.models.prompts import load_processor
from stages.kit.planning.ladder import lowered
from stages.kit.training.batches import ConversationCollator
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.training.small import PARAMS, plan_for, weights


@pytest.fixture
def collator(tiny_vlm: Path, answered: Sequence[Conversation]) -> ConversationCollator:
    processor = load_processor(tiny_vlm, None)
    return ConversationCollator(processor, answered, lambda sample: sample, loss="assistant-only", max_length=2048)


def test_the_largest_samples_are_those_with_the_most_tokens(collator: ConversationCollator) -> None:
    """Every second table is on a wider picture."""
    lengths = [int(collator([{"sample": sample}])["attention_mask"].sum()) for sample in range(8)]
    assert collator.lengths == lengths
    assert len(set(lengths)) > 1
    largest = collator.largest_samples(3)
    assert [lengths[sample] for sample in largest] == sorted(lengths, reverse=True)[:3]
    assert collator.largest_samples(3) == largest
    assert sorted(collator.largest_samples(100)) == list(range(8))


@pytest.mark.parametrize("recipe", ["r1-llm-only", "r2-vision-only"])
def test_a_rehearsed_training_is_the_same_bit_for_bit(
    build: Callable[..., RecipeTrainer], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """r1 draws random numbers, for its dropout."""
    plan = plan_for(recipe, micro_batch=2)
    ends, logs = [], []
    passes: list[int] = []
    for rehearsed in (True, False):
        trainer = build(plan)
        if not rehearsed:
            monkeypatch.setattr(trainer.rehearsal, "rehearse", lambda: 0)
        count_forward_passes(trainer, passes)
        trainer.train()
        ends.append(weights(trainer))
        logs.append([{k: v for k, v in entry.items() if not is_timing(k)} for entry in trainer.state.log_history])
    assert passes == [4 * 2 + 2, 4 * 2]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    assert logs[0] == logs[1]


def count_forward_passes(trainer: RecipeTrainer, passes: list[int]) -> None:
    passes.append(0)

    def count(*_: Any) -> None:
        passes[-1] += 1

    trainer.model.register_forward_pre_hook(count)


def is_timing(name: str) -> bool:
    return name.endswith(("_runtime", "_per_second"))


def test_the_rehearsal_is_of_the_largest_samples_with_the_optimizers_states_and_gradients_there(
    build: Callable[..., RecipeTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the fullest moment of the training."""
    seen: list[tuple[int, bool, bool]] = []
    trainer = build(plan_for("r2-vision-only", micro_batch=2))
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, count: Any) -> Any:
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        has_gradients = all(parameter.grad is not None for parameter in trained)
        seen.append((int(inputs["attention_mask"].sum()), bool(trainer.optimizer.state), has_gradients))
        return step(model, inputs, count)

    monkeypatch.setattr(trainer, "training_step", training_step)
    trainer.train()
    assert isinstance(trainer.data_collator, ConversationCollator)
    largest = sum(sorted(trainer.data_collator.lengths)[-2:])
    # Step 1 has two micro-batches; the rehearsal follows, and step 2 begins without gradients.
    assert seen[2:4] == [(largest, True, False), (largest, True, True)]
    assert not seen[4][2]


@pytest.mark.parametrize("recipe", ["r1-llm-only", "r4-joint"])
def test_micro_batches_of_2_x_8_and_1_x_16_follow_the_same_trajectory(
    build: Callable[..., RecipeTrainer], recipe: str
) -> None:
    """Each loss is weighted by its tokens; 40 samples of unlike lengths are two steps of 16 and one of 8."""
    lora = PARAMS.recipe(recipe).lora
    assert lora is not None
    planned = plan_for(recipe, micro_batch=2, samples=40, effective_batch=16, epochs=1, lora=replace(lora, dropout=0.0))
    ends, losses = [], []
    for attempt in (0, 1):
        plan = lowered(planned, attempt)
        assert plan is not None
        assert (plan.schedule.micro_batch, plan.schedule.grad_accumulation) == ((2, 8), (1, 16))[attempt]
        trainer = build(plan)
        collator = trainer.data_collator
        assert isinstance(collator, ConversationCollator)
        collator.records = [collator.records[index * index % 8] for index in range(40)]
        trainer.train()
        ends.append(weights(trainer))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=0, atol=2e-5)
