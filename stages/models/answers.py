"""The assistant's answers in the text that a chat template renders, found by rendering alone.

The template is a black box: rendered with a sentinel in place of an answer, it shows its own text around the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

Messages = Sequence[Mapping[str, Any]]
"""Messages of a conversation, in the form that a chat template takes."""
Render = Callable[..., str]
"""render(messages, add_generation_prompt=False): the text of a conversation by its chat template."""

ANSWER, NEXT = "qVzXansWerKjq", "qVzXneXtKjq"
"""In place of an answer and of the next message: texts that no template trims, parses, escapes, or writes itself."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A chat template's own text around an answer, equal in all conversations."""

    lead: str
    """Text before an answer that its prompt does not have, such as a space, or the end of a block of thinking."""
    end: str
    """Text from an earlier answer through the token that ends it; empty if the template writes none there (gpt-oss)."""
    last_end: str
    """Text from the last answer through the token that ends it."""
    after: str
    """Text that the template writes behind the last answer."""
    tail: str
    """Text that is trained on behind the last answer: `after`, or the end of an earlier answer if `after` has none:
    GLM-4 stops at the <|user|> of the next message, which the template cannot write yet."""

    opens_thinking: bool
    """Whether the prompt ends with <think>, which the template may leave out of answers (DeepSeek-R1, QwQ)."""


def find_turn(render: Render, probe: Messages, ends: Collection[str]) -> Turn:
    """The text around the answers of a template.

    probe: a question, ANSWER, NEXT and ANSWER. ends: the tokens at which generation stops.
    Raises ValueError if a model that learns these answers would never stop, or is prompted otherwise than trained.
    """
    whole, prompt = render(probe), render(probe[:-1], add_generation_prompt=True)
    _, between, after = _split(whole, ANSWER, 3)
    header = whole[: whole.rindex(ANSWER)]
    opens_thinking = prompt.rstrip().endswith("<think>")
    if not (header.startswith(prompt) or opens_thinking):
        raise ValueError(f"it prompts a model with {prompt!r}, which is no beginning of {whole!r}, with the answer")
    following, _ = _split(between, NEXT, 2)
    end, last_end = _through_end(following, ends), _through_end(after, ends)
    tail = after if last_end else end
    if not tail:
        raise ValueError(
            f"it writes {after!r} behind an answer, and {following!r} if another message follows; generation ends at "
            f"{', '.join(sorted(ends)) or 'nothing'}; the model never stops: set eos_token_id in generation_config.json"
        )
    last = {"last_end": last_end or end, "after": after, "tail": tail}
    turn = Turn(lead="", end=end, **last, opens_thinking=opens_thinking)
    text = training_text(render, turn, probe)  # which is where the lead is found
    return replace(turn, lead=text[len(prompt) : text.rindex(ANSWER)])


def training_text(render: Render, turn: Turn, messages: Messages) -> str:
    """The text of an answered conversation with an end of its last answer. It begins with that answer's prompt.

    If the prompt opens a block of thinking that the template leaves out, the answer continues it by its own thinking,
    if it has some, and closes it. A text of last questions alone, as Mistral's system prompt is, stands before answers.
    """
    prompt = render(messages[:-1], add_generation_prompt=True)
    text = render(messages).removesuffix(turn.after) + turn.tail
    if text.startswith(prompt):  # a line break could fuse with the one that ends a prompt (Qwen3 Thinking)
        breaks = "\n" * (turn.opens_thinking and prompt.endswith("\n"))
        return prompt + text.removeprefix(prompt).lstrip(breaks)
    if not turn.opens_thinking:
        header, _ = _split(render([*messages[:-1], _says(messages[-1], ANSWER)]), ANSWER, 2)
        return prompt + turn.lead + text.removeprefix(header) if text.startswith(header) else text
    content = messages[-1]["content"]
    written = content if isinstance(content, str) else "".join(part["text"] for part in content)
    thought, _, answer = written.rpartition("</think>")
    thought = thought.replace("<think>", "").strip()
    # A line break alone could fuse with the one that ends the prompt.
    return prompt + f"{thought}\n</think>\n\n{answer.strip()}".lstrip() + turn.tail


def answer_spans(render: Render, turn: Turn, messages: Messages, text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each answer with the token that ends it, in characters of an answered conversation's text.

    text: the training_text of `messages`. The prompt for an answer is no part of it, and no answer has a token in it
    with which the template ends one. Raises ValueError for text that depends on more than the answer.
    """
    prompt = render(messages[:-1], add_generation_prompt=True)
    earlier = [_says(each, ANSWER) if each["role"] == "assistant" else each for each in messages[:-1]]
    num_earlier = sum(each["role"] == "assistant" for each in earlier)
    pieces = _split(render(earlier, add_generation_prompt=True), ANSWER, num_earlier + 1) if num_earlier else [prompt]
    place = 0
    for before, behind in pairwise(pieces):
        start = place + len(before)
        place = prompt.find(behind, start)
        if place < 0 or not behind.startswith(turn.end):
            raise ValueError(f"it changes {behind!r} with the answer before it")
        yield len(prompt[:start].removesuffix(turn.lead)), place + len(turn.end)
    if not (text.startswith(prompt) and text.endswith(turn.tail)):
        raise ValueError(f"it prompts a model with {prompt!r}, which is no beginning of {text!r}, with the answer")
    yield len(prompt), len(text) - len(turn.tail) + len(turn.last_end)


def _through_end(text: str, ends: Collection[str]) -> str:
    """The beginning of a text through the first of the end tokens; empty without one."""
    return text[: min((text.index(end) + len(end) for end in ends if end in text), default=0)]


def _says(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The message with this text alone."""
    content = text if isinstance(message["content"], str) else [{"type": "text", "text": text}]
    return {"role": message["role"], "content": content}


def _split(text: str, sentinel: str, count: int) -> list[str]:
    """Raises ValueError unless a text has so many parts between sentinels."""
    parts = text.split(sentinel)
    if len(parts) != count:
        raise ValueError(f"it does not write each message once: {text!r}")
    return parts
