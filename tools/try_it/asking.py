"""What a page asks, of which models, and how it shows what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.data.texts import markup_problem

if TYPE_CHECKING:
    from PIL.Image import Image

    from stages.core.params.schema import Params
    from stages.kit.evaluation.answer import Answerer


@dataclass(frozen=True, kw_only=True)
class Subject:
    params: Params
    run: str
    """A recipe or a baseline."""
    answer_format: str | None
    """The form of its answers, where the task has several."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    name: str
    answerer: Answerer


@dataclass(frozen=True, kw_only=True)
class Field:
    """One thing that a person gives."""

    kind: Literal["picture", "line", "text"]
    """A picture comes as the path of a file."""
    label: str


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An answer as people read it; what a model wrote stands below it, word for word."""

    picture: Image | None = None
    text: str = ""
    """Markdown, with whatever a model or a person wrote escaped in it."""


class Form(Protocol):
    """A task on a page; made of the Subject."""

    @property
    def fields(self) -> tuple[Field, ...]: ...

    @property
    def draws(self) -> Literal["picture", "text", "talk"]:
        """What an answer becomes; a talk goes on, and each of its questions is `following` those before."""

    def question(self, *given: str) -> Conversation:
        """The question as `evaluate` and `predict` ask it. Raises UserError for what none can be made of."""

    def shown(self, question: Conversation, answer: str, answerer: Answerer) -> Shown: ...


def answer(model: LoadedModel, question: Conversation) -> str:
    """What the model writes. Raises UserError for a question that is longer than the model can read."""
    from stages.kit.evaluation.answer import room_for_questions
    from stages.kit.models.prompts import encode

    answerer = model.answerer
    settings, longest = answerer.settings, answerer.model.config.get_text_config().max_position_embeddings
    room = room_for_questions(settings.max_length, settings.max_new_tokens)
    tokens = encode(answerer.processor, [question], padding_side="left", max_length=room)["input_ids"].shape[1]
    if tokens + settings.max_new_tokens > longest:
        raise UserError(
            f"too long: {tokens:,} tokens, and {settings.max_new_tokens:,} of the answer; the model takes {longest:,}"
        )
    return answerer.answers([question])[0]


def said(role: str, text: str) -> dict[str, Any]:
    """A message of a conversation."""
    return {"role": role, "content": [{"type": "text", "text": text}]}


def following(question: Conversation, turns: Sequence[tuple[str, str]]) -> Conversation:
    """The question after what was said before: turns of (role, text), of user and assistant."""
    *system, last = question.messages
    return replace(question, messages=[*system, *(said(*turn) for turn in turns), last])


def required_text(given: str, what: str) -> str:
    """A text without the white space around it. Raises UserError for an empty one, and for chat markup."""
    text = given.strip()
    if not text:
        raise UserError(f"write {what} first")
    if problem := markup_problem(text):
        raise UserError(problem)
    return text
