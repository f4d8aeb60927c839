"""How the tiny models are pre-trained that stand in for big ones: what every such training has in common.

A task's `pretrain.py` adds the model, the loss of a step, and what the result is measured by.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.core.publish import published
from stages.kit.models.processors import Processor
from stages.kit.training.seed import seed_everything
from tools.tiny_bases.architecture import save_model

log = logging.getLogger(__name__)

FIRST_STEPS = 20
"""How many losses are recorded."""
STEPS_A_LINE = 25

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int
    batch_size: int
    seed: int = 0
    learning_rate: float = 2e-3
    """Of AdamW, for all that is no weight matrix: embeddings, biases, norms, convolutions."""
    muon_learning_rate: float = 0.02
    """Of Muon, for the weight matrices."""
    warmup_steps: int = 50
    threads: int = 2
    """The order of floating-point sums depends on it, and so the weights do."""


def begin(model: nn.Module, settings: Settings) -> None:
    """Comes before whatever else a training makes: threads, seed, deterministic algorithms, train mode."""
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
    """Trains `model` in place, once it has begun; yields a loss after each step.

    losses: of a step, counted from 0: what is minimised, and what is yielded, scalars both.
    auxiliary: weights that are trained beside the model's own.
    """
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
        yield yielded.item()


def make_optimizers(
    model: nn.Module, settings: Settings, auxiliary: Iterable[nn.Parameter] = ()
) -> list[torch.optim.Optimizer]:
    """AdamW for the auxiliary weights and all of the model's but the matrices inside its layers; Muon for those."""
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


def options(defaults: Settings) -> Callable[[Command], Command]:
    """Gives a command the options --out, --steps and --seed, as `out_dir`, `steps` and `seed`."""
    seed = click.option("--seed", default=defaults.seed, show_default=True, help="Of weights and all that is drawn.")
    steps = click.option("--steps", default=defaults.steps, type=click.IntRange(min=1), show_default=True)
    out = click.option("--out", "out_dir", type=click.Path(file_okay=False, path_type=Path), required=True)
    return lambda command: out(steps(seed(command)))


def pretrain(
    model: PreTrainedModel,
    processor: Processor,
    settings: Settings,
    out_dir: Path,
    *,
    losses: Iterator[float],
    measure: Callable[[PreTrainedModel], dict[str, Any]],
    card: Callable[[dict[str, Any]], str],
) -> None:
    """Trains, and writes a plain Hugging Face folder with bfloat16 weights, pretraining.json and README.md.

    losses: trains `model` a step each time one is taken.
    measure: figures of the written model, whose weights are rounded to bfloat16; for pretraining.json.
    card: README.md from pretraining.json, which holds `settings`, `first_losses`, `final_loss` (a mean of the last
        STEPS_A_LINE), `seconds`, `date`, `figures` and `model_sha256`.
    """
    log.info("%s weights", f"{sum(parameter.numel() for parameter in model.parameters()):,}")
    started = time.monotonic()
    seen: list[float] = []
    for step, loss in enumerate(losses, start=1):
        seen.append(loss)
        if step % STEPS_A_LINE == 0:
            rate = step / (time.monotonic() - started)
            log.info("step %d/%d  loss %.4f  %.2f steps/s", step, settings.steps, _last_mean(seen), rate)
    seconds = time.monotonic() - started
    with published(out_dir) as folder:
        save_model(model, processor, folder)
        figures = measure(type(model).from_pretrained(folder, dtype=torch.float32))
        record = {
            "settings": asdict(settings),
            "first_losses": [round(loss, 4) for loss in seen[:FIRST_STEPS]],
            "final_loss": round(_last_mean(seen), 4),
            "seconds": round(seconds),
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "figures": figures,
            "model_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        }
        (folder / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card(record), encoding="utf-8")
    log.info("wrote %s", out_dir)


def _last_mean(losses: list[float]) -> float:
    last = losses[-STEPS_A_LINE:]
    return sum(last) / len(last)


def how_made(record: dict[str, Any], *, samples: str, command: str) -> str:
    """Of a model's card: when, for how long, from how many `samples`, and the command that does it again."""
    settings = record["settings"]
    return f"""Made on {record["date"]} in {record["seconds"] / 60:.0f} minutes on {settings["threads"]} CPU cores:
{settings["steps"]} steps of {settings["batch_size"]} {samples}, seed {settings["seed"]}.

    {command}
"""
