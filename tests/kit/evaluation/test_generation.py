import copy
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedModel

from stages.core.params.schema import DeviceParams
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answer import generate_answers
from stages.kit.models.load import load_model
from stages.kit.models.prompts import Processor, encode, load_processor, tokenizer_of
from stages.kit.planning.ladder import read_at_once


def question(index: int) -> Conversation:
    """Pictures and texts of different sizes, so that a batch needs padding."""
    picture = Image.new("RGB", (60 + 30 * (index % 3), 80), (40 * index % 255, 90, 200))
    text = "Where? " * (index % 4 + 1)
    content = [{"type": "image"}, {"type": "text", "text": text}]
    return Conversation(sample_id=str(index), messages=[{"role": "user", "content": content}], images=[picture])


QUESTIONS = [question(index) for index in range(7)]


def alone(model: PreTrainedModel, processor: Processor, asked: Conversation, max_new_tokens: int) -> list[int]:
    """The tokens that transformers itself answers, without the end of the turn."""
    inputs = encode(processor, [asked], padding_side="left")
    length, tokenizer = inputs["input_ids"].shape[1], tokenizer_of(processor)
    row = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    configured = model.generation_config.eos_token_id
    ends = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    return list(takewhile(lambda token: token not in ends, row[0, length:].tolist()))


@pytest.mark.parametrize("batch_size", [1, 3, 16, 24, 56])
def test_batches_answer_as_one_by_one(tiny_vlm: Path, batch_size: int) -> None:
    model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    processor = load_processor(tiny_vlm, None)
    expected = [processor.tokenizer.decode(alone(model, processor, question, 12)) for question in QUESTIONS]
    assert len(set(expected)) > 1, "the questions must not all have one answer, or the test could not fail"
    assert generate_answers(model, processor, QUESTIONS, batch_size=batch_size, max_new_tokens=12) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 4, 24, 72])
def test_an_answer_leaves_the_batch_as_soon_as_it_has_ended(tiny_dense: Any, batch_size: int) -> None:
    """No token is computed for an answer that has ended; nor is any answer changed by others that come and leave."""
    model, tokenizer = copy.deepcopy(tiny_dense[0]), tiny_dense[1]
    words = ["What", "was", "said", "about", "the", "budget", "It", "agreed"]
    texts = (" ".join(words[(index * step) % len(words)] for index in range(3 + step * 5 % 11)) for step in range(9))
    asked = [Conversation(sample_id="", messages=[{"role": "user", "content": text}]) for text in texts]
    # An end that comes in some of the answers.
    whole = [alone(model, tokenizer, each, 12) for each in asked]
    counts = {token: sum(token in ids for ids in whole) for token in range(320)}
    model.generation_config.eos_token_id = max(counts, key=lambda token: (counts[token] % 8, token))
    expected = [alone(model, tokenizer, each, 12) for each in asked]
    passes: list[tuple[int, int]] = []  # rows and tokens
    model.register_forward_pre_hook(
        lambda _model, _args, inputs: passes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    answers = generate_answers(model, tokenizer, asked, batch_size=batch_size, max_new_tokens=12)
    assert answers == [tokenizer.decode(ids) for ids in expected]
    lengths = [len(ids) for ids in expected]
    assert len(set(lengths)) > 2, "else all would end together"
    assert sum(rows for rows, _ in passes) == sum(min(length + 1, 12) for length in lengths)
    reads = [number for number, (_, tokens) in enumerate(passes) if tokens > 1]
    steps = [rows for number, (rows, _) in enumerate(passes) if number not in reads]
    assert all(rows <= batch_size for rows in steps)
    waiting = [rows for number, (rows, _) in enumerate(passes[: reads[-1]]) if number not in reads]
    assert all(rows > batch_size - read_at_once(batch_size) for rows in waiting), "a place was left empty"


def test_each_answer_of_a_batch_ends_as_soon_as_it_is_complete(tiny_vlm: Path) -> None:
    model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    processor = load_processor(tiny_vlm, None)

    def complete(text: str) -> bool:
        return len(text) >= 10 or "e" in text

    ended = generate_answers(model, processor, QUESTIONS[:5], batch_size=40, max_new_tokens=12, complete=complete)
    growing = [generate_answers(model, processor, QUESTIONS[:5], batch_size=40, max_new_tokens=n) for n in range(1, 13)]
    assert ended == [next(filter(complete, answers)) for answers in zip(*growing, strict=True)]
    assert len({len(answer) for answer in ended}) > 1, "else they would all end together"


def test_answers_that_are_cut_are_counted_aloud(tiny_vlm: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    processor = load_processor(tiny_vlm, None)

    def said(complete: Callable[[str], bool] | None = None) -> list[str]:
        caplog.clear()
        generate_answers(model, processor, QUESTIONS[:3], batch_size=2, max_new_tokens=4, complete=complete)
        return [record.message for record in caplog.records if "cut" in record.message]

    assert said() == ["3 answers cut at max_new_tokens 4"]
    assert said(lambda text: len(text) > 1) == []
    model.generation_config.eos_token_id = list(range(model.config.text_config.vocab_size))
    assert said() == []


def test_an_answer_is_cut_at_the_end_of_its_turn(tiny_vlm: Path) -> None:
    model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    processor = load_processor(tiny_vlm, None)
    inputs = encode(processor, [question(0)], padding_side="left")
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert ids[3] not in ids[:3]
    model.generation_config.eos_token_id = ids[3]
    (answer,) = generate_answers(model, processor, QUESTIONS[:1], batch_size=1, max_new_tokens=8)
    assert answer == processor.tokenizer.decode(ids[:3])


def test_a_question_that_may_be_cut_leaves_room_for_the_answer(tiny_dense: Any) -> None:
    model, tokenizer = tiny_dense
    parts = [{"type": "text", "text": "so " * 400, "shortenable": True}, {"type": "text", "text": "What?"}]
    asked = Conversation(sample_id="long", messages=[{"role": "user", "content": parts}])
    lengths = []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    generate_answers(model, tokenizer, [asked], batch_size=1, max_new_tokens=7, max_length=100)
    hook.remove()
    assert 88 <= lengths[0] <= 93
