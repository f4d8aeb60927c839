"""Chat templates: what a conversation reads as, and which of it the assistant says, by the template's own marks.

A template marks an answer by `{% generation %}` and `{% endgeneration %}` (transformers, render_jinja_template).
Published ones seldom do. A family says where they go (answer_marks), or TRL has the same template with marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from stages.core.errors import UserError
from stages.kit.families import PAGE, PROMPT_OPTIONS, all_families

Messages = Sequence[Mapping[str, Any]]
"""Messages of a conversation, in the form that the template takes."""
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@cache
def marked_template(template: str) -> str:
    """The template itself where it marks answers, or another that renders answered conversations alike and does.

    Raises UserError where none is known.
    """
    if _MARK.search(template):
        return template
    for marks in (family.answer_marks for family in all_families().values()):
        if marks and all(plain in template for plain in marks):
            for plain, marked in marks.items():
                template = template.replace(plain, marked)
            return template
    from trl.chat_template_utils import get_training_chat_template  # slow to import

    try:
        # It compares the template with those that it knows; whether tools can be called is of no matter here.
        unmarked = SimpleNamespace(chat_template=template, apply_chat_template=lambda *_, **__: "")
        found = get_training_chat_template(unmarked)
    except ValueError:
        found = None
    if found is None:
        raise UserError(
            "the model's chat template does not mark answers ({% generation %}), and no marked form of it is known, so "
            f"nothing says which tokens are the assistant's; {PAGE} says how to bring one"
        )
    return found


def rendered_messages(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """What the model reads: an answered conversation, or one that ends with the prompt for an answer."""
    if messages[-1]["role"] == "assistant":
        return _render(tokenizer, marked_template(template_of(tokenizer)), messages, **PROMPT_OPTIONS)[0]
    return _render(tokenizer, template_of(tokenizer), messages, add_generation_prompt=True, **PROMPT_OPTIONS)[0]


def answer_spans(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Iterator[tuple[int, int]]:
    """Start and end of each answer with the end of its turn, in characters of `rendered_messages`.

    Neither what the prompt has said already (a line break in Qwen2.5's marks, an empty <think> block in Qwen3's) nor a
    line break behind the end of the turn is part of it. Raises UserError where the template marks another number of
    answers than there are.
    """
    template = marked_template(template_of(tokenizer))
    text, marked = _render(tokenizer, template, messages, return_assistant_tokens_mask=True, **PROMPT_OPTIONS)
    spans = _joined(marked)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) != len(turns):
        raise UserError(f"{len(turns)} assistant turns, but the chat template marks {len(spans)} answers; {PAGE}")
    for turn, (start, end) in zip(turns, spans, strict=True):
        prompt, _ = _render(tokenizer, template, messages[:turn], add_generation_prompt=True, **PROMPT_OPTIONS)
        said = len(prompt) if text.startswith(prompt) else 0
        yield max(start, said), start + len(text[start:end].rstrip("\n"))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that touch as one: a template may mark the end of the text apart from the last answer (Phi-3)."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, end))
    return joined


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Raises ValueError where it has none."""
    return tokenizer.get_chat_template()


def _render(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Messages, **options: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The text and, where they are asked for, the spans between the template's marks."""
    options = {**tokenizer.special_tokens_map, **options}
    texts, spans = render_jinja_template([messages], chat_template=template, **options)
    return texts[0], spans[0] if spans else []
