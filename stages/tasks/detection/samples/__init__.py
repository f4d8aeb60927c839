"""Records of detection, and the conversation about each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image, ImageDraw

from stages.core.errors import UserError
from stages.core.records import shown
from stages.data.conversation import Conversation, message
from stages.data.images import ImageRecord
from stages.data.splits import read_prepared, schema_of
from stages.tasks.detection.samples.boxes import (
    TARGET,
    AnswerForm,
    Box,
    codec,
    codec_of,
    decode_boxes,
    encode_boxes,
    reading_order,
)

ScoredBoxes = Literal["first", "all"]

PROMPT = "Detect the bounding box of the nutrition table."
"""The question about TARGET."""


@dataclass(frozen=True, kw_only=True)
class DetectionRecord(ImageRecord):
    boxes: tuple[Box, ...]
    """In the order of the dataset."""
    categories: tuple[str, ...]
    """The category of each box."""
    labels: tuple[str | None, ...]
    """The name of each box in answers; None if it is not asked for."""
    asked: tuple[str, ...] = (TARGET,)
    """The labels that are asked for; empty for all. With several, a predicted box's label counts."""
    prompt: str = PROMPT
    answer: AnswerForm = "native"
    """The form of boxes: the model family's own, or JSON."""
    scored_boxes: ScoredBoxes = "first"
    """Whether a sample's IoU is of the box that was annotated first, or of all that are asked for."""
    group: str = ""
    """A name that images share which belong together, such as a product or a patient; empty for none."""

    def content(self) -> list[Any]:
        return [*super().content(), self.boxes, self.categories]

    def annotated(self) -> list[tuple[Box, str]]:
        """The boxes that are asked for, each with its label, in the order of the dataset."""
        return [(box, label) for box, label in zip(self.boxes, self.labels, strict=True) if label is not None]

    def targets(self) -> list[tuple[Box, str]]:
        """The boxes of `annotated` in reading order."""
        return sorted(self.annotated(), key=reading_order)


SCHEMA = schema_of(
    DetectionRecord,
    "image_id",
    "image",
    "width",
    "height",
    "boxes",
    "categories",
    "sha256",
    "labels",
    "asked",
    "prompt",
    "answer",
    "scored_boxes",
    "group",
)
"""Columns of a prepared split."""


def read_split(prepared_dir: Path, split: str) -> list[DetectionRecord]:
    """The records of a prepared split, in their order. Raises UserError if it is not prepared, or damaged."""
    return read_prepared(prepared_dir, split, DetectionRecord, SCHEMA)


def check(model_type: str) -> None:
    """Raises UserError for a model that writes no boxes."""
    codec(model_type)


def conversation(record: DetectionRecord, *, answered: bool, answer_format: None = None) -> Conversation:
    """The image and the question. The answer depends on the model: see `ForModel`."""
    assert not answered, "a model's family determines how boxes are written"
    return _conversation(record.image_id, record, record.prompt, None)


@dataclass(frozen=True)
class ForModel:
    """The task for one model, which answers in its family's form."""

    family: str
    """model_type of its config."""
    resized: Callable[[int, int], tuple[int, int]]
    """From the (width, height) of an image to those that the model sees."""

    def conversation(self, record: DetectionRecord, *, answered: bool, answer_format: None = None) -> Conversation:
        """The image and the question; with the true boxes as the assistant's answer if `answered`.

        Raises UserError if they do not come back out of the answer: the plan asks for those of all samples.
        """
        answer = None
        if answered:
            targets = record.targets()
            labels = [label for _, label in targets]
            form, size = codec_of(record.answer, self.family), self.resized(record.width, record.height)
            answer = encode_boxes(targets, family=form, size=size)
            if decode_boxes(answer, family=form, size=size).labels != tuple(labels):
                raise UserError(
                    f"sample {record.image_id}: the boxes of {', '.join(labels)} do not come back out of "
                    f"{shown(answer)}, as a {self.family} writes them; set other names with reader.label in params.yaml"
                )
        return _conversation(record.image_id, record, record.prompt, answer)

    def score_options(self, records: Sequence[DetectionRecord]) -> dict[str, Any]:
        """Arguments of `scoring.score` that depend on the model."""
        return {"family": self.family, "sizes": [self.resized(record.width, record.height) for record in records]}


def probes(answer_format: None = None) -> list[Conversation]:
    """Two answered conversations about plain drawings, upright and wide, to compare two models on."""
    targets: list[tuple[Box, str]] = [((0.2, 0.1, 0.7, 0.5), TARGET), ((0.25, 0.6, 0.9, 0.95), TARGET)]
    found = []
    for index, size in enumerate(((224, 280), (280, 224))):
        image = Image.linear_gradient("L").resize(size).convert("RGB")
        draw = ImageDraw.Draw(image)
        for (x0, y0, x1, y1), _ in targets[: index + 1]:
            draw.rectangle((x0 * size[0], y0 * size[1], x1 * size[0], y1 * size[1]), fill="white", outline="black")
        found.append(_conversation(f"probe-{index}", image, PROMPT, encode_boxes(targets[: index + 1])))
    return found


def _conversation(
    sample_id: str, image: Image.Image | DetectionRecord, prompt: str, answer: str | None
) -> Conversation:
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
    answered = [] if answer is None else [message("assistant", answer)]
    return Conversation(sample_id=sample_id, messages=[asked, *answered], images=[image])
