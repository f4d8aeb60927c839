"""What a model is asked about a picture, and how it is to answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.tasks.detection.samples.boxes import codec, codec_of, encode_boxes
from stages.tasks.detection.samples.records import PROMPT, TARGET, Box, DetectionRecord


def check(model_type: str, answer_format: str | None) -> None:
    """Raises UserError for a model that writes no boxes, and for an answer format, as there is but one."""
    codec(model_type)
    if answer_format is not None:
        raise UserError(f"answer_format: detection has one answer format, boxes; found {answer_format!r}")


def conversation(record: DetectionRecord, *, answered: bool, answer_format: None = None) -> Conversation:
    """The picture and the question. Its answer depends on the model: `ForModel` has it."""
    assert not answered, "a model's family says how boxes are written"
    return _conversation(record.image_id, record, record.prompt, None)


@dataclass(frozen=True)
class ForModel:
    """The task for one model, which answers in its family's form."""

    family: str
    """model_type of its config."""
    resized: Callable[[int, int], tuple[int, int]]
    """From the (width, height) of a picture to those that the model sees."""

    def conversation(self, record: DetectionRecord, *, answered: bool, answer_format: None = None) -> Conversation:
        """The picture and the question; with the true boxes as the assistant's answer where `answered`."""
        size = self.resized(record.width, record.height)
        targets, form = record.targets(), codec_of(record.answer, self.family)
        boxes, labels = [box for box, _ in targets], [label for _, label in targets]
        answer = encode_boxes(boxes, family=form, size=size, label=labels) if answered else None
        return _conversation(record.image_id, record, record.prompt, answer)

    def score_options(self, records: Sequence[DetectionRecord]) -> dict[str, Any]:
        """What `scoring.score` has to know of the model."""
        return {"family": self.family, "sizes": [self.resized(record.width, record.height) for record in records]}


def probes(answer_format: None = None) -> list[Conversation]:
    """Two answered conversations about plain drawings, upright and wide, to compare two models on."""
    boxes: tuple[Box, ...] = ((0.2, 0.1, 0.7, 0.5), (0.25, 0.6, 0.9, 0.95))
    found = []
    for index, size in enumerate(((224, 280), (280, 224))):
        picture = Image.linear_gradient("L").resize(size).convert("RGB")
        draw = ImageDraw.Draw(picture)
        for x0, y0, x1, y1 in boxes[: index + 1]:
            draw.rectangle((x0 * size[0], y0 * size[1], x1 * size[0], y1 * size[1]), fill="white", outline="black")
        answer = encode_boxes(boxes[: index + 1], label=TARGET)
        found.append(_conversation(f"probe-{index}", picture, PROMPT, answer))
    return found


def _conversation(
    sample_id: str, picture: Image.Image | DetectionRecord, prompt: str, answer: str | None
) -> Conversation:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
    if answer is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return Conversation(sample_id=sample_id, messages=messages, images=[picture])
