"""Detection on a page: a photograph in, boxes on it out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.data.images import parse_image
from stages.tasks import reader_of
from stages.tasks.detection import sources
from stages.tasks.detection.samples import DetectionRecord, codec_of, conversation, decode_boxes, read_split
from stages.tasks.detection.scoring import PREDICTION_COLOUR, draw_boxes
from tools.try_it.asking import Field, Shown, Subject

if TYPE_CHECKING:
    from stages.kit.evaluation.answer import Answerer


class Form:
    fields = (Field(kind="picture", label="Drop a photograph"),)
    draws: Final = "picture"

    def __init__(self, subject: Subject) -> None:
        params = subject.params
        data = params.subject(subject.run).data
        self.asked = read_split(Path("data/prepared") / data, "val")[0]
        """A sample of the run's data: what is asked of every picture, and how it is to be answered."""
        self.max_pixels = reader_of(sources, params.dataset(data)).max_image_pixels

    def question(self, *given: str) -> Conversation:
        (path,) = given
        if not path:
            raise UserError("choose a photograph first")
        content = Path(path).read_bytes()
        if not content:
            raise UserError(f"no image: {Path(path).name} is empty")
        row = {"image_id": Path(path).name, "image": {"bytes": content}}
        fields, problems = parse_image(row, self.max_pixels)
        if problems:
            raise UserError("; ".join(problems))
        record = replace(self.asked, **fields, boxes=(), labels=(), categories=(), place=None)
        return conversation(record, answered=False)

    def shown(self, question: Conversation, answer: str, answerer: Answerer) -> Shown:
        from stages.kit.models.prompts import resizing

        (record,) = question.images
        assert isinstance(record, DetectionRecord)
        resized = resizing(answerer.processor)
        assert resized is not None, "the task is refused to models without a vision tower"
        family = codec_of(record.answer, answerer.model.config.model_type)
        decoded = decode_boxes(answer, family=family, size=resized(record.width, record.height))
        found = [(box, label or "?") for box, label in zip(decoded.boxes, decoded.labels, strict=True)]
        if decoded.none:
            said = "Says that there is none."
        elif found:
            said = "; ".join(_in_pixels(box, record) for box in decoded.boxes)
        else:
            said = "No box can be read in the answer."
        return Shown(picture=draw_boxes(record, found, PREDICTION_COLOUR), text=said)


def _in_pixels(box: tuple[float, float, float, float], record: DetectionRecord) -> str:
    x0, y0, x1, y1 = box
    return (
        f"x {x0 * record.width:.0f} to {x1 * record.width:.0f}, y {y0 * record.height:.0f} to {y1 * record.height:.0f}"
        f" of {record.width} x {record.height} pixels"
    )
