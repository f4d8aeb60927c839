"""Pre-trains the tiny Qwen2-VL that stands in for the big one: it can point, but has never seen a table.

    python -m tools.tiny.detection --out data/tiny/qwen2-vl

Reads nothing: the scenes are generated, and none shows a nutrition table. Writes a plain Hugging Face folder with
bfloat16 weights, `pretraining.json` (settings, first losses, figures) and a README.md that says the same in words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answer import generate_answers
from stages.tasks.detection.samples import decode_boxes, reading_order
from stages.tasks.detection.scoring import pairwise_iou
from tools.tiny import pretraining
from tools.tiny.architecture import Geometry, build_tiny_qwen2_vl
from tools.tiny.pointing import PointingLoss, corpus, make_batch, question
from tools.tiny.scenes import OBJECTS, Kind, draw_scene

GEOMETRY = Geometry(
    vocab_size=640,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=3,
    num_key_value_heads=3,
    vision={"depth": 4, "embed_dim": 128, "num_heads": 4, "mlp_ratio": 3},
    pixels=(112 * 112, 224 * 224),
)
"""2.9 million weights."""
HELD_OUT_SEED = 2_000_003
"""Of the scenes that figures are measured on, used neither in training nor to set how hard packages are."""


@dataclass(frozen=True, kw_only=True)
class Settings(pretraining.Settings):
    steps: int = 900
    batch_size: int = 16
    pointing_weight: float = 0.5
    """Of the auxiliary losses, beside the answer's own loss."""


SETTINGS = Settings()


def prepare(settings: Settings) -> tuple[Qwen2VLForConditionalGeneration, Qwen2VLProcessor, Iterator[float]]:
    """The model, its processor, and its training: the loss of the answers' tokens after each step."""
    model, processor = build_tiny_qwen2_vl(corpus(), GEOMETRY, seed=settings.seed)
    return model, processor, train(model, processor, settings)


def train(model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor, settings: Settings) -> Iterator[float]:
    pretraining.begin(model, settings)
    model.set_attn_implementation({"text_config": "eager"})  # PointingLoss reads the weights of attention
    pointing = PointingLoss(model, len(OBJECTS))

    def losses(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = make_batch(processor, seed=settings.seed, step=step, batch_size=settings.batch_size)
        answer_loss = model(**inputs).loss
        pictured = inputs["input_ids"] == model.config.image_token_id
        return answer_loss + settings.pointing_weight * pointing(targets, pictured), answer_loss

    yield from pretraining.train_steps(model, settings, losses, auxiliary=pointing.parameters())
    pointing.remove()
    model.set_attn_implementation({"text_config": "sdpa"})


def measure_both(model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor) -> dict[str, dict[str, float]]:
    return {
        "own scenes": measure(model, processor, ("objects",)),
        "nutrition tables": measure(model, processor, ("front", "back")),
    }


def measure(
    model: Qwen2VLForConditionalGeneration, processor: Qwen2VLProcessor, kinds: tuple[Kind, ...], count: int = 128
) -> dict[str, float]:
    """Asks for one category of each of `count` held-out scenes; the first box answered counts, none is IoU 0."""
    scenes = [draw_scene(kinds[index % len(kinds)], HELD_OUT_SEED, index) for index in range(count)]
    wanted = [random.Random(f"wanted/{HELD_OUT_SEED}/{i}").choice(scene.categories) for i, scene in enumerate(scenes)]

    def asked(index: int) -> Conversation:
        content = [{"type": "image"}, {"type": "text", "text": question(wanted[index])}]
        messages = [{"role": "user", "content": content}]
        return Conversation(sample_id=str(index), messages=messages, images=[scenes[index].image])

    questions = [asked(index) for index in range(count)]
    answers = generate_answers(model.eval(), processor, questions, batch_size=16, max_new_tokens=96)
    ious = []
    for scene, name, answer in zip(scenes, wanted, answers, strict=True):
        found = [box for box, category in zip(scene.boxes, scene.categories, strict=True) if category == name]
        truth = sorted(found, key=reading_order)
        boxes = decode_boxes(answer).boxes
        ious.append(float(pairwise_iou(truth[:1], boxes[:1])[0, 0]) if boxes else 0.0)
    return {
        "samples": count,
        "mean_iou": round(sum(ious) / count, 4),
        "iou_over_50": round(sum(value > 0.5 for value in ious) / count, 4),
        "detection_rate": round(sum(bool(decode_boxes(answer).boxes) for answer in answers) / count, 4),
    }


main = pretraining.command(__doc__, SETTINGS, prepare, measure_both, card="detection.md")

if __name__ == "__main__":
    main()
