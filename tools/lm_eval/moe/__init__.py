"""Questions of the task moe for lm-evaluation-harness, whose tasks lie beside this file.

The model is asked word for word what our own evaluation asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.tasks.moe.samples.questions import answered_with
from stages.tasks.moe.samples.records import DOMAINS, Record
from tools.lm_eval.moe.rouge import ROUGES
from tools.lm_eval.scoring import Figure

END_OF_TURN = "<|im_end|>"

TASKS_DIR = Path(__file__).parent
_BARE = "as lm-eval's own tasks have it, without the end of an answer's turn"

FIGURES = (
    Figure(heading="MC1", documents="truthfulqa", task="bakeoff_mc1", metric="acc", ours="mc1"),
    Figure(heading="MC2", documents="truthfulqa", task="bakeoff_mc2", metric="acc", ours="mc2"),
    Figure(heading="MC1, bare", documents="truthfulqa", task="bakeoff_mc1_bare", metric="acc", note=_BARE),
    Figure(heading="MC2, bare", documents="truthfulqa", task="bakeoff_mc2_bare", metric="acc", note=_BARE),
    *(
        Figure(heading=heading, documents="qmsum", task="bakeoff_qmsum", metric=key, ours=key)
        for key, heading in ROUGES.items()
    ),
)

Render = Callable[[Conversation], str]
Document = dict[str, Any]


def documents(records: Sequence[Record], render: Render) -> dict[str, list[Document]]:
    """By domain, a document for each of its records, in their order; domains without records are left out.

    render: the text that the model reads of a conversation, through its own chat template, the transcript cut to what
        evaluation has room for.
    Documents of TruthfulQA have what the harness's own tasks read (`question`, `mc1_targets`, `mc2_targets`), and the
    same answers with the end of the turn, as our evaluation counts them.
    Raises UserError where the chat template does not put an answer right behind its prompt.
    """
    makers = {"truthfulqa": _choices, "qmsum": _query}
    made = {
        domain: [makers[domain](record, render) for record in records if record.domain == domain] for domain in DOMAINS
    }
    return {domain: found for domain, found in made.items() if found}


def _choices(record: Record, render: Render) -> Document:
    prompt = render(answered_with(record, None))
    if not render(answered_with(record, record.best)).startswith(f"{prompt}{record.best}{END_OF_TURN}"):
        raise UserError(
            f"sample {record.id}: the model's chat template does not end an answer with {END_OF_TURN}, or changes it; "
            "lm-eval would be asked something else than our own evaluation"
        )
    mc1 = _targets(true=(record.best,), false=record.incorrect)
    mc2 = _targets(true=record.correct, false=record.incorrect)
    return {
        "id": record.id,
        "question": record.question,
        "prompt": prompt,
        "mc1_targets": mc1,
        "mc2_targets": mc2,
        "mc1_turns": [answer + END_OF_TURN for answer in mc1["choices"]],
        "mc2_turns": [answer + END_OF_TURN for answer in mc2["choices"]],
    }


def _targets(*, true: Sequence[str], false: Sequence[str]) -> dict[str, list[Any]]:
    return {"choices": [*true, *false], "labels": [1] * len(true) + [0] * len(false)}


def _query(record: Record, render: Render) -> Document:
    return {
        "id": record.id,
        "question": record.question,
        "prompt": render(answered_with(record, None)),
        "answers": list(record.correct),
    }
