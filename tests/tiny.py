"""Tiny models and conversations for tests: the real classes and files, random weights, a fraction of a second."""

from pathlib import Path

from PIL import Image, ImageDraw

from stages.kit.data.conversation import Conversation
from stages.kit.models.tiny import SMALLEST, build_tiny_qwen2_vl, save_model

QUESTION = "Detect the bounding box of the nutrition table."
ANSWER = "<|object_ref_start|>nutrition-table<|object_ref_end|><|box_start|>({},{}),({},{})<|box_end|>"


def save_tiny_vlm(folder: Path) -> Path:
    model, processor = build_tiny_qwen2_vl([QUESTION, ANSWER], SMALLEST, seed=0)
    save_model(model, processor, folder)
    return folder


def table_conversation(index: int, *, answered: bool = True) -> Conversation:
    """A white table on a plain ground, at a place that depends on `index`; sizes differ, so that batches are padded."""
    width, height = 84 + 28 * (index % 2), 84
    box = (5 + 7 * (index % 4), 10, 40 + 7 * (index % 4), 60)
    picture = Image.new("RGB", (width, height), (30, 60 + 20 * (index % 5), 90))
    ImageDraw.Draw(picture).rectangle(box, fill="white")
    shares = [1000 * side // size for side, size in zip(box, (width, height, width, height), strict=True)]
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    if answered:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": ANSWER.format(*shares)}]})
    return Conversation(sample_id=f"table-{index}", messages=messages, images=[picture])
