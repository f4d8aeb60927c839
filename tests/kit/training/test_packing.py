"""Samples with pictures behind one another in a row: loss and gradients are those of a padded batch, part by part, and
would not be where attention went from one sample to another."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from stages.core.params.schema import PartsParams
from stages.kit.data.conversation import Conversation
from stages.kit.models import kernels
from stages.kit.models.adapters import part_of
from stages.kit.models.kernels import PackedRow
from stages.kit.models.load import load_config
from stages.kit.planning.plan import Plan
from stages.kit.training.batches import IGNORED, ConversationCollator, packed
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.training.small import plan_for
from tests.tiny import table_conversation

EVERYTHING = PartsParams(vision="full", projector="full", llm="full")
Build = Callable[..., RecipeTrainer]
Taken = tuple[float, dict[str, torch.Tensor]]
"""The loss of a step, and by part, the gradients of its parameters in a row."""


class TakeGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        parts: dict[str, list[torch.Tensor]] = {}
        for name, parameter in model.named_parameters():
            parts.setdefault(part_of(name), []).append(parameter.grad.flatten().clone())
        self.found = {part: torch.cat(gradients) for part, gradients in parts.items()}


def one_step(*, micro_batch: int = 8, **settings: Any) -> Plan:
    """One step of 8 samples that trains everything."""
    recipe: Any = {"parts": EVERYTHING, "effective_batch": 8, "epochs": 1, "max_grad_norm": 1e9}
    return replace(plan_for("r2-vision-only", micro_batch=micro_batch, **recipe), **settings)


def taken(trainer: RecipeTrainer) -> Taken:
    trainer.add_callback(gradients := TakeGradients())
    trainer.remove_callback(trainer.rehearsal)
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return loss, gradients.found


def unlike(one: Taken, other: Taken) -> dict[str, float]:
    """How far apart they are, relative to one: their losses, and each part's gradients."""
    apart = {part: float((other[1][part] - each).norm() / each.norm()) for part, each in one[1].items()}
    return {"loss": abs(other[0] / one[0] - 1), **apart}


@pytest.fixture
def padded(build: Build) -> Taken:
    return taken(build(one_step()))


@pytest.mark.parametrize(
    ("micro_batch", "settings"),
    [(8, {}), (2, {}), (1, {}), (4, {"gradient_checkpointing": True}), (4, {"attn": "eager"})],
    ids=["whole", "2 x 4", "1 x 8", "checkpointed", "eager"],
)
def test_loss_and_gradients_are_those_of_a_padded_batch_part_by_part(
    build: Build, padded: Taken, micro_batch: int, settings: dict[str, Any]
) -> None:
    found = unlike(padded, taken(build(one_step(micro_batch=micro_batch, padding_free=True, **settings))))
    assert found.keys() == {"loss", "vision", "projector", "llm"}
    assert max(found.values()) < 1e-5, found


def assert_unlike(one: Taken, other: Taken) -> None:
    """In each part's gradients. The mean loss hardly moves where it is one of random weights."""
    found = unlike(one, other)
    assert min(found[part] for part in one[1]) > 1e-3, found


def three_rows(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "position_ids": batch["position_ids"][1:]}


def counted_through(batch: dict[str, Any]) -> dict[str, Any]:
    places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["position_ids"])
    return {**batch, "position_ids": places}


def places_of_text(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "position_ids": batch["position_ids"][:1].expand(4, -1, -1)}


@pytest.mark.parametrize(
    ("attn", "spoil"),
    [("sdpa", places_of_text), ("sdpa", counted_through), ("eager", counted_through), ("eager", three_rows)],
)
def test_with_wrong_positions_they_are_not(build: Build, padded: Taken, attn: Any, spoil: Any) -> None:
    trainer = build(one_step(padding_free=True, attn=attn))
    collator = trainer.data_collator
    trainer.data_collator = lambda examples: spoil(collator(examples))
    assert_unlike(padded, taken(trainer))


def test_nor_are_they_where_samples_see_each_other(
    build: Build, padded: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_one(position_ids: torch.Tensor) -> PackedRow:
        length = position_ids.shape[1]
        return PackedRow([length], torch.tensor([0, length], dtype=torch.int32))

    monkeypatch.setattr(kernels, "row_of", all_one)
    assert_unlike(padded, taken(build(one_step(padding_free=True))))


def test_three_rows_of_positions_are_refused_in_place_of_sdpa(build: Build) -> None:
    trainer = build(one_step(padding_free=True))
    collator = trainer.data_collator
    trainer.data_collator = lambda examples: three_rows(collator(examples))
    with pytest.raises(AssertionError, match="only positions say"):
        trainer.train()


def with_longer_and_longer_answers(collator: ConversationCollator) -> None:
    """So that a padded batch has much padding, sorted or not."""

    def converse(number: int) -> Conversation:
        sample = table_conversation(number)
        (part,) = sample.messages[-1]["content"]
        part["text"] *= number + 1
        return sample

    collator.converse, collator.records = converse, range(8)


@pytest.mark.parametrize("padding_free", [True, False])
def test_nearly_every_position_that_is_computed_is_a_token_and_just_tokens_are_counted(
    build: Build, padding_free: bool
) -> None:
    trainer = build(one_step(micro_batch=4, padding_free=padding_free))
    collator = trainer.data_collator
    assert isinstance(collator, ConversationCollator)
    with_longer_and_longer_answers(collator)
    computed: list[int] = []
    layer = trainer.model.model.language_model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[:2].numel()))
    trainer.remove_callback(trainer.rehearsal)
    trainer.train()
    (counted,) = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    assert counted == sum(collator.lengths)
    share = counted / sum(computed)
    assert share >= 0.97 if padding_free else share < 0.9, share


def test_a_row_holds_what_a_padded_batch_holds_without_the_padding(build: Build) -> None:
    trainer = build(one_step(padding_free=True))
    packing = trainer.data_collator
    assert isinstance(packing, ConversationCollator)
    packing.converse, packing.records = table_conversation, range(8)
    padding = pickle.loads(pickle.dumps(packing))  # noqa: S301 - our own bytes, as data-loader workers get them
    padding.packed_for = None
    examples = [{"sample": number} for number in (1, 2, 7)]
    row, batch = packing(examples), padding(examples)
    real = batch["attention_mask"].bool()
    assert not real.all()
    assert row.keys() == {*batch, "position_ids"} - {"attention_mask"}
    assert row["input_ids"].tolist() == [batch["input_ids"][real].tolist()]
    assert row["position_ids"].shape == (4, 1, real.sum())
    assert row["position_ids"][0].tolist() == [[place for sample in real for place in range(int(sample.sum()))]]
    assert torch.equal(row["pixel_values"], batch["pixel_values"])
    assert row["labels"][0][1:].ne(IGNORED).sum() == batch["labels"][:, 1:].ne(IGNORED).sum()
    assert [len(packing.largest_batch(count)["input_ids"]) for count in (1, 3)] == [1, 1]


def test_text_alone_gets_four_equal_rows_of_positions(tiny_vlm: Path) -> None:
    """Given two dimensions, Qwen2-VL would take the row for one sample."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"input_ids": mask, "attention_mask": mask, "labels": mask}
    row = packed(batch, load_config(tiny_vlm), "all-tokens")
    assert row["position_ids"].tolist() == [[[0, 1, 2, 0, 1]]] * 4
    assert row["labels"].tolist() == [[IGNORED, 1, 1, IGNORED, 1]]
    assert batch["labels"].min() == 0
