from itertools import product

import pytest

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.models.prompts import count_tokens, encode, rendered, tokenizer_of
from stages.tasks.chat.samples import check, conversation, probes
from stages.tasks.chat.samples.records import Message, Record
from tests.tasks.chat.talks import record, shown
from tests.tiny_families import TEMPLATES, VISION, processor_for, tokenizer_for

MARKUP = (
    *("<|im_start|>system", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end|>", "<|user|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "<s>", "</s>", "<think>", "</think>", "<tool_call>"),
    *(
        "<tool_response>",
        "</tool_response>",
        "{{ messages }}",
        "{% generation %}",
        "{%- endgeneration %}",
        "\n\nassistant\n",
    ),
)


@pytest.mark.parametrize(
    ("family", "markup"), list(product([name for name in TEMPLATES if name not in VISION], MARKUP))
)
def test_markup_in_a_users_text_is_refused_or_nothing_but_text(family: str, markup: str) -> None:
    tokenizer = tokenizer_for(family)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    asked = f"Say {markup} twice."
    roles = ("system", "user", "assistant", "user", "assistant")
    said = [
        Record(
            id="a",
            messages=tuple(map(Message, roles, ("Be brief.", text, "One.", text, "Two."))),
            group="",
            file="a",
            number=1,
        )
        for text in (asked, "Say it twice.")
    ]
    odd, plain = (conversation(each, answered=True) for each in said)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if any(token in markup and token in str(tokenizer.chat_template) for token in special):
        with pytest.raises(UserError, match="a text of sample a holds chat markup"):
            encode(tokenizer, [odd], padding_side="left")
        return
    assert rendered(tokenizer, odd) == rendered(tokenizer, plain).replace("Say it twice.", asked)
    answers = []
    for each in (odd, plain):
        inputs = encode(tokenizer, [each], padding_side="right", mark_answers=True)
        answers.append(tokenizer.decode(inputs["input_ids"][inputs["answers"]]))
    assert answers[0] == answers[1]
    assert "One." in answers[0]
    assert "Two." in answers[0]


@pytest.mark.parametrize("answered", [False, True])
def test_a_special_token_that_reaches_a_model_is_refused_in_questions_too(answered: bool) -> None:
    """One of a form that `markup_problem` does not know, in a template that writes it."""
    tokenizer = tokenizer_for("qwen2")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<|im_end|>", "<end_of_turn>")
    asked = conversation(record("Say <end_of_turn>.", "No."), answered=answered)
    with pytest.raises(UserError, match="a text of sample a:1 holds chat markup, <end_of_turn>; remove it"):
        encode(tokenizer, [asked], padding_side="left")


def test_a_question_is_all_but_the_answer() -> None:
    def texts(found: Conversation) -> list[str]:
        return [part["text"] for message in found.messages for part in message["content"]]

    assert texts(conversation(record("Who?", "You."), answered=False)) == ["Who?"]
    assert texts(conversation(record("Who?", "You."), answered=True)) == ["Who?", "You."]
    assert all(each.answered() for each in probes())


def test_a_picture_stands_where_its_text_is_divided() -> None:
    said = (Message("user", "abc"), Message("assistant", "d"), Message("user", ""), Message("assistant", "e"))
    asked = shown(said, spots=[(0, 0), (0, 1), (0, 1), (0, 3), (2, 0)])
    found = conversation(asked, answered=True)
    picture = {"type": "image"}
    texts = {letter: {"type": "text", "text": letter} for letter in ["a", "bc", "d", "e"]}
    assert [message["content"] for message in found.messages] == [
        [picture, texts["a"], picture, picture, texts["bc"], picture], [texts["d"]], [picture], [texts["e"]],
    ]  # fmt: skip
    assert found.images == asked.pictures


@pytest.mark.parametrize("family", VISION)
def test_answers_count_and_pictures_go_in_their_order_beside_texts_alone(family: str) -> None:
    processor = processor_for(family)
    roles, texts = ("system", "user", "assistant", "user", "assistant"), ("Be brief.", "abc", "One.", "", "Two.")
    said = tuple(map(Message, roles, texts))
    asked = [conversation(shown(said, spots), answered=True) for spots in ([(1, 1), (3, 0)], [])]
    asked[1].messages[3]["content"] = [{"type": "text", "text": "def"}]
    inputs = encode(processor, asked, padding_side="right", mark_answers=True)
    assert len(inputs["image_grid_thw"]) == 2
    for row, each in enumerate(asked):
        answers = tokenizer_of(processor).decode(inputs["input_ids"][row][inputs["answers"][row]])
        assert answers.index("One.") < answers.index("Two.")
        assert not any(text in answers for text in ("Be brief.", "a", "bc", "def"))
        assert count_tokens(processor, each) == int(inputs["attention_mask"][row].sum())


def test_a_text_model_is_not_shown_pictures() -> None:
    asked = conversation(
        shown(messages=(Message("user", "Who?"), Message("assistant", "You.")), spots=[(0, 0)]), answered=True
    )
    for use in (
        lambda: encode(tokenizer_for("llama"), [asked], padding_side="left"),
        lambda: count_tokens(tokenizer_for("llama"), asked),
    ):
        with pytest.raises(
            UserError, match=r"sample a:1 has images, and .* is a text model; take a base of qwen2_5_vl, "
        ):
            use()


def test_an_unknown_family_and_a_target_are_refused() -> None:
    check("llama", None)
    check("qwen2_vl", None)
    with pytest.raises(UserError, match="no model family is called 'gpt2'"):
        check("gpt2", None)
    with pytest.raises(UserError, match=r"answer_format: .* found 'full'"):
        check("llama", "full")
