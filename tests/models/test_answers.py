"""Answers found by rendering are those that TRL's marked templates mark, in every published template that it ships."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from stages.core.errors import UserError
from stages.core.params.schema import TemplateOptions
from stages.data.conversation import Conversation, message
from stages.evaluation.generate import Ending
from stages.models.answers import ANSWER, NEXT, Messages, Turn, answer_spans, find_turn, training_text
from stages.models.prompts import (
    OPTIONS,
    check_carried,
    check_chat_template,
    encode,
    end_tokens,
    fuses_with_prompt,
    load_processor,
    rendered,
    tokenizer_of,
    with_options,
)
from stages.training.batches import ConversationCollator
from tests import ROOT
from tests.tiny_families import TEMPLATES_DIR, template_of, tokenizer_for

ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<|return|>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<turn|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "</s>", "<EOS>"),
)
"""The ends of turns of all these models."""
NAMED = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
MARKED = sorted(path.stem.removesuffix("_training") for path in TEMPLATES_DIR.glob("*_training.jinja"))
IN_PARTS = {"idefics3", "llava_next", "smolvlm"}
"""Templates that read a content in parts alone."""
NO_SYSTEM = {"gemma"}
OPEN_THINKING = ("deepseek_r1_distill", "deepseekv3")
"""Templates that end the prompt with <think>, and leave it out of answers."""
TALKS = {
    "one turn": ("Who?", "You."),
    "two turns": ("What?", "A table", "Sure?", "yes, two\nlines"),
    "system prompt": ("Be brief.", "Who?", "You.", "And he?", "Bob"),
    "empty system prompt": ("", "Who?", "You."),
    "words of the template": ("end user assistant", "user", "user", "assistant", "assistant", "end"),
}


def talk(*texts: str) -> list[dict[str, Any]]:
    """Messages that end with an answer; an odd one before them is the system's."""
    roles = ["system"] * (len(texts) % 2) + ["user", "assistant"] * len(texts)
    return [message(role, text) for role, text in zip(roles, texts, strict=False)]


def render(template: str, messages: Messages, *, in_parts: bool = False, **options: Any) -> Any:
    """The text, or with return_assistant_tokens_mask the spans that the template marks."""
    if not in_parts:
        messages = [{**each, "content": "".join(part["text"] for part in each["content"])} for each in messages]
    (text,), spans = render_jinja_template([list(messages)], chat_template=template, **NAMED, **options)
    return spans[0] if spans else text


def template(name: str) -> str:
    return with_options((TEMPLATES_DIR / f"{name}.jinja").read_text(encoding="utf-8"))


def found(name: str, messages: Messages) -> tuple[Turn, str, list[str]]:
    """The turn of a template, the text of a conversation, and the answers in it."""
    of = partial(render, template(name), in_parts=name in IN_PARTS)
    turn = find_turn(of, talk("Who?", ANSWER, NEXT, ANSWER), ENDS)
    text = training_text(of, turn, messages)
    return turn, text, [text[start:end] for start, end in answer_spans(of, turn, messages, text)]


def marked(name: str, messages: Messages) -> list[str]:
    """The answers that TRL's training template marks: adjacent marks as one, without what the prompt already has."""
    of = partial(render, template(f"{name}_training"), in_parts=name in IN_PARTS)
    text, spans = of(messages), list[tuple[int, int]]()
    for start, end in of(messages, return_assistant_tokens_mask=True):
        spans.append((spans.pop()[0] if spans and spans[-1][1] == start else start, end))
    turns = [turn for turn, each in enumerate(messages) if each["role"] == "assistant"]
    answers = []
    for turn, (start, end) in zip(turns, spans, strict=True):
        prompt = of(messages[:turn], add_generation_prompt=True)
        answers.append(text[max(start, len(prompt) if text.startswith(prompt) else 0) : end].rstrip("\n"))
    return answers


@pytest.mark.parametrize("name", [name for name in MARKED if name not in OPEN_THINKING])
def test_answers_found_by_rendering_are_those_that_marks_mark(name: str) -> None:
    for kind, texts in TALKS.items():
        if name in NO_SYSTEM and len(texts) % 2:
            continue
        messages = talk(*texts)
        expected = marked(name, messages)
        if name.startswith("phi3"):  # its marks have a second end, which no generation reaches
            expected = [answer.removesuffix("\n<EOS>") for answer in expected]
        turn, _, answers = found(name, messages)
        assert answers == expected, kind
        assert answers[-1].endswith(ENDS)
        assert turn.tail.startswith(turn.last_end)


@pytest.mark.parametrize("name", OPEN_THINKING)
@pytest.mark.parametrize(
    ("answer", "learnt"),
    [
        ("You.", "</think>\n\nYou."),
        ("<think>\nA name?\n</think>\n\nYou.", "A name?\n</think>\n\nYou."),
        ("A name?</think>You.", "A name?\n</think>\n\nYou."),
    ],
)
def test_an_answer_closes_the_thinking_that_its_prompt_opens(name: str, answer: str, learnt: str) -> None:
    messages = talk("Be brief.", "And he?", "Bob", "Who?", answer)
    _, text, answers = found(name, messages)
    assert answers == ["Bob<｜end▁of▁sentence｜>", f"{learnt}<｜end▁of▁sentence｜>"]
    assert text == render(template(name), messages[:-1], add_generation_prompt=True) + answers[-1]


def test_a_template_that_prompts_otherwise_than_it_writes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"it prompts a model with .* which is no beginning of"):
        of = partial(render, GLM4.replace("<|assistant|>{% endif", "<|assistant|><|thinking|>{% endif"))
        find_turn(of, talk("Who?", ANSWER, NEXT, ANSWER), ENDS)


GLM4 = """[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
LLAMA2 = """{% for message in messages %}{% if message.role == 'user' %}\
{{ bos_token + '[INST] ' + message.content | trim + ' [/INST]' }}{% else %}\
{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
LAST_SYSTEM = """{% for message in messages %}{% if message.role == 'user' %}\
[INST] {{ 'Be brief.\n' if loop.last or messages[loop.index0 + 1:] | length == 1 }}{{ message.content }}[/INST]\
{% elif message.role == 'assistant' %} {{ message.content + eos_token }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("written", "expected", "end_of_text"),
    [
        (GLM4, ["\nYou.<|user|>", "\nBob<|user|>"], "Bob<|user|>"),
        (LLAMA2, [" You. <EOS>", " Bob <EOS>"], " Bob <EOS>"),
        (LAST_SYSTEM, [" You.<EOS>", " Bob<EOS>"], " Bob<EOS>"),
    ],
    ids=["no end of the last turn", "a space before an answer", "text in the last question alone"],
)
def test_answers_of_other_templates(written: str, expected: list[str], end_of_text: str) -> None:
    of, messages = partial(render, written), talk("Who?", "You.", "And he?", "Bob")
    turn = find_turn(of, talk("Who?", ANSWER, NEXT, ANSWER), ENDS)
    text = training_text(of, turn, messages)
    assert [text[start:end] for start, end in answer_spans(of, turn, messages, text)] == expected
    assert text.endswith(end_of_text)


def folder_with(template: str, tmp_path: Path) -> Path:
    """A tiny Qwen2 with another template."""
    for path in (ROOT / "data/tiny/qwen2-folklore").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return tmp_path


CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}START{{ message.content }}MIDDLE<|im_end|>END{% else %}\
{{ message.content }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"


def chatml(start: str = "", middle: str = "", end: str = "") -> str:
    return CHATML.replace("START", start).replace("MIDDLE", middle).replace("END", end)


def prompts_thinking(start: str = "") -> str:
    return chatml(start).replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (chatml(OPEN, CLOSE), r"its marks \(.*generation.*\) leave out the end of an answer, '<\|im_end\|>'"),
        (chatml().replace("<|im_end|>{% endif", "{% endif").replace("MIDDLE<|im_end|>", ""), None),
        (chatml().replace("<|im_end|>", "<|other|>"), r"would never stop|never stops: set eos_token_id"),
        (chatml().replace("{% if message.role == 'assistant' %}", "{% if false %}").replace("content", "role"), "once"),
    ],
    ids=["marks without the end", "ends of answers alone", "another end", "no content"],
)
def test_a_base_that_would_never_stop_is_refused(written: str, problem: str | None, tmp_path: Path) -> None:
    folder = folder_with(written, tmp_path)
    if problem is None:
        check_chat_template(folder)
        return
    with pytest.raises(UserError, match=rf"the chat template of .* cannot be used: .*{problem}"):
        check_chat_template(folder)


def test_a_templates_own_marks_choose_within_the_answers(tmp_path: Path) -> None:
    processor = load_processor(folder_with(chatml("Note: " + OPEN, "", CLOSE), tmp_path), None)
    batch = encode(
        processor,
        [Conversation(sample_id="a", messages=talk("Who?", "You.", "He?", "Bob."))],
        padding_side="right",
        mark_answers=True,
    )
    assert processor.decode(batch["input_ids"][batch["answers"]]) == "You.<|im_end|>Bob.<|im_end|>"


def test_a_prompt_with_other_tokens_than_the_training_text_is_refused_at_the_base(tmp_path: Path) -> None:
    """Two line breaks are one token of the tokenizer, and the prompt has but one of them."""
    written = chatml("{{ '\n' }}")
    with pytest.raises(UserError, match=r"which is no beginning of it, in tokens; docs/extending.md"):
        check_chat_template(folder_with(written, tmp_path))


def test_an_answer_with_a_first_token_that_fuses_with_the_prompt_is_counted_and_that_token_not_learnt() -> None:
    processor = load_processor(ROOT / "data/tiny/qwen2-folklore", None)
    fused, plain = (Conversation(sample_id="a", messages=talk("Who?", text)) for text in ("\nYou.", "You."))
    assert [fuses_with_prompt(processor, each) for each in (fused, plain)] == [True, False]
    batch = encode(processor, [fused], padding_side="right", mark_answers=True)
    assert processor.decode(batch["input_ids"][batch["answers"]]) == "You.<|im_end|>"
    summaries = [
        ConversationCollator(processor, each, lambda it: it, loss="assistant-only", max_length=99).length_summary()
        for each in ([plain], [fused, plain, fused])
    ]
    assert "fuses" not in summaries[0]
    assert summaries[1].endswith("in 2 the answer's first token fuses with the prompt and is not learnt")


MISTRAL = """{% set system = messages[0].content if messages[0].role == 'system' %}{% for message in messages %}\
{% if message.role == 'user' %}<|im_start|>{{ system + '\\n\\n' if system and loop.last }}{{ message.content }}\
{% elif message.role == 'assistant' %}: START{{ message.content }}<|im_end|>END{% endif %}{% endfor %}"""
"""Mistral 7B v0.3's and Nemo's place of a system prompt: in a question, if it comes last."""


def test_a_system_prompt_in_the_question_that_comes_last_is_before_its_answer_too(tmp_path: Path) -> None:
    plain = MISTRAL.replace("START", "").replace("END", "")
    processor = load_processor(folder_with(plain, tmp_path), None)
    asked = Conversation(sample_id="a", messages=talk("Be brief.", "Who?", "You.", "And he?", "Bob"))
    check_carried(processor, [asked])
    assert rendered(processor, asked) == (
        "<|im_start|>Who?: You.<|im_end|><|im_start|>Be brief.\n\nAnd he?: Bob<|im_end|>"
    )
    batch = encode(processor, [asked], padding_side="right", mark_answers=True)
    assert processor.decode(batch["input_ids"][batch["answers"]]) == ": You.<|im_end|>: Bob<|im_end|>"
    marked = MISTRAL.replace("START", OPEN).replace("END", CLOSE)
    processor = load_processor(folder_with(marked, tmp_path), None)
    with pytest.raises(UserError, match=r"sample a: its marks \(.*\) are of another text than follows its prompts"):
        encode(processor, [asked], padding_side="right", mark_answers=True)


def test_an_answer_without_thinking_does_not_fuse_with_the_line_that_opens_it(tmp_path: Path) -> None:
    """Qwen3 Thinking's prompt ends with a line break, and its template writes another. Two of them are one token."""
    check_chat_template(folder_with(prompts_thinking("<think>\n\n</think>\n\n"), tmp_path))
    processor = load_processor(tmp_path, None)
    batch = encode(
        processor,
        [Conversation(sample_id="a", messages=talk("Who?", "You."))],
        padding_side="right",
        mark_answers=True,
    )
    assert processor.decode(batch["input_ids"][0]).count("<think>\n</think>") == 1
    assert processor.decode(batch["input_ids"][batch["answers"]]) == "</think>\n\nYou.<|im_end|>"


@pytest.mark.parametrize(
    ("written", "lead"),
    [
        (chatml("<|object_ref_start|>final: "), "<|object_ref_start|>final: "),  # as gpt-oss writes a channel
        (chatml().partition("{% if add_generation_prompt")[0], "<|im_start|>assistant\n"),  # prompts without a header
        (prompts_thinking(), "</think>\n\n"),
        (prompts_thinking("<think>\n\n</think>\n\n"), "</think>\n\n"),
        (chatml(), ""),
    ],
    ids=["channel", "no header", "thinking left out", "thinking", "none"],
)
def test_a_completion_is_scored_without_what_the_template_writes_before_an_answer(
    written: str, lead: str, tmp_path: Path
) -> None:
    processor = load_processor(folder_with(written, tmp_path), None)
    asked = Conversation(sample_id="a", messages=talk("Who?", "You."))
    batch = encode(processor, [asked], padding_side="right", mark_answers=True)
    learnt = batch["input_ids"][batch["answers"]].tolist()
    assert processor.decode(learnt) == f"{lead}You.<|im_end|>"
    ending = Ending(tokenizer_of(processor), end_tokens(tokenizer_of(processor)))
    assert ending.text(learnt) == "You."
    assert ending.text(learnt[-2:]) == processor.decode(learnt[-2:-1])


def test_options_and_dates_are_part_of_the_template_that_a_trained_model_is_saved_with() -> None:
    qwen3 = template("qwen3")
    assert render(qwen3, talk("a", "b")[:1], add_generation_prompt=True).endswith("<think>\n\n</think>\n\n")
    assert "Today Date: 26 Jul 2024" in render(template("llama3_2"), talk("a", "b"))
    assert "Current date: 2024-07-26\n" in render(template("gptoss"), talk("a", "b"))
    clock = with_options("{{ strftime_now('%d %b %Y, %B') }}")
    assert render(clock, []) == "26 Jul 2024, July"
    for fixed in (qwen3, template("gptoss"), clock):
        assert with_options(fixed) == fixed
    assert with_options(template_of("qwen2")) == template_of("qwen2")
    assert OPTIONS.keys() == {"enable_thinking", "date_string"}
    named: list[TemplateOptions] = [{"enable_thinking": True}, {"enable_thinking": True, "date_string": 'the "first"'}]
    for options in named:
        thinking = with_options(template_of("qwen3") + "{# date_string #}", options)
        prompt = render(thinking, talk("a", "b")[:1], add_generation_prompt=True)
        assert prompt.endswith("<|im_start|>assistant\n")
        assert with_options(thinking) == thinking
    again = with_options(thinking, {"enable_thinking": False})
    assert render(again, talk("a", "b")[:1], add_generation_prompt=True).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(UserError, match="the chat template has no option 'reasoning_effort'"):
        with_options(qwen3, {"reasoning_effort": "low"})


def test_a_saved_processor_prompts_as_the_one_that_was_trained_with(tmp_path: Path) -> None:
    folder = folder_with(template_of("qwen3"), tmp_path)
    asked = Conversation(sample_id="a", messages=talk("a", "b")[:1])
    plain, thinking = load_processor(folder, None), load_processor(folder, None, {"enable_thinking": True})
    assert rendered(plain, asked) == rendered(thinking, asked) + "<think>\n\n</think>\n\n"
    thinking.save_pretrained(tmp_path)
    assert rendered(load_processor(folder, None), asked) == rendered(thinking, asked)


def test_a_text_with_an_end_that_the_template_names_by_a_variable_is_refused() -> None:
    tokenizer = tokenizer_for("llama")
    tokenizer.chat_template = LLAMA2
    with pytest.raises(UserError, match=r"holds chat markup, <\|eot_id\|>"):
        encode(tokenizer, [Conversation(sample_id="a", messages=talk("a<|eot_id|>", "b"))], padding_side="right")
    assert rendered(tokenizer, Conversation(sample_id="a", messages=talk("a", "b"))).endswith(" b <|eot_id|>")
