import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.core.errors import UserError
from stages.data.conversation import Conversation, message
from stages.models.prompts import (
    check_chat_template,
    count_tokens,
    encode,
    load_processor,
    require_answer_room,
    shortened,
)
from tests import ROOT
from tests.tiny_families import save_tiny_family

# Qwen2.5-7B-Instruct's template renders a message like this: it adds its content to a text.
PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", '{"model": {"type": "BPE"}}'), ("tokenizer_config.json", "[" * 200_000)]
)
def test_a_damaged_tokenizer_is_refused(file: str, content: str, tmp_path: Path) -> None:
    for path in (ROOT / "data/tiny/qwen2").glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match="is no model that can be loaded"):
        load_processor(tmp_path, None)


def test_a_model_may_stop_at_tokens_that_its_tokenizer_does_not_name_or_have(tmp_path: Path) -> None:
    save_tiny_family("llama", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None, "pad_token": None}))
    processor = load_processor(tmp_path, None)
    ends = processor.model_ends
    assert processor.eos_token is None
    assert processor.pad_token_id in ends
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ends, 999_999]}))
    check_chat_template(tmp_path)


@pytest.fixture
def tokenizer() -> Any:
    return load_processor(ROOT / "data/tiny/qwen2", None)


def asked(*texts: str) -> Conversation:
    """A message of several parts."""
    parts = [{"type": "text", "text": text} for text in texts]
    return Conversation(sample_id="sample", messages=[{"role": "user", "content": parts}])


@pytest.mark.parametrize("template", [None, PLAIN_TEMPLATE])
def test_text_parts_are_one_text_to_a_text_model(tokenizer: Any, template: str | None) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    parts = asked("tôi đi", " đâu ?")
    (ids,) = encode(tokenizer, [parts], padding_side="left")["input_ids"].tolist()
    assert tokenizer.decode(ids).endswith("<|im_start|>user\ntôi đi đâu ?<|im_end|>\n<|im_start|>assistant\n")
    assert [ids] == encode(tokenizer, [asked("tôi đi đâu ?")], padding_side="left")["input_ids"].tolist()
    assert count_tokens(tokenizer, parts) == len(ids)
    answered = replace(parts, messages=[*parts.messages, message("assistant", "đi")])
    if template is None:  # which has marks
        (ids,) = encode(tokenizer, [answered], padding_side="right")["input_ids"].tolist()
        assert tokenizer.decode(ids).endswith("<|im_start|>assistant\nđi<|im_end|>\n")


def about(text: str, *, shortenable: bool = True) -> Conversation:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "Transcript:\n"},
        {"type": "text", "text": text, "shortenable": shortenable},
        {"type": "text", "text": "\nWhat was said?"},
    ]
    messages = [{"role": "user", "content": parts}, message("assistant", "It was agreed. " * 3)]
    return Conversation(sample_id="s", messages=messages)


def text_of(conversation: Conversation) -> str:
    return str(conversation.messages[0]["content"][1]["text"])


@given(text=st.text(max_size=60), repeated=st.integers(1, 4), max_length=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_only_a_shortenable_text_is_cut(tiny_dense: Any, text: str, repeated: int, max_length: int) -> None:
    _, tokenizer = tiny_dense
    whole = about(text * repeated)
    before = count_tokens(tokenizer, whole)
    cut = shortened(tokenizer, whole, max_length)
    assert text_of(whole) == text * repeated, "the argument has changed"
    assert text_of(whole).startswith(text_of(cut))
    assert about(text_of(cut)) == cut, "something else has changed"
    assert count_tokens(tokenizer, cut) <= max_length or text_of(cut) == ""
    assert (cut == whole) == (before <= max_length or not text_of(whole))
    batch = encode(tokenizer, [whole], padding_side="left", max_length=max_length)
    assert batch["input_ids"].shape[1] == count_tokens(tokenizer, whole, max_length=max_length)
    fixed = about(text, shortenable=False)
    assert shortened(tokenizer, fixed, max_length) is fixed
    assert shortened(tokenizer, whole, None) is whole


def test_no_more_is_cut_than_necessary(tiny_dense: Any) -> None:
    _, tokenizer = tiny_dense
    whole = about(" xylophone qwerty" * 40)
    for max_length in range(50, 90):
        cut = shortened(tokenizer, whole, max_length)
        assert count_tokens(tokenizer, cut) == max_length or text_of(cut) == "", max_length


def test_reference_answers_that_no_model_could_give_are_refused_with_the_limit_that_they_need(tokenizer: Any) -> None:
    answers = [replace(asked("ai?"), messages=[message("assistant", "đi " * n)]) for n in [3] * 199 + [20, 20]]
    needed = len(tokenizer("đi " * 20)["input_ids"]) + 1
    for limit, longer in ((needed, 0), (needed - 1, 2)):
        line = require_answer_room(tokenizer, answers, limit, "evaluation.max_new_tokens")
        assert f"up to {needed} tokens" in line
        assert f"; {longer} of 201 are longer than max_new_tokens, {limit}" in line
    with pytest.raises(UserError, match=rf"3 of 202 .* Set evaluation.max_new_tokens: {needed} in params.yaml"):
        require_answer_room(tokenizer, [*answers, answers[-1]], needed - 1, "evaluation.max_new_tokens")
