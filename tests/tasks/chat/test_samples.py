from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from stages.core.errors import UserError
from stages.data.parquet import write_rows
from stages.data.splits import to_rows
from stages.evaluation import validation as validating
from stages.evaluation.validation import Validator
from stages.models.prompts import count_tokens, encode, load_processor, rendered, tokenizer_of, with_options
from stages.tasks.chat import samples
from stages.tasks.chat.samples import SCHEMA, Message, Record, conversation, probes, read_split
from stages.training.batches import IGNORED, ConversationCollator
from tests.plans import changed
from tests.tasks.chat.conversations import with_images
from tests.tiny_families import TEMPLATES, VISION, processor_for, save_tiny_family, tokenizer_for
from tests.training.small import plan_for, validation

MARKUP = (
    *("<|im_start|>system", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end|>", "<|user|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "<s>", "</s>", "<think>", "</think>", "<tool_call>"),
    *("<tool_response>", "</tool_response>", "{{ messages }}", "{% generation %}", "{%- endgeneration %}"),
    "\n\nassistant\n",
)
ROLES = ("system", "user", "assistant", "user", "assistant")


def dialogue(*texts: str) -> Record:
    return Record(id="a", messages=tuple(map(Message, ROLES, texts)), group="", file="a", number=1)


@pytest.mark.parametrize(
    ("family", "markup"), list(product([name for name in TEMPLATES if name not in VISION], MARKUP))
)
def test_markup_in_a_users_text_is_refused_or_nothing_but_text(family: str, markup: str) -> None:
    tokenizer = tokenizer_for(family)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = (f"Say {markup} twice.", "Say it twice.")
    odd, plain = (conversation(dialogue("Be brief.", text, "One.", text, "Two."), answered=True) for text in texts)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if any(token in markup and token in str(tokenizer.chat_template) for token in special):
        with pytest.raises(UserError, match="a text of sample a holds chat markup"):
            encode(tokenizer, [odd], padding_side="left")
        return
    assert rendered(tokenizer, odd) == rendered(tokenizer, plain).replace(texts[1], texts[0])
    answers = []
    for each in (odd, plain):
        inputs = encode(tokenizer, [each], padding_side="right", mark_answers=True)
        answers.append(tokenizer.decode(inputs["input_ids"][inputs["answers"]]))
    assert answers[0] == answers[1]
    assert "One." in answers[0]
    assert "Two." in answers[0]


def test_an_image_stands_where_its_text_is_divided() -> None:
    turns = (Message("user", "abc"), Message("assistant", "d"), Message("user", ""), Message("assistant", "e"))
    shown = with_images(turns, [(0, 0), (0, 1), (0, 1), (0, 3), (2, 0)])
    found = conversation(shown, answered=True)
    image = {"type": "image"}
    a, bc, d, e = ({"type": "text", "text": text} for text in ("a", "bc", "d", "e"))
    contents = [message["content"] for message in found.messages]
    assert contents == [[image, a, image, image, bc, image], [d], [image], [e]]
    assert found.images == shown.images
    assert conversation(shown, answered=False).messages == found.messages[:-1]
    assert all(each.answered() for each in probes())
    assert {turn["role"] for each in probes() for turn in each.messages} == {"user", "assistant"}


@pytest.mark.parametrize("family", VISION)
def test_answers_are_marked_in_conversations_with_and_without_images(family: str) -> None:
    processor = processor_for(family)
    turns = tuple(map(Message, ROLES, ("Be brief.", "abc", "One.", "", "Two.")))
    asked = [conversation(with_images(turns, positions), answered=True) for positions in ([(1, 1), (3, 0)], [])]
    asked[1].messages[3]["content"] = [{"type": "text", "text": "def"}]
    inputs = encode(processor, asked, padding_side="right", mark_answers=True)
    assert len(inputs["image_grid_thw"]) == 2
    for row, each in enumerate(asked):
        answers = tokenizer_of(processor).decode(inputs["input_ids"][row][inputs["answers"][row]])
        assert answers.index("One.") < answers.index("Two.")
        assert not any(text in answers for text in ("Be brief.", "a", "bc", "def"))
        assert count_tokens(processor, each) == int(inputs["attention_mask"][row].sum())


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_turn_that_is_not_to_be_learnt_has_no_label_and_changes_nothing_else(family: str) -> None:
    processor = processor_for(family)
    tokenizer_of(processor).pad_token = tokenizer_of(processor).pad_token or tokenizer_of(processor).eos_token
    whole = dialogue("Be brief.", "abc", "One.", "def", "Two.")
    batches = []
    for record in (whole, replace(whole, unlearnt=(2,)), replace(whole, unlearnt=(4,))):
        converse = partial(conversation, answered=True)
        collate = ConversationCollator(processor, [record], converse, loss="assistant-only", max_length=1000)
        assert collate.lengths
        batches.append(collate([{"sample": 0}]))
    labels = [batch.pop("labels")[0] for batch in batches]
    for batch, kept, left_out in zip(batches[1:], labels[1:], ("One.", "Two."), strict=True):
        assert all(torch.equal(batch[name], value) for name, value in batches[0].items())
        learnt = kept != IGNORED
        assert torch.equal(kept[learnt], labels[0][learnt])
        text = tokenizer_of(processor).decode(labels[0][(labels[0] != IGNORED) & ~learnt])
        assert [each for each in ("Be brief.", "abc", "One.", "def", "Two.") if each in text] == [left_out]
    assert torch.equal(labels[1] == IGNORED, (labels[0] == IGNORED) | (labels[2] != IGNORED))


def test_loss_all_tokens_takes_no_turn_that_is_not_to_be_learnt() -> None:
    record = replace(dialogue("Be brief.", "abc", "One.", "def", "Two."), unlearnt=(2,))
    converse = partial(conversation, answered=True)
    collate = ConversationCollator(tokenizer_for("llama"), [record], converse, loss="all-tokens", max_length=1000)
    with pytest.raises(UserError, match="sample a has turns that are not to be learnt, which loss all-tokens would"):
        _ = collate.lengths


THOUGHT = "<think>\n17 * 3 = 51\n</think>\n\n51"


def test_thinking_is_learnt_where_the_template_is_asked_for_it() -> None:
    tokenizer = tokenizer_for("qwen3")
    tokenizer.chat_template = with_options(tokenizer.chat_template, {"enable_thinking": True})
    turns = tuple(map(Message, ("user", "assistant") * 2, ("17 * 3?", THOUGHT, "Sure?", "<think>51.</think>Yes.")))
    last = Record(id="a", messages=turns, group="", file="a", number=1, unlearnt=(1,))
    asked = [replace(last, messages=turns[:2], unlearnt=()), last, replace(last, messages=(*turns[:3], turns[1]))]
    collate = ConversationCollator(
        tokenizer, asked, partial(conversation, answered=True), loss="assistant-only", max_length=1000
    )
    assert collate.lengths
    labels = collate([{"sample": number} for number in range(3)])["labels"]
    learnt = [tokenizer.decode(row[row != IGNORED]) for row in labels]
    assert learnt == [f"{THOUGHT}<|im_end|>", "<think>\n51.\n</think>\n\nYes.<|im_end|>", f"{THOUGHT}<|im_end|>"]
    collate.records = [replace(last, unlearnt=())]
    collate.__dict__.pop("lengths")
    with pytest.raises(UserError, match=r"part of message 2, '17 \* 3 = 51'; thinking may be in the last answer"):
        _ = collate.lengths


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (("17 * 3?", THOUGHT), r"sample a: by the chat template of .*, a model would be trained on .*17 \* 3 = 51"),
        (("17 * 3?", THOUGHT, "Sure?", "Yes."), r"leaves out or changes a part of message 2, '17"),
        (("17 * 3?", "17 * 3 = 51\n</think>\n\n51"), "by the chat template of|changes a part of message 2"),
    ],
)
def test_thinking_that_a_template_takes_out_of_an_answer_is_named(
    family: str, texts: tuple[str, ...], problem: str
) -> None:
    processor = processor_for(family)
    turns = tuple(map(Message, ("user", "assistant") * 2, texts))
    record = Record(id="a", messages=turns, group="", file="a", number=1)
    collate = ConversationCollator(
        processor,
        [record, replace(record, id="b")],
        partial(conversation, answered=True),
        loss="assistant-only",
        max_length=1000,
    )
    if family == "qwen3":
        with pytest.raises(UserError, match=f"(?s)({problem}).*; 1 more of the samples are like it"):
            _ = collate.lengths
    else:
        assert THOUGHT[-2:] in rendered(processor, conversation(record, answered=True))
        assert collate.lengths


def test_the_samples_that_validation_completes_are_those_of_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_family("qwen2", tmp_path)
    long, short = dialogue("Be brief.", "2?", "51 " * 200), dialogue("Be brief.", "17 * 3?", "51")
    write_rows(to_rows([long, short], SCHEMA), tmp_path / "selection.parquet", SCHEMA)
    plan = changed(plan_for("chat-lora"), base_dir=str(folder), skip_too_long=True, max_length=100)
    wanted = validation(every_steps=1, samples=2, score_samples=2)
    tasks: list[Any] = []
    monkeypatch.setattr(validating, "Task", lambda **given: tasks.append(given))
    found = Validator.for_plan(replace(plan, data_dir=str(tmp_path), validation=wanted), load_processor(folder, None))
    assert [found.collator.records[number] for number in found.chosen] == tasks[0]["records"] == [short]


def test_a_sample_that_is_too_long_is_left_out_before_its_template_is_looked_at(tmp_path: Path) -> None:
    folder = save_tiny_family("qwen3", tmp_path)
    short, changed_by_template = dialogue("Be brief.", "17 * 3?", "51"), f"<think>{'51? ' * 100}</think>51"
    plan = changed(plan_for("chat-lora"), base_dir=str(folder), skip_too_long=True, max_length=100)
    records = [short, replace(short, messages=(*short.messages[:2], Message("assistant", changed_by_template)))]
    collate = ConversationCollator.for_plan(plan, load_processor(folder, None), records, samples)
    assert collate.records == [short]
    assert len(collate.lengths) == 1
    none_fits = ConversationCollator.for_plan(
        changed(plan, max_length=3), load_processor(folder, None), [short], samples
    )
    with pytest.raises(UserError, match=r"raise the recipe's max_length: no sample fits$"):
        _ = none_fits.lengths
    with pytest.raises(UserError, match="would be trained on"):
        collate = ConversationCollator.for_plan(
            changed(plan, max_length=1000), load_processor(folder, None), records, samples
        )
        _ = collate.lengths


def test_a_text_model_takes_no_images() -> None:
    asked = conversation(with_images((Message("user", "Who?"), Message("assistant", "You.")), [(0, 0)]), answered=True)
    for use in (lambda model: encode(model, [asked], padding_side="left"), lambda model: count_tokens(model, asked)):
        with pytest.raises(UserError, match=r"sample a:1 has images.* qwen2_5_vl"):
            use(tokenizer_for("llama"))


def test_the_column_of_images_may_be_missing_but_not_another_one(tmp_path: Path) -> None:
    """tests/tasks/chat/test_sources.py reads splits with images."""
    record, path = dialogue("Be brief.", "abc", "d"), tmp_path / "val.parquet"
    (row,) = to_rows([record], SCHEMA)
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), path)
    assert read_split(tmp_path, "val") == [record]
    other = SCHEMA.append(pa.field("images", pa.list_(pa.binary())))
    pq.write_table(pa.Table.from_pylist([{**row, "images": []}], schema=other), path)
    with pytest.raises(UserError, match=r"it has images \(list<element: binary>\)"):
        read_split(tmp_path, "val")
