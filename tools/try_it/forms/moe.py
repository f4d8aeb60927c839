"""Mixtures of experts on a page: a question, perhaps about a transcript, in; a sentence out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.data.texts import markup_problem
from stages.tasks.moe.samples import Record, conversation
from tools.try_it.asking import Field, Shown, Subject, required_text

if TYPE_CHECKING:
    from stages.kit.evaluation.answer import Answerer


class Form:
    fields = (
        Field(kind="line", label="A question"),
        Field(kind="text", label="A transcript that it is about, or nothing"),
    )
    draws: Final = "text"

    def __init__(self, subject: Subject) -> None:
        pass

    def question(self, *given: str) -> Conversation:
        question, context = required_text(given[0], "a question"), given[1].strip()
        if problem := markup_problem(context):
            raise UserError(problem)
        record = Record(
            id="question",
            domain="qmsum" if context else "truthfulqa",
            question=question,
            context=context or None,
            best="",
            correct=("",),
            incorrect=(),
            file="",
            line=1,
        )
        return conversation(record, answered=False)

    def shown(self, question: Conversation, answer: str, answerer: Answerer) -> Shown:
        """Nothing beside the answer itself."""
        return Shown()
