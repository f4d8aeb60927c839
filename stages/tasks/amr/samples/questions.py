"""What a model is asked about a sentence, and how it is to answer."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import partial

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.families import require_text
from stages.tasks.amr.samples.graphs import Node, read_graph
from stages.tasks.amr.samples.records import Record
from stages.tasks.amr.samples.targets import ANSWER_FORMATS, complete, encode

PROMPTS = {
    "full": "Phân tích câu sau thành đồ thị AMR, viết theo ký pháp PENMAN trên một dòng.",
    "ptr": "Phân tích câu sau thành đồ thị AMR trên một dòng, không dùng biến; "
    "nút được nhắc lại thì đánh dấu bằng con trỏ #1, #2, ...",
    "mtup": "Phân tích câu sau thành đồ thị AMR theo hai bước: trước hết viết đồ thị không có biến, "
    "sau dòng --- viết lại đồ thị đầy đủ có biến theo ký pháp PENMAN.",
}
"""The instruction for each answer format, in Vietnamese: the graph in one line of PENMAN; without variables, with a
pointer on each node that is mentioned again; first without variables and, after a line of ---, in full."""

_PROBES = (
    ("Nó không đọc sách .", "(đ / đọc :agent (n / nó) :patient (s / sách) :polarity -)"),
    ("Cậu bé muốn mua hoa .", "(m / muốn :agent (c / cậu_bé) :theme (m2 / mua :agent c :patient (h / hoa)))"),
)


def check(model_type: str, answer_format: str | None) -> None:
    """Raises UserError for a model that is not one of text alone, and for an unknown answer format."""
    require_text(model_type, "AMR parsing")
    if answer_format not in ANSWER_FORMATS:
        raise UserError(f"answer_format: AMR parsing has {', '.join(ANSWER_FORMATS)}; found {answer_format!r}")


def completion(answer_format: str) -> Callable[[str], bool]:
    """What says of an answer, whole or in part, that its graph is complete."""
    return partial(complete, answer_format=answer_format)


def conversation(record: Record, *, answered: bool, answer_format: str) -> Conversation:
    """The sentence and the question; with the true graph as the assistant's answer where `answered`.

    answer_format: one of targets.ANSWER_FORMATS, the form in which the graph is to be written.
    """
    return question(record.id, record.sentence, answer_format, answer=record.parsed() if answered else None)


def probes(answer_format: str) -> list[Conversation]:
    """Two answered conversations, without and with a node mentioned again, to compare two models on."""
    return [
        question(f"probe-{index}", sentence, answer_format, answer=read_graph(graph))
        for index, (sentence, graph) in enumerate(_PROBES)
    ]


def question(sample_id: str, sentence: str, answer_format: str, *, answer: Node | None = None) -> Conversation:
    """A sentence to be parsed, and the graph as the assistant's answer where there is one."""
    text = f"{PROMPTS[answer_format]}\n{unicodedata.normalize('NFC', sentence)}"
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    if answer is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": encode(answer, answer_format)}]})
    return Conversation(sample_id=sample_id, messages=messages)
