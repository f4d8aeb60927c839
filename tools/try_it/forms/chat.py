"""Chat on a page: a conversation with each model, which goes on from its own answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.data.texts import markup_problem
from tools.try_it.asking import Field, Shown, Subject, required_text, said

if TYPE_CHECKING:
    from stages.kit.evaluation.answer import Answerer


class Form:
    fields = (
        Field(kind="line", label="A message"),
        Field(kind="text", label="A system prompt before all messages, or nothing"),
    )
    draws: Final = "talk"

    def __init__(self, subject: Subject) -> None:
        pass

    def question(self, *given: str) -> Conversation:
        message, system = required_text(given[0], "a message"), given[1].strip()
        if problem := markup_problem(system):
            raise UserError(problem)
        before = [said("system", system)] if system else []
        return Conversation(sample_id="message", messages=[*before, said("user", message)])

    def shown(self, question: Conversation, answer: str, answerer: Answerer) -> Shown:
        """Nothing beside the answer itself."""
        return Shown()
