from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.kit.data.conversation import Conversation
from stages.kit.models.prompts import count_tokens, encode, shortened


def about(text: str, *, shortenable: bool = True) -> Conversation:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "Transcript:\n"},
        {"type": "text", "text": text, "shortenable": shortenable},
        {"type": "text", "text": "\nWhat was said?"},
    ]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "It was agreed. " * 3}]}
    return Conversation(sample_id="s", messages=[{"role": "user", "content": parts}, answer])


def text_of(conversation: Conversation) -> str:
    return str(conversation.messages[0]["content"][1]["text"])


@given(text=st.text(max_size=60), repeated=st.integers(1, 4), max_length=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_what_may_be_cut_is_cut_to_fit_and_nothing_else_changes(
    tiny_dense: Any, text: str, repeated: int, max_length: int
) -> None:
    _, tokenizer = tiny_dense
    whole = about(text * repeated)
    before = count_tokens(tokenizer, whole)
    cut = shortened(tokenizer, whole, max_length)
    assert text_of(whole) == text * repeated, "the conversation handed in has changed"
    assert text_of(whole).startswith(text_of(cut))
    assert about(text_of(cut)) == cut, "something else has changed"
    assert count_tokens(tokenizer, cut) <= max_length or text_of(cut) == ""
    assert (cut == whole) == (before <= max_length or not text_of(whole))
    batch = encode(tokenizer, [whole], padding_side="left", max_length=max_length)
    assert batch["input_ids"].shape[1] == count_tokens(tokenizer, whole, max_length=max_length)


def test_no_more_is_cut_than_has_to_be(tiny_dense: Any) -> None:
    _, tokenizer = tiny_dense
    whole = about(" xylophone qwerty" * 40)
    for max_length in range(50, 90):
        cut = shortened(tokenizer, whole, max_length)
        assert count_tokens(tokenizer, cut) == max_length or text_of(cut) == "", max_length


def test_without_a_limit_or_a_text_that_may_be_cut_a_conversation_stays(tiny_dense: Any) -> None:
    _, tokenizer = tiny_dense
    whole, fixed = about("so " * 100), about("so " * 100, shortenable=False)
    assert shortened(tokenizer, whole, None) is whole
    assert shortened(tokenizer, fixed, 10) is fixed
