"""A task on a page: the fields that a person fills in, the question made of them, and the completion as it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stages.core.errors import UserError
from stages.core.tasks import reader_of
from stages.data.conversation import Conversation, message
from stages.data.given_images import parse_image
from stages.data.texts import markup_problem
from stages.planning.plan import read_plan
from stages.tasks.amr import predictions as amr
from stages.tasks.amr.samples.graphs import Node, Reference, read_graph
from stages.tasks.detection import sources as detection_sources
from stages.tasks.detection.samples import DetectionRecord, conversation, read_split
from stages.tasks.detection.samples.boxes import codec_of, decode_boxes
from stages.tasks.detection.scoring.drawing import PREDICTION_COLOUR, draw_boxes
from stages.tasks.moe import samples as moe

if TYPE_CHECKING:
    from PIL.Image import Image

    from stages.core.params.schema import Params
    from stages.evaluation.generate import TextGenerator
    from stages.evaluation.llama_cpp import LlamaCpp


Field = tuple[Literal["image", "line", "text"], str]
"""The kind of a field, and its label. The value of an image is the path of a file."""


def answer_format_of(params: Params, name: str) -> str | None:
    """The answer format of a run: a recipe's is in its plan."""
    if name in params.baselines:
        return params.subject(name).answer_format
    return read_plan(params.recipe_name(name)).recipe.answer_format


def following(question: Conversation, turns: Sequence[tuple[str, str]]) -> Conversation:
    """The question after earlier turns of (role, text), of user and assistant."""
    *system, last = question.messages
    return replace(question, messages=[*system, *(message(*turn) for turn in turns), last])


def _text(value: str, name: str = "") -> str:
    """The value without white space around it. Raises UserError for chat markup, and for an empty text with a name."""
    text = value.strip()
    if name and not text:
        raise UserError(f"write {name} first")
    if problem := markup_problem(text):
        raise UserError(problem)
    return text


class Form:
    """A message with a system prompt, completed in text: the form of every task that has none of its own."""

    fields: tuple[Field, ...] = (
        ("line", "A message"),
        ("text", "A system prompt before all messages, or nothing"),
    )
    output: Literal["image", "text", "dialogue"] = "dialogue"
    """The form of a completion. In a dialogue, each question follows the turns before it (`following`)."""

    def __init__(self, params: Params, name: str) -> None:
        """name: of a recipe, a baseline or an export."""

    def question(self, *values: str) -> Conversation:
        """The question as `evaluate` and `predict` ask it. Raises UserError for unusable values."""
        text, system = _text(values[0], "a message"), _text(values[1])
        before = [message("system", system)] if system else []
        return Conversation(sample_id="message", messages=[*before, message("user", text)])

    def shown(
        self, question: Conversation, completion: str, generator: TextGenerator | LlamaCpp
    ) -> tuple[Image | None, str]:
        """An image and Markdown, in which text of a model or a person is escaped, for the page to show above the
        completion; by default nothing."""
        return None, ""


class DetectionForm(Form):
    fields = (("image", "Drop a photograph"),)
    output = "image"

    def __init__(self, params: Params, name: str) -> None:
        data = params.subject(name).data
        self.sample = read_split(Path("data/prepared") / data, "val")[0]
        """A sample of the run's data, with the prompt and the form of answers."""
        dataset, path = params.dataset(data), params.dataset_path(data)
        self.max_pixels = reader_of(detection_sources, dataset, path).max_image_pixels

    def question(self, *values: str) -> Conversation:
        if not values[0]:
            raise UserError("choose a photograph first")
        path = Path(values[0])
        fields, problems = parse_image(path.name, path.read_bytes(), self.max_pixels)
        if problems:
            raise UserError(f"{path.name}: {'; '.join(problems)}")
        record = replace(self.sample, **fields, boxes=(), labels=(), categories=())
        return conversation(record, answered=False)

    def shown(
        self, question: Conversation, completion: str, generator: TextGenerator | LlamaCpp
    ) -> tuple[Image | None, str]:
        from stages.evaluation.generate import TextGenerator
        from stages.models.prompts import resizing

        assert isinstance(generator, TextGenerator), "llama.cpp sees no images here"
        (record,) = question.images
        assert isinstance(record, DetectionRecord)
        resized = resizing(generator.processor)
        assert resized is not None, "the task is refused to models without a vision tower"
        family = codec_of(record.answer, generator.model.config.model_type)
        decoded = decode_boxes(completion, family=family, size=resized(record.width, record.height))
        labelled = [(box, label or "?") for box, label in zip(decoded.boxes, decoded.labels, strict=True)]
        w, h = record.width, record.height
        boxes = [
            f"x {x0 * w:.0f} to {x1 * w:.0f}, y {y0 * h:.0f} to {y1 * h:.0f} of {w} x {h} pixels"
            for x0, y0, x1, y1 in decoded.boxes
        ]
        text = "The completion says that there is none." if decoded.none else "; ".join(boxes)
        image = draw_boxes(record, labelled, PREDICTION_COLOUR)
        return image, text or "No box can be read in the completion."


class AmrForm(Form):
    fields = (("line", "A sentence"),)
    output = "text"

    def __init__(self, params: Params, name: str) -> None:
        answer_format = answer_format_of(params, name)
        assert answer_format is not None, "plans and baselines of this task have one"
        self.answer_format = answer_format

    def question(self, *values: str) -> Conversation:
        sentence = _text(values[0], "a sentence")
        if len(sentence.splitlines()) > 1:
            raise UserError("one sentence at a time, on one line")
        return amr.conversation(sentence, answer_format=self.answer_format)

    def shown(
        self, question: Conversation, completion: str, generator: TextGenerator | LlamaCpp
    ) -> tuple[Image | None, str]:
        """The graph that `predict` writes: the completion's, a repaired one, or an empty one."""
        submission = amr.submission([question.sample_id], [completion], answer_format=self.answer_format)
        _, graph = submission.text.replace("\r\n", "\n").split("\n", 1)
        note = "The completion is no graph; this is its repair.\n" if submission.num_repaired else ""
        note += "The completion holds no concept; `predict` writes an empty graph.\n" if submission.num_empty else ""
        drawn = "\n".join(mermaid(read_graph(graph)))
        fence = "```"
        while fence in graph:
            fence += "`"
        return None, f"{note}\n```mermaid\n{drawn}\n```\n\n{fence}\n{graph.rstrip()}\n{fence}\n"


def mermaid(graph: Node) -> Iterator[str]:
    """The graph as a flowchart of Mermaid, which Gradio's Markdown draws: concepts in boxes, constants in round ones.

    Nodes are n0, n1, ... in reading order, as references number them.
    """
    yield "flowchart TD"
    numbers = {id(node): number for number, node in enumerate(graph.walk())}
    for node in graph.walk():
        number = numbers[id(node)]
        yield f'n{number}["{escaped(node.concept)}"]'
        for position, (role, target) in enumerate(node.edges):
            if isinstance(target, str):
                other = f"n{number}c{position}"
                yield f'{other}(["{escaped(target)}"])'
            else:
                other = f"n{target.node if isinstance(target, Reference) else numbers[id(target)]}"
            yield f'n{number} -- "{escaped(role)}" --> {other}'


def escaped(text: str) -> str:
    """The text with all but letters and digits as Mermaid's character codes, so that none is syntax."""
    return "".join(char if char.isalnum() else f"#{ord(char)};" for char in text)


class MoeForm(Form):
    fields = (
        ("line", "A question"),
        ("text", "The transcript that it is about, or nothing"),
    )
    output = "text"

    def question(self, *values: str) -> Conversation:
        record = moe.Record(
            id="question",
            domain="qmsum" if values[1].strip() else "truthfulqa",
            question=_text(values[0], "a question"),
            context=_text(values[1]) or None,
            best="",
            correct=("",),
            incorrect=(),
            file="",
            line=1,
        )
        return moe.conversation(record, answered=False)


FORMS: dict[str, type[Form]] = {"detection": DetectionForm, "amr": AmrForm, "moe": MoeForm}
"""Forms by task. Other tasks have Form."""
