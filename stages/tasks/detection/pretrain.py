"""Pre-trains the tiny Qwen2-VL that stands in for the big one: it can point, but has never seen a table.

    python -m stages.tasks.detection.pretrain --out data/tiny/qwen2-vl

Reads nothing: the scenes are generated, and none shows a nutrition table. Writes a plain Hugging Face folder
with bfloat16 weights, `pretraining.json` (settings, first losses, figures) and a README.md that says the same
in words.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import logging
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from transformers import Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.generation import generate_answers
from stages.kit.logs import configure_logging
from stages.kit.models.tiny import build_tiny_qwen2_vl, save_model
from stages.kit.publish import published
from stages.kit.training.seed import seed_everything
from stages.tasks.detection.pretraining.batches import corpus, make_batch, question
from stages.tasks.detection.pretraining.pointing import PointingLoss
from stages.tasks.detection.samples.boxes import decode_boxes
from stages.tasks.detection.samples.records import reading_order
from stages.tasks.detection.scoring.metrics import pairwise_iou
from stages.tasks.detection.sources.scenes import OBJECTS, Kind, draw_scene

log = logging.getLogger("stages.tasks.detection.pretrain")  # not __main__, as which this file runs

HELD_OUT_SEED = 2_000_003
"""Of the scenes that figures are measured on; used neither in training nor to set how hard packages are."""
FIRST_STEPS = 20
"""How many losses are recorded."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = 900
    batch_size: int = 16
    seed: int = 0
    learning_rate: float = 2e-3
    """Of AdamW, for embeddings, biases, norms, the patch convolution and the auxiliary heads."""
    muon_learning_rate: float = 0.02
    """Of Muon, for the weight matrices."""
    warmup_steps: int = 50
    pointing_weight: float = 0.5
    """Of the auxiliary losses, beside the answer's own loss."""
    threads: int = 2
    """The order of floating-point sums depends on it, and so the weights do."""


def train(model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor, settings: Settings) -> Iterator[float]:
    """Trains `model` in place; yields the loss of the answers' tokens after each step."""
    torch.set_num_threads(settings.threads)
    seed_everything(settings.seed)
    model.set_attn_implementation({"text_config": "eager"})  # PointingLoss reads the weights of attention
    model.train()
    pointing = PointingLoss(model, len(OBJECTS))
    parameters = [*model.parameters(), *pointing.parameters()]
    optimizers = make_optimizers(model, pointing, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, settings)) for o in optimizers]
    image_token = model.config.image_token_id
    draw = functools.partial(make_batch, processor, seed=settings.seed, batch_size=settings.batch_size)
    with ThreadPoolExecutor(1) as drawing:
        upcoming = drawing.submit(draw, step=0)
        for step in range(settings.steps):
            inputs, targets = upcoming.result()
            upcoming = drawing.submit(draw, step=step + 1)
            answer_loss = model(**inputs).loss
            loss = answer_loss + settings.pointing_weight * pointing(targets, inputs["input_ids"] == image_token)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            yield answer_loss.item()
    pointing.remove()
    model.set_attn_implementation({"text_config": "sdpa"})


def make_optimizers(
    model: Qwen2VLForConditionalGeneration, pointing: PointingLoss, settings: Settings
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else."""
    matrices: list[torch.nn.Parameter] = []
    others = list(pointing.parameters())
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if inner else others).append(parameter)
    return [
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=settings.muon_learning_rate, momentum=0.95, weight_decay=0.01),
    ]


def rate_factor(step: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to 3 percent."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / settings.steps))))


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
@click.option("--out", "out_dir", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--steps", default=Settings.steps, show_default=True, help="Optimizer steps.")
@click.option("--seed", default=Settings.seed, show_default=True, help="Of the weights, the scenes and the questions.")
def main(out_dir: Path, steps: int, seed: int) -> None:
    configure_logging("pretrain")
    settings = Settings(steps=steps, seed=seed)
    model, processor = build_tiny_qwen2_vl(corpus(), seed=settings.seed)
    log.info("%s weights", f"{sum(p.numel() for p in model.parameters()):,}")
    started = time.monotonic()
    losses = []
    for step, loss in enumerate(train(model, processor, settings), start=1):
        losses.append(loss)
        if step % 25 == 0:
            rate = step / (time.monotonic() - started)
            log.info("step %d/%d  loss %.4f  %.2f steps/s", step, steps, sum(losses[-25:]) / 25, rate)
    seconds = time.monotonic() - started
    with published(out_dir) as folder:
        save_model(model, processor, folder)
        # The figures are those of what is written, rounded to bfloat16.
        model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        figures = {
            "own scenes": measure(model, processor, ("objects",), HELD_OUT_SEED, 128),
            "nutrition tables": measure(model, processor, ("front", "back"), HELD_OUT_SEED, 128),
        }
        for name, values in figures.items():
            log.info("%s  %s", name, "  ".join(f"{key} {value:.3f}" for key, value in values.items()))
        record = {
            "settings": asdict(settings),
            "first_losses": [round(loss, 4) for loss in losses[:FIRST_STEPS]],
            "final_loss": round(sum(losses[-25:]) / len(losses[-25:]), 4),
            "seconds": round(seconds),
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "figures": figures,
        }
        (folder / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
        (folder / "README.md").write_text(model_card(record))
    log.info("wrote %s", out_dir)


def model_card(record: dict[str, Any]) -> str:
    settings, figures = record["settings"], record["figures"]
    rows = "".join(
        "| {} | {mean_iou:.3f} | {iou_over_50:.3f} | {detection_rate:.3f} |\n".format(name, **values)
        for name, values in figures.items()
    )
    return f"""# The tiny Qwen2-VL

A Qwen2-VL of 3 million weights, pre-trained on generated scenes of panels, barcodes, logos, text blocks and
QR codes. It answers in Qwen2-VL's grounding format and finds those objects; it has never seen a nutrition
table. It has learnt to copy the name it is asked for: in 3 of 10 scenes with one object that name is another
word, "nutrition-table" among eight of them. It stands in for the real model where there is no GPU.

Made on {record["date"]} in {record["seconds"] / 60:.0f} minutes on {settings["threads"]} CPU cores:
{settings["steps"]} steps of {settings["batch_size"]} scenes, seed {settings["seed"]}.

    python -m stages.tasks.detection.pretrain --out data/tiny/qwen2-vl

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
