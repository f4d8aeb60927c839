"""Pre-training of the tiny models that stand in for big ones: what the three of them share."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from stages.core.logs import configure_logging
from stages.core.publish import published
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answer import generate_answers
from stages.kit.training.batches import ConversationCollator
from stages.kit.training.resume import seed_everything
from tools.tiny.architecture import save_model

log = logging.getLogger("stages")

FIRST_STEPS = 20
"""How many losses are recorded."""
STEPS_A_LINE = 25


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


def begin(model: nn.Module, settings: Settings) -> None:
    """Threads, seed, deterministic algorithms and train mode, before anything else of a training."""
    torch.set_num_threads(settings.threads)
    seed_everything(settings.seed)
    model.train()


def train_steps(
    model: nn.Module,
    settings: Settings,
    losses: Callable[[int], tuple[Tensor, Tensor]],
    *,
    auxiliary: Iterable[nn.Parameter] = (),
) -> Iterator[float]:
    """Trains `model` in place, after `begin`; yields a loss after each step.

    losses: the loss to minimise in a step, counted from 0, and the one to yield; both scalars.
    auxiliary: weights that are trained beside the model's own.
    """
    log.info("%s weights", f"{sum(parameter.numel() for parameter in model.parameters()):,}")
    started, seen = time.monotonic(), []
    beside = list(auxiliary)
    optimizers = make_optimizers(model, settings, beside)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, settings)) for o in optimizers]
    for step in range(settings.steps):
        minimised, yielded = losses(step)
        minimised.backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *beside], 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append(yielded.item())
        yield seen[-1]
        if len(seen) % STEPS_A_LINE == 0:
            rate = len(seen) / (time.monotonic() - started)
            log.info("step %d/%d  loss %.4f  %.2f steps/s", step + 1, settings.steps, last_mean(seen), rate)


def last_mean(losses: Sequence[float]) -> float:
    return fmean(losses[-STEPS_A_LINE:])


def make_optimizers(
    model: nn.Module, settings: Settings, auxiliary: Iterable[nn.Parameter] = ()
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the model's layers, AdamW for its other weights and the auxiliary ones."""
    matrices: list[nn.Parameter] = []
    others = list(auxiliary)
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


def train_on_answers(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    settings: Settings,
    batch_of: Callable[[int], Sequence[Conversation]],
) -> Iterator[float]:
    """Trains a text model in place; yields the loss of the answers' tokens after each step.

    batch_of: the answered conversations of a step, counted from 0.
    """
    begin(model, settings)

    def losses(step: int) -> tuple[Tensor, Tensor]:
        batch = batch_of(step)
        collate = ConversationCollator(tokenizer, batch, lambda each: each, loss="assistant-only", max_length=512)
        loss = model(**collate([{"sample": number} for number in range(len(batch))])).loss
        return loss, loss

    yield from train_steps(model, settings, losses)


def share_right(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    exercises: Sequence[tuple[str, Conversation, str]],
    *,
    max_new_tokens: int,
) -> dict[str, float]:
    """By kind, the share of exercises (kind, question, answer) that are answered letter by letter."""
    questions = [question for _, question, _ in exercises]
    answers = generate_answers(model.eval(), tokenizer, questions, batch_size=32, max_new_tokens=max_new_tokens)
    right: dict[str, list[bool]] = {}
    for (kind, _, expected), answer in zip(exercises, answers, strict=True):
        right.setdefault(kind, []).append(answer == expected)
    return {kind: round(sum(values) / len(values), 4) for kind, values in right.items()}


def command(
    help_text: str | None,
    settings: Settings,
    prepare: Callable[[Any], tuple[Any, Any, Iterator[float]]],
    measure: Callable[[Any, Any], dict[str, Any]],
    *,
    card: str,
) -> click.Command:
    """Trains, and writes a plain Hugging Face folder with bfloat16 weights, pretraining.json and README.md.

    prepare: the model, its processor, and its training, which takes a step each time a loss is taken.
    measure: figures from the written model, whose weights are rounded to bfloat16, and the processor.
    card: as for `model_card`.
    """

    @click.command(help=help_text)
    @click.option("--out", "out_dir", type=click.Path(file_okay=False, path_type=Path), required=True)
    @click.option("--steps", default=settings.steps, type=click.IntRange(min=1), show_default=True)
    def main(out_dir: Path, steps: int) -> None:
        configure_logging("pretrain")
        chosen = replace(settings, steps=steps)
        model, processor, losses = prepare(chosen)
        started = time.monotonic()
        seen = list(losses)
        seconds = time.monotonic() - started
        with published(out_dir) as folder:
            save_model(model, processor, folder)
            record = {
                "settings": asdict(chosen),
                "first_losses": [round(loss, 4) for loss in seen[:FIRST_STEPS]],
                "final_loss": round(last_mean(seen), 4),
                "seconds": round(seconds),
                "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
                "figures": measure(type(model).from_pretrained(folder, dtype=torch.float32), processor),
                "model_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
            }
            (folder / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            (folder / "README.md").write_text(model_card(card, record), encoding="utf-8")
        log.info("wrote %s: %s", out_dir, record["figures"])

    return main


def model_card(template: str, record: Mapping[str, Any]) -> str:
    """README.md from its template, a file beside this one, and pretraining.json."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return text.format(**record, minutes=record["seconds"] / 60)
