"""Pre-trains the tiny Qwen2-VL that stands in for the big one: it can point, but has never seen a table.

    python -m tools.tiny_bases.detection --out data/tiny/qwen2-vl

Reads nothing: the scenes are generated, and none shows a nutrition table. Writes a plain Hugging Face folder
with bfloat16 weights, `pretraining.json` (settings, first losses, figures) and a README.md that says the same
in words.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from transformers import Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from stages.core.logs import configure_logging
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.generation import generate_answers
from stages.tasks.detection.samples.boxes import decode_boxes
from stages.tasks.detection.samples.records import reading_order
from stages.tasks.detection.scoring.metrics import pairwise_iou
from stages.tasks.detection.sources.scenes import OBJECTS, Kind, draw_scene
from tools.tiny_bases import pretraining
from tools.tiny_bases.architecture import build_tiny_qwen2_vl
from tools.tiny_bases.detection.batches import corpus, make_batch, question
from tools.tiny_bases.detection.pointing import PointingLoss

log = logging.getLogger("tools.tiny_bases.detection.__main__")  # not __main__, as which this file runs

HELD_OUT_SEED = 2_000_003
"""Of the scenes that figures are measured on; used neither in training nor to set how hard packages are."""


@dataclass(frozen=True, kw_only=True)
class Settings(pretraining.Settings):
    steps: int = 900
    batch_size: int = 16
    pointing_weight: float = 0.5
    """Of the auxiliary losses, beside the answer's own loss."""


def train(model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor, settings: Settings) -> Iterator[float]:
    """Trains `model` in place; yields the loss of the answers' tokens after each step."""
    pretraining.begin(model, settings)
    model.set_attn_implementation({"text_config": "eager"})  # PointingLoss reads the weights of attention
    pointing = PointingLoss(model, len(OBJECTS))
    draw = functools.partial(make_batch, processor, seed=settings.seed, batch_size=settings.batch_size)
    with ThreadPoolExecutor(1) as drawing:
        upcoming = drawing.submit(draw, step=0)

        def losses(step: int) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal upcoming
            inputs, targets = upcoming.result()
            upcoming = drawing.submit(draw, step=step + 1)
            answer_loss = model(**inputs).loss
            pictured = inputs["input_ids"] == model.config.image_token_id
            return answer_loss + settings.pointing_weight * pointing(targets, pictured), answer_loss

        yield from pretraining.train_steps(model, settings, losses, auxiliary=pointing.parameters())
    pointing.remove()
    model.set_attn_implementation({"text_config": "sdpa"})


def measure(
    model: Qwen2VLForConditionalGeneration,
    processor: Qwen2VLProcessor,
    kinds: tuple[Kind, ...],
    seed: int,
    count: int,
) -> dict[str, float]:
    """Asks for one category of each of `count` scenes; the first box answered counts, none is IoU 0."""
    scenes = [draw_scene(kinds[index % len(kinds)], seed, index) for index in range(count)]
    wanted = [random.Random(f"wanted/{seed}/{i}").choice(scene.categories) for i, scene in enumerate(scenes)]

    def ask(index: int) -> Conversation:
        content = [{"type": "image"}, {"type": "text", "text": question(wanted[index])}]
        messages = [{"role": "user", "content": content}]
        return Conversation(sample_id=str(index), messages=messages, images=[scenes[index].image])

    model.eval()
    answers = generate_answers(model, processor, ask, count, batch_size=16, max_new_tokens=96)
    ious = []
    for scene, name, answer in zip(scenes, wanted, answers, strict=True):
        truth = reading_order([b for b, c in zip(scene.boxes, scene.categories, strict=True) if c == name])
        boxes = decode_boxes(answer).boxes
        ious.append(float(pairwise_iou(truth[:1], boxes[:1])[0, 0]) if boxes else 0.0)
    parsed = sum(decode_boxes(answer).valid for answer in answers)
    return {
        "samples": count,
        "mean_iou": round(sum(ious) / count, 4),
        "iou_over_50": round(sum(value > 0.5 for value in ious) / count, 4),
        "detection_rate": round(parsed / count, 4),
    }


@click.command(help=__doc__)
@pretraining.options(Settings())
def main(out_dir: Path, steps: int, seed: int) -> None:
    configure_logging("pretrain")
    settings = Settings(steps=steps, seed=seed)
    model, processor = build_tiny_qwen2_vl(corpus(), seed=settings.seed)

    def measured(written: Qwen2VLForConditionalGeneration) -> dict[str, dict[str, float]]:
        figures = {
            "own scenes": measure(written, processor, ("objects",), HELD_OUT_SEED, 128),
            "nutrition tables": measure(written, processor, ("front", "back"), HELD_OUT_SEED, 128),
        }
        for name, values in figures.items():
            log.info("%s  %s", name, "  ".join(f"{key} {value:.3f}" for key, value in values.items()))
        return figures

    pretraining.pretrain(
        model,
        processor,
        settings,
        out_dir,
        losses=train(model, processor, settings),
        measure=measured,
        card=model_card,
    )


def model_card(record: dict[str, Any]) -> str:
    figures = record["figures"]
    made = pretraining.how_made(
        record, samples="scenes", command="python -m tools.tiny_bases.detection --out data/tiny/qwen2-vl"
    )
    rows = "".join(
        "| {} | {mean_iou:.3f} | {iou_over_50:.3f} | {detection_rate:.3f} |\n".format(name, **values)
        for name, values in figures.items()
    )
    return f"""# The tiny Qwen2-VL

A Qwen2-VL of 3 million weights, pre-trained on generated scenes of panels, barcodes, logos, text blocks and
QR codes. It answers in Qwen2-VL's grounding format and finds those objects; it has never seen a nutrition
table. It has learnt to copy the name it is asked for: in 3 of 10 scenes with one object that name is another
word, "nutrition-table" among eight of them. It stands in for the real model where there is no GPU.

{made}
| {figures["own scenes"]["samples"]} held-out pictures of | mean IoU | IoU > 0.5 | well-formed answers |
|---|---|---|---|
{rows}
Both compare the first box of an answer with the first object of the kind asked for. On a package the model
boxes things of every kind, tables among them, but seldom a table first. How hard the packages are was set with
this model at hand (see `scenes.py`), so its figure on tables says as much about how the pictures are drawn as
about what the model knows.

`pretraining.json` holds all settings and the first losses, which a test reproduces. The licence is that of
the code, Apache-2.0.
"""


if __name__ == "__main__":
    main()
