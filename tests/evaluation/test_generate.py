"""Generation in batches is the same as one by one, and a batch is as large as the device allows."""

import copy
import threading
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, EvaluationParams
from stages.core.tasks import load_task
from stages.data.conversation import Conversation, message
from stages.evaluation.generate import (
    Ending,
    batch_size_for,
    encoded_batches,
    load_generator,
)
from stages.models.load import load_model
from stages.models.prompts import Processor, encode, end_tokens, load_processor, tokenizer_of
from stages.planning.ladder import prefill_batch_size
from tests import ROOT
from tests.tiny import generator_of, table_conversation

DETECTION = load_task("detection", "samples")
TINY = replace(load_params(ROOT / "params.yaml").on("tiny").active, images=None)
TABLES = [table_conversation(index, answered=False) for index in range(5)]


@pytest.mark.parametrize(("attempt", "batches"), [(0, [2, 2, 1]), (1, [1] * 5), (4, [1] * 5)])
def test_each_attempt_halves_the_batch(tiny_vlm: Path, attempt: int, batches: list[int]) -> None:
    profile = replace(TINY, evaluation=EvaluationParams(batch_size=16, max_new_tokens=1))
    batch_size = batch_size_for(profile.evaluation, len(TABLES), largest=64, attempt=attempt)
    generator, _ = load_generator(tiny_vlm, profile, DETECTION, answer_format=None, batch_size=batch_size)
    seen = []
    generator.model.model.visual.register_forward_pre_hook(
        lambda _module, _args, inputs: seen.append(len(inputs["grid_thw"])), with_kwargs=True
    )
    completions = generator.completions(TABLES)
    assert (len(completions), seen) == (5, batches)


def test_a_batch_of_one_cannot_be_halved() -> None:
    with pytest.raises(UserError, match="a batch of 3 cannot be halved 2 times"):
        batch_size_for(EvaluationParams(batch_size=3, max_new_tokens=5), 5, largest=64, attempt=2)


def test_another_tasks_model_is_refused(tiny_vlm: Path) -> None:
    with pytest.raises(UserError, match="AMR parsing trains text models"):
        load_generator(tiny_vlm, TINY, load_task("amr", "samples"), answer_format="full", batch_size=1)


def test_a_baselines_option_that_its_template_does_not_have_is_refused(tiny_vlm: Path) -> None:
    options: Any = {"batch_size": 1, "template_options": {"enable_thinking": True}}
    with pytest.raises(UserError, match="the chat template has no option 'enable_thinking'"):
        load_generator(tiny_vlm, TINY, DETECTION, answer_format=None, **options)


@pytest.mark.parametrize(
    ("batch_size", "largest", "attempt", "expected"),
    [
        ("auto", 64, 0, 8),  # the power of two that all five questions go into
        ("auto", 64, 2, 2),
        ("auto", 4, 0, 4),  # all that the plan predicts to fit
        (48, 4, 0, 48),
    ],
)
def test_an_auto_batch_is_no_larger_than_planned_or_needed(
    batch_size: Any, largest: int, attempt: int, expected: int
) -> None:
    settings = EvaluationParams(batch_size=batch_size, max_new_tokens=5)
    assert batch_size_for(settings, len(TABLES), largest=largest, attempt=attempt) == expected


def question(index: int) -> Conversation:
    """Images and texts of different sizes, so that a batch needs padding."""
    image = Image.new("RGB", (60 + 30 * (index % 3), 80), (40 * index % 255, 90, 200))
    text = "Where? " * (index % 4 + 1)
    content = [{"type": "image"}, {"type": "text", "text": text}]
    return Conversation(sample_id=str(index), messages=[{"role": "user", "content": content}], images=[image])


QUESTIONS = [question(index) for index in range(7)]


def alone(model: PreTrainedModel, processor: Processor, asked: Conversation, max_new_tokens: int) -> list[int]:
    """The tokens that transformers itself generates, without the end of the turn."""
    inputs = encode(processor, [asked], padding_side="left")
    length, tokenizer = inputs["input_ids"].shape[1], tokenizer_of(processor)
    row = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    configured = model.generation_config.eos_token_id
    ends = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    return list(takewhile(lambda token: token not in ends, row[0, length:].tolist()))


@pytest.mark.parametrize("batch_size", [1, 3, 24, 56])
def test_batches_generate_the_same_as_one_by_one(tiny_vlm: Path, batch_size: int) -> None:
    model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    processor = load_processor(tiny_vlm, None)
    expected = [processor.tokenizer.decode(alone(model, processor, question, 12)) for question in QUESTIONS]
    assert len(set(expected)) > 1, "the questions must not all have one completion, or the test could not fail"
    generator = generator_of(model, processor, batch_size=batch_size, max_new_tokens=12)
    assert generator.completions(QUESTIONS) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 4, 24, 72])
def test_a_completion_leaves_the_batch_when_it_ends(tiny_dense: Any, batch_size: int) -> None:
    """No token is computed for an ended completion, and others that join and leave change no completion."""
    model, tokenizer = copy.deepcopy(tiny_dense)
    words = ["What", "was", "said", "about", "the", "budget", "It", "agreed"]
    texts = (" ".join(words[(index * step) % len(words)] for index in range(3 + step * 5 % 11)) for step in range(9))
    asked = [Conversation(sample_id="", messages=[message("user", text)]) for text in texts]
    # An end that comes in some of the completions.
    whole = [alone(model, tokenizer, each, 12) for each in asked]
    counts = {token: sum(token in ids for ids in whole) for token in range(320)}
    model.generation_config.eos_token_id = max(counts, key=lambda token: (counts[token] % 8, token))
    tokenizer.model_ends = {model.generation_config.eos_token_id}
    expected = [alone(model, tokenizer, each, 12) for each in asked]
    passes: list[tuple[int, int]] = []  # rows and tokens
    model.register_forward_pre_hook(
        lambda _model, _args, inputs: passes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    completions = generator_of(model, tokenizer, batch_size=batch_size, max_new_tokens=12).completions(asked)
    assert completions == [tokenizer.decode(ids) for ids in expected]
    assert [each.is_cut for each in completions] == [len(ids) == 12 for ids in expected]
    lengths = [len(ids) for ids in expected]
    assert len(set(lengths)) > 2, "else all would end together"
    assert sum(rows for rows, _ in passes) == sum(min(length + 1, 12) for length in lengths)
    reads = [number for number, (_, tokens) in enumerate(passes) if tokens > 1]
    steps = [rows for number, (rows, _) in enumerate(passes) if number not in reads]
    assert all(rows <= batch_size for rows in steps)
    waiting = [rows for number, (rows, _) in enumerate(passes[: reads[-1]]) if number not in reads]
    assert all(rows > batch_size - prefill_batch_size(batch_size) for rows in waiting), "a place was left empty"


def test_a_completion_ends_when_it_is_complete(tiny_vlm: Path) -> None:
    model = load_model(tiny_vlm, device=DeviceParams(kind="cpu"), precision="fp32").eval()
    processor = load_processor(tiny_vlm, None)

    def complete(text: str) -> bool:
        return len(text) >= 10 or "e" in text

    def completions(max_new_tokens: int, **options: Any) -> list[Any]:
        generator = generator_of(model, processor, batch_size=40, max_new_tokens=max_new_tokens, **options)
        return generator.completions(QUESTIONS[:5])

    ended = completions(12, complete=complete)
    growing = [completions(length) for length in range(1, 13)]
    assert ended == [next(filter(complete, completions)) for completions in zip(*growing, strict=True)]
    assert not any(completion.is_cut for completion in ended)
    assert len({len(completion) for completion in ended}) > 1, "else they would all end together"


def test_another_engines_completion_is_cut_at_the_first_end_and_read_only_if_a_task_may_end_it(tiny_dense: Any) -> None:
    unread: Any = None
    assert Ending(unread, {8, 9}).whole([1, 9, 2, 8]) == [1, 9]
    assert Ending(unread, {8, 9}).whole([1, 2]) == [1, 2]
    tokenizer = tiny_dense[1]
    ids = tokenizer("It was said.<|im_end|>").input_ids
    whole = Ending(tokenizer, end_tokens(tokenizer), lambda text: "was" in text).whole(ids)
    assert tokenizer.decode(whole) == "It was"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_comes_with_its_batch_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def encode(_: Any, conversations: list[Conversation]) -> str:
        if conversations[0].sample_id == "1" and error is ValueError:
            raise error
        return conversations[0].sample_id

    monkeypatch.setattr("stages.evaluation.generate.encode", encode)
    seen: list[Any] = []
    processor: Any = None
    asked = [Conversation(sample_id=str(number), messages=[message("user", "?" * (9 - number))]) for number in range(4)]
    with pytest.raises(error):
        for _, encoded in encoded_batches(processor, asked, 1):
            seen.append(encoded)
            if error is KeyboardInterrupt:
                raise error
    assert seen == ["0"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prepare")]
