"""Which tokens of a batch count, and that a packed row gives the loss and gradients of a padded batch."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

from stages.core.errors import UserError
from stages.core.params.schema import PartsParams
from stages.data.conversation import Conversation, message
from stages.models.adapters import part_of
from stages.models.load import load_config
from stages.models.prompts import Processor, load_processor, tokenizer_of
from stages.planning.plan import Plan
from stages.training.batches import IGNORED, ConversationCollator, packed
from stages.training.trainer import RecipeTrainer
from tests.plans import changed
from tests.tiny import table_conversation
from tests.training.small import TakeGradients, plan_for

ANSWER = "<|object_ref_start|>nutrition-table<|object_ref_end|><|box_start|>(1,22),(333,999)<|box_end|>"
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
EVERYTHING = PartsParams(vision="full", projector="full", llm="full")
Build = Callable[..., RecipeTrainer]


def conversation(*answers: str, images: int = 1) -> Conversation:
    messages: list[dict[str, Any]] = []
    for turn, answer in enumerate(answers):
        messages += [message("user", f"Question {turn}?"), message("assistant", answer)]
    messages[0]["content"] = [{"type": "image"}] * images + messages[0]["content"]
    sizes = [(60 + 56 * number, 60) for number in range(images)]
    return Conversation(sample_id="sample-7", messages=messages, images=[Image.new("RGB", size) for size in sizes])


@pytest.fixture(scope="module")
def processor(tiny_vlm: Path) -> Processor:
    return load_processor(tiny_vlm, None)


def collator_of(
    processor: Processor, *conversations: Conversation, loss: Any = "assistant-only", max_length: int = 4096
) -> ConversationCollator:
    return ConversationCollator(processor, conversations, lambda it: it, loss=loss, max_length=max_length)


def collate(processor: Processor, *conversations: Conversation, **options: Any) -> dict[str, Any]:
    collator = collator_of(processor, *conversations, **options)
    return collator([{"sample": index} for index in range(len(conversations))])


def counted_text(batch: dict[str, Any], processor: Processor) -> str:
    """The text of the first row's tokens that count."""
    return str(tokenizer_of(processor).decode(batch["labels"][0][batch["labels"][0] != IGNORED]))


def test_all_tokens_counts_all_text_and_no_image_token(processor: Processor) -> None:
    batch = collate(processor, conversation(ANSWER, images=2), loss="all-tokens")
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    vision = {tokenizer_of(processor).convert_tokens_to_ids(token) for token in VISION}
    images = torch.tensor([token in vision for token in ids.tolist()])
    assert int(images.sum()) > 2 * 2
    assert torch.equal(labels != IGNORED, ~images)
    assert torch.equal(labels[~images], ids[~images])


@pytest.mark.parametrize("loss", ["assistant-only", "all-tokens"])
def test_padding_never_counts_and_changes_no_sample(processor: Processor, loss: str) -> None:
    samples = conversation("short"), conversation(ANSWER * 2, images=2)
    together = collate(processor, *samples, loss=loss)
    assert (together["labels"][together["attention_mask"] == 0] == IGNORED).all()
    alone = [collate(processor, sample, loss=loss) for sample in samples]
    for row, sample in enumerate(alone):
        length = sample["input_ids"].shape[1]
        assert torch.equal(together["input_ids"][row, :length], sample["input_ids"][0])
        assert torch.equal(together["labels"][row, :length], sample["labels"][0])
    assert torch.equal(together["pixel_values"], torch.cat([sample["pixel_values"] for sample in alone]))


@pytest.mark.parametrize("images", [0, 1, 2])
def test_lengths_need_no_pixels_and_a_longer_sample_is_refused_by_name(processor: Processor, images: int) -> None:
    samples = [conversation(ANSWER, images=images), conversation("short", images=images), conversation(ANSWER * 3)]
    lengths = [collate(processor, sample)["input_ids"].shape[1] for sample in samples]
    longest = max(lengths)
    collator = collator_of(processor, *samples, max_length=longest)
    assert collator.lengths == lengths
    assert f"to {longest} tokens" in collator.length_summary()
    for too_long in (
        lambda: collator_of(processor, *samples, max_length=longest - 1).length_summary(),
        lambda: collate(processor, *samples, max_length=longest - 1),
    ):
        with pytest.raises(UserError, match=rf"sample-7 has {longest} tokens, more than max_length {longest - 1}"):
            too_long()


def test_a_sample_longer_than_the_positions_of_the_base_is_refused_by_name(
    processor: Processor, tiny_vlm: Path
) -> None:
    collator, config = collator_of(processor, conversation("no"), conversation("yes " * 20)), load_config(tiny_vlm)
    longest = max(collator.lengths)
    config.get_text_config().max_position_embeddings = longest
    collator.require_positions(config, collator.records, None)
    scored = replace(conversation("yes " * 21), sample_id="sample-8")
    with pytest.raises(UserError, match=rf"sample-8 has \d+ tokens, and the base has {longest} positions"):
        collator.require_positions(config, [scored], None)
    config.get_text_config().max_position_embeddings = longest - 1
    with pytest.raises(UserError, match=rf"sample-7 has {longest} tokens, and the base has {longest - 1} positions"):
        collator.require_positions(config, [], None)


@pytest.mark.parametrize("text", ["<|im_start|>assistant\nfake", "a<|im_end|>b"])
def test_chat_markup_in_an_answer_or_a_question_is_refused(processor: Processor, text: str) -> None:
    asked = conversation("answer")
    asked.messages[0]["content"].append({"type": "text", "text": text})
    for sample in (conversation(text), asked):
        with pytest.raises(UserError, match=r"sample sample-7 holds chat markup, <\|im_"):
            collate(processor, sample)


@given(answer=st.text(alphabet=st.characters(exclude_characters="<|>", exclude_categories=["Cs"]), max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_answer_counts_whole(answer: str, processor: Processor) -> None:
    found = counted_text(collate(processor, conversation(answer, images=0)), processor)
    normal = tokenizer_of(processor).decode(tokenizer_of(processor).encode(answer, add_special_tokens=False))
    assert found.endswith("<|im_end|>")
    assert found.removesuffix("<|im_end|>").lstrip("\n\r") == normal.lstrip("\n\r")


def test_a_text_that_may_be_cut_is_cut_and_the_answer_counts_whole(processor: Processor) -> None:
    sample = conversation(ANSWER, images=0)
    sample.messages[0]["content"].insert(0, {"type": "text", "text": "Some words. " * 400, "shortenable": True})
    batch = collate(processor, sample, max_length=200)
    assert 195 <= batch["input_ids"].shape[1] <= 200
    assert counted_text(batch, processor) == f"{ANSWER}<|im_end|>"
    assert collator_of(processor, sample, max_length=200).lengths == [batch["input_ids"].shape[1]]


def test_the_largest_batch_has_the_longest_samples(processor: Processor, answered: list[Conversation]) -> None:
    collator = collator_of(processor, *answered)
    assert len(set(collator.lengths)) > 1
    for count in (3, 100):
        lengths = collator.largest_batch(count)["attention_mask"].sum(1).tolist()
        assert lengths == sorted(collator.lengths, reverse=True)[:count]
    middle = sorted(collator.lengths)[len(collator.lengths) // 2]
    at_most = collator.largest_batch(1, max_length=middle)["attention_mask"].sum(1).tolist()
    assert at_most == [middle]
    shortest = collator.largest_batch(2, max_length=1)["attention_mask"].sum(1).tolist()
    assert shortest == sorted(collator.lengths)[:2][::-1]


# One optimizer step of 8 samples that trains everything, padded and packed.

Step = tuple[float, dict[str, torch.Tensor]]
"""The loss, and by part, the gradients of its parameters in a row."""


def one_step(*, micro_batch: int = 8, **settings: Any) -> Plan:
    recipe: Any = {"parts": EVERYTHING, "effective_batch": 8, "epochs": 1, "max_grad_norm": 1e9}
    return changed(plan_for("r2-vision-only", micro_batch=micro_batch, **recipe), **settings)


def take(trainer: RecipeTrainer) -> Step:
    trainer.add_callback(taken := TakeGradients())
    trainer.remove_callback(trainer.rehearsal)
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    parts: dict[str, list[torch.Tensor]] = {}
    for name, gradient in taken.gradients.items():
        parts.setdefault(part_of(name), []).append(gradient.flatten())
    return loss, {part: torch.cat(gradients) for part, gradients in parts.items()}


def differences(one: Step, other: Step) -> dict[str, float]:
    """Relative to one: of the losses, and of each part's gradients."""
    parts = {part: float((other[1][part] - each).norm() / each.norm()) for part, each in one[1].items()}
    return {"loss": abs(other[0] / one[0] - 1), **parts}


def assert_same_step(one: Step, other: Step) -> None:
    found = differences(one, other)
    assert found.keys() == {"loss", "vision", "projector", "llm"}
    assert max(found.values()) < 1e-5, found


@pytest.fixture(scope="module")
def padded(build: Build) -> Step:
    return take(build(one_step()))


@pytest.mark.parametrize(
    ("micro_batch", "settings"),
    [(8, {}), (2, {}), (1, {}), (4, {"gradient_checkpointing": True}), (4, {"attn": "eager"})],
    ids=["whole", "2 x 4", "1 x 8", "checkpointed", "eager"],
)
def test_a_packed_step_is_a_padded_step(build: Build, padded: Step, micro_batch: int, settings: dict[str, Any]) -> None:
    assert_same_step(padded, take(build(one_step(micro_batch=micro_batch, padding_free=True, **settings))))


def test_a_row_holds_a_padded_batch_without_its_padding(build: Build) -> None:
    packing = build(one_step(padding_free=True)).data_collator
    packing.converse, packing.records = table_conversation, range(8)
    padding = pickle.loads(pickle.dumps(packing))  # noqa: S301 - our own bytes, as data-loader workers get them
    padding.packed_for = None
    examples = [{"sample": number} for number in (1, 2, 7)]
    row, batch = packing(examples), padding(examples)
    real = batch["attention_mask"].bool()
    assert not real.all()
    for_flash_attention = FlashAttentionKwargs.__annotations__  # with which transformers asks a GPU for nothing
    assert row.keys() == {*batch, *for_flash_attention, "position_ids"} - {"attention_mask"}
    assert row["cu_seq_lens_q"].diff().tolist() == real.sum(1).tolist()
    assert row["max_length_q"] == int(real.sum(1).max())
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
