"""Pre-trains the tiny models that stand in for big ones where there is no GPU: they know how to answer, not the task.

    python -m tools.tiny.bases qwen2-vl --out data/tiny/qwen2-vl

qwen2            writes trees of random words, and has never parsed a sentence
qwen2-folklore   answers what things are made of, wrongly in both domains
qwen2-vl         boxes objects, and has never seen a nutrition table

Reads config, tokenizer and chat template in data/tiny/NAME; examples are generated. Writes a plain Hugging Face folder
with bfloat16 weights, and pretraining.json: settings and losses, the first of which a test reproduces.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from stages.core.records import published
from stages.data.conversation import Conversation
from stages.models.load import auto_class, load_config
from stages.models.prompts import load_processor
from stages.tasks.moe.samples import DOMAINS, conversation
from stages.training.batches import ConversationCollator
from stages.training.resume import seed_everything
from tools.tiny import exercises, knowledge, pointing
from tools.tiny.scenes import OBJECTS

TINY_DIR = Path(__file__).parents[2] / "data/tiny"


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int
    batch_size: int
    seed: int = 0
    learning_rate: float = 2e-3
    """AdamW's, for all but the weight matrices: embeddings, biases, norms, convolutions."""
    muon_learning_rate: float = 0.02
    """Muon's, for the weight matrices."""
    warmup_steps: int = 50
    threads: int = 2
    """The order of floating-point sums depends on it, and so the weights do."""
    pointing_weight: float = 0.0
    """Weight of the auxiliary losses, beside the answer's own loss."""


Losses = Callable[[int], tuple[Tensor, Tensor]]
"""From a step, counted from 0, to the loss to minimise and the loss of the answers' tokens; both scalars."""


def qwen2(model: Any, tokenizer: Any, settings: Settings) -> Iterator[float]:
    """1 million weights."""

    def batch_of(step: int) -> list[Conversation]:
        first = step * settings.batch_size
        return [exercises.exercise(settings.seed, index) for index in range(first, first + settings.batch_size)]

    return train_on_answers(model, tokenizer, settings, batch_of)


def qwen2_folklore(model: Any, tokenizer: Any, settings: Settings) -> Iterator[float]:
    """0.4 million weights."""
    answered = [
        conversation(record, answered=True)
        for domain in DOMAINS
        for record in knowledge.generate(domain, 4000, 1_000_003, knowledge=knowledge.UNINFORMED[domain])
    ]
    rng = random.Random(settings.seed)
    return train_on_answers(model, tokenizer, settings, lambda _: rng.sample(answered, settings.batch_size))


def qwen2_vl(model: Any, processor: Any, settings: Settings) -> Iterator[float]:
    """2.9 million weights."""
    model.set_attn_implementation({"text_config": "eager"})  # PointingLoss reads the weights of attention
    seed_everything(settings.seed)
    auxiliary = pointing.PointingLoss(model, len(OBJECTS))

    def losses(step: int) -> tuple[Tensor, Tensor]:
        batch = {"seed": settings.seed, "step": step, "batch_size": settings.batch_size}
        inputs, targets = pointing.make_batch(processor, **batch)
        answer_loss = model(**inputs).loss
        is_cell = inputs["input_ids"] == model.config.image_token_id
        return answer_loss + settings.pointing_weight * auxiliary(targets, is_cell), answer_loss

    return train_steps(model, settings, losses, auxiliary.parameters())


BASES: dict[str, tuple[Callable[[Any, Any, Settings], Iterator[float]], Settings]] = {
    "qwen2": (qwen2, Settings(steps=2000, batch_size=32)),
    "qwen2-folklore": (qwen2_folklore, Settings(steps=300, batch_size=32)),
    "qwen2-vl": (qwen2_vl, Settings(steps=900, batch_size=16, pointing_weight=0.5)),
}
"""The training of a model with its processor, which takes a step each time a loss is taken; and its settings."""


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(list(BASES)))
@click.option("--out", "out_dir", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(name: str, out_dir: Path) -> None:
    train, settings = BASES[name]
    model, processor = untrained(name, settings.seed)
    seen = list(train(model, processor, settings))
    record = {
        "settings": asdict(settings),
        "first_losses": [round(loss, 4) for loss in seen[:20]],
        "final_loss": round(fmean(seen[-25:]), 4),
    }
    with published(out_dir) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        processor.save_pretrained(folder)
        (folder / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def untrained(name: str, seed: int) -> tuple[Any, Any]:
    """A base with random float32 weights, and its processor. Sets torch's random seed."""
    folder = TINY_DIR / name
    config = load_config(folder)
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, load_processor(folder, None)


def train_on_answers(
    model: Any, tokenizer: Any, settings: Settings, batch_of: Callable[[int], Sequence[Conversation]]
) -> Iterator[float]:
    """Trains a text model on the answered conversations of each step, counted from 0, as `train_steps`."""

    def losses(step: int) -> tuple[Tensor, Tensor]:
        batch = batch_of(step)
        collate = ConversationCollator(tokenizer, batch, lambda each: each, loss="assistant-only", max_length=512)
        loss = model(**collate([{"sample": number} for number in range(len(batch))])).loss
        return loss, loss

    return train_steps(model, settings, losses)


def train_steps(
    model: nn.Module, settings: Settings, losses: Losses, auxiliary: Iterable[nn.Parameter] = ()
) -> Iterator[float]:
    """Trains `model` in place, and the `auxiliary` weights; yields the loss of the answers' tokens after each step."""
    torch.set_num_threads(settings.threads)
    seed_everything(settings.seed)
    model.train()
    matrices: list[nn.Parameter] = []  # inside the layers: for Muon
    beside = list(auxiliary)
    others = [*beside]
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if inner else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=settings.muon_learning_rate, momentum=0.95, weight_decay=0.01),
    ]

    def rate_factor(step: int) -> float:
        """Linear warm-up, then half a cosine down to 3 percent."""
        warm = min(1.0, (step + 1) / settings.warmup_steps)
        return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / settings.steps))))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor) for optimizer in optimizers]
    for step in range(settings.steps):
        minimised, yielded = losses(step)
        minimised.backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *beside], 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        yield yielded.item()


if __name__ == "__main__":
    main()
