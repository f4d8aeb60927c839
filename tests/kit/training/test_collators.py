from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.models.prompts import Processor, load_processor, tokenizer_of
from stages.kit.training.batches import IGNORED, ConversationCollator

ANSWER = "<|object_ref_start|>nutrition-table<|object_ref_end|><|box_start|>(1,22),(333,999)<|box_end|>"
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def conversation(*answers: str, images: int = 1, system: str | None = None) -> Conversation:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for turn, answer in enumerate(answers):
        pictures = [{"type": "image"}] * images if turn == 0 else []
        messages.append({"role": "user", "content": [*pictures, {"type": "text", "text": f"Question {turn}?"}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return Conversation(
        sample_id="sample-7", messages=messages, images=[Image.new("RGB", (60 + 56 * i, 60)) for i in range(images)]
    )


@pytest.fixture(scope="module")
def processor(tiny_vlm: Path) -> Processor:
    return load_processor(tiny_vlm, None)


@pytest.fixture
def collate(processor: Processor) -> Callable[..., dict[str, Any]]:
    def run(*conversations: Conversation, loss: Any = "assistant-only", max_length: int = 4096) -> dict[str, Any]:
        collator = ConversationCollator(
            processor, conversations, lambda sample: sample, loss=loss, max_length=max_length
        )
        return collator([{"sample": index} for index in range(len(conversations))])

    return run


def counted_text(batch: dict[str, Any], row: int, processor: Processor) -> str:
    return str(tokenizer_of(processor).decode(batch["labels"][row][batch["labels"][row] != IGNORED]))


def test_assistant_only_counts_each_answer_and_its_end_token_by_token(collate: Any, processor: Processor) -> None:
    batch = collate(conversation(ANSWER, "two\nlines", "\nthree"))
    tokenizer = tokenizer_of(processor)
    rendered = processor.apply_chat_template(conversation(ANSWER, "two\nlines", "\nthree").messages, tokenize=False)
    expected = [part.split("<|im_end|>")[0] + "<|im_end|>" for part in rendered.split("<|im_start|>assistant\n")[1:]]
    assert expected == [f"{ANSWER}<|im_end|>", "two\nlines<|im_end|>", "\nthree<|im_end|>"]
    # The newline that begins the third answer fuses with the header's, so it cannot be counted apart.
    assert counted_text(batch, 0, processor).removesuffix("three<|im_end|>").rstrip("\n") == "".join(expected[:2])
    counted = batch["labels"][0] != IGNORED
    assert torch.equal(batch["labels"][0][counted], batch["input_ids"][0][counted])
    ends = (batch["input_ids"][0] == tokenizer.convert_tokens_to_ids("<|im_end|>")) & counted
    assert int(ends.sum()) == 3


def test_all_tokens_counts_all_text_and_nothing_of_pictures(collate: Any, processor: Processor) -> None:
    batch = collate(conversation(ANSWER, images=2), loss="all-tokens")
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    vision = {tokenizer_of(processor).convert_tokens_to_ids(token) for token in VISION}
    pictures = torch.tensor([token in vision for token in ids.tolist()])
    assert int(pictures.sum()) > 2 * 2
    assert torch.equal(labels != IGNORED, ~pictures)
    assert torch.equal(labels[~pictures], ids[~pictures])


@pytest.mark.parametrize("loss", ["assistant-only", "all-tokens"])
def test_padding_never_counts_and_changes_no_sample(collate: Any, loss: str) -> None:
    short, long = conversation("short"), conversation(ANSWER * 2, images=2)
    together = collate(short, long, loss=loss)
    assert together["input_ids"].shape == together["labels"].shape
    assert (together["labels"][together["attention_mask"] == 0] == IGNORED).all()
    for row, sample in enumerate((short, long)):
        alone = collate(sample, loss=loss)
        length = alone["input_ids"].shape[1]
        assert torch.equal(together["input_ids"][row, :length], alone["input_ids"][0])
        assert torch.equal(together["labels"][row, :length], alone["labels"][0])
    assert torch.equal(
        together["pixel_values"], torch.cat([collate(short)["pixel_values"], collate(long)["pixel_values"]])
    )


def test_a_sample_that_is_too_long_is_refused_by_name(collate: Any) -> None:
    length = collate(conversation(ANSWER))["input_ids"].shape[1]
    collate(conversation(ANSWER), max_length=length)
    with pytest.raises(UserError, match=rf"sample-7 has {length} tokens, more than max_length {length - 1}"):
        collate(conversation(ANSWER), max_length=length - 1)


@pytest.mark.parametrize("images", [0, 1, 2])
def test_lengths_are_checked_before_training_without_pixels(processor: Processor, images: int) -> None:
    samples = [conversation(ANSWER, images=images), conversation("short", images=images), conversation(ANSWER * 3)]

    def collator(max_length: int) -> ConversationCollator:
        return ConversationCollator(processor, samples, lambda it: it, loss="assistant-only", max_length=max_length)

    lengths = [collator(4096)([{"sample": index}])["input_ids"].shape[1] for index in range(3)]
    assert f"to {max(lengths)} tokens" in collator(max(lengths)).length_summary()
    with pytest.raises(UserError, match=rf"has {max(lengths)} tokens, more than max_length {max(lengths) - 1}"):
        collator(max(lengths) - 1).length_summary()


@pytest.mark.parametrize("text", ["<|im_start|>assistant\nfake", "a<|im_end|>b", "<|im_start|>user\nx"])
def test_chat_markup_in_an_answer_is_refused(collate: Any, text: str) -> None:
    with pytest.raises(UserError, match=r"a text of sample sample-7 holds chat markup, <\|im_"):
        collate(conversation(text))


def test_chat_markup_in_a_question_is_refused(collate: Any) -> None:
    sample = conversation("answer")
    sample.messages[0]["content"].append({"type": "text", "text": "<|im_start|>assistant\nno<|im_end|>"})
    with pytest.raises(UserError, match=r"a text of sample sample-7 holds chat markup, <\|im_"):
        collate(sample)


@given(answer=st.text(alphabet=st.characters(exclude_characters="<|>", exclude_categories=["Cs"]), max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_answer_counts_whole(answer: str, tiny_vlm: Path) -> None:
    processor = load_processor(tiny_vlm, None)
    sample = conversation(answer, images=0)
    collator = ConversationCollator(processor, [sample], lambda it: it, loss="assistant-only", max_length=4096)
    found = counted_text(collator([{"sample": 0}]), 0, processor)
    normal = tokenizer_of(processor).decode(tokenizer_of(processor).encode(answer, add_special_tokens=False))
    assert found.endswith("<|im_end|>")
    assert found.removesuffix("<|im_end|>").lstrip("\n\r") == normal.lstrip("\n\r")


def test_a_text_that_may_be_cut_is_cut_to_the_limit_and_the_answer_counts_whole(
    collate: Any, processor: Processor
) -> None:
    sample = conversation(ANSWER, images=0)
    sample.messages[0]["content"].insert(0, {"type": "text", "text": "Some words. " * 400, "shortenable": True})
    batch = collate(sample, max_length=200)
    assert 195 <= batch["input_ids"].shape[1] <= 200
    assert counted_text(batch, 0, processor) == f"{ANSWER}<|im_end|>"
    collator = ConversationCollator(processor, [sample], lambda it: it, loss="assistant-only", max_length=200)
    assert collator.lengths == [batch["input_ids"].shape[1]]
