"""Pre-trains the tiny Qwen2 that stands in for the big one: it can write trees, but has never parsed a sentence.

    python -m stages.tasks.amr.pretrain --out data/tiny/qwen2

Reads nothing: sentences and exercises are generated. Writes a plain Hugging Face folder with bfloat16 weights,
`pretraining.json` (settings, first losses, figures) and a README.md that says the same in words.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen2Tokenizer

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.generation import generate_answers
from stages.kit.logs import configure_logging
from stages.kit.models.tiny import build_tiny_qwen2, save_model
from stages.kit.publish import published
from stages.kit.training.collators import ConversationCollator
from stages.kit.training.seed import seed_everything
from stages.tasks.amr.pretraining.exercises import FULL_LENGTH_FROM, corpus, exercise

log = logging.getLogger("stages.tasks.amr.pretrain")  # not __main__, as which this file runs

HELD_OUT_SEED = 2_000_003
"""Of the exercises that figures are measured on; not used in training."""
MEASURED = 256
"""How many of them."""
FIRST_STEPS = 20
"""How many losses are recorded."""


EXERCISES = {
    "repeat": "repeat words or a sentence",
    "join": "join the syllables of words",
    "nest": "a tree from its outline",
    "formula": "a formula as a tree",
}
"""Of the figures, in words."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = 2000
    batch_size: int = 32
    seed: int = 0
    learning_rate: float = 2e-3
    """Of AdamW, for embeddings, biases and norms."""
    muon_learning_rate: float = 0.02
    """Of Muon, for the weight matrices."""
    warmup_steps: int = 50
    threads: int = 2
    """The order of floating-point sums depends on it, and so the weights do."""


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, settings: Settings) -> Iterator[float]:
    """Trains `model` in place; yields the loss of the answers' tokens after each step."""
    torch.set_num_threads(settings.threads)
    seed_everything(settings.seed)
    model.train()
    optimizers = make_optimizers(model, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, settings)) for o in optimizers]
    for step in range(settings.steps):
        first = step * settings.batch_size
        loss = model(**make_batch(tokenizer, settings.seed, range(first, first + settings.batch_size))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        yield loss.item()


def make_batch(tokenizer: Qwen2Tokenizer, seed: int, indices: range) -> dict[str, torch.Tensor]:
    """The model's inputs and `labels` for these exercises, (B, T)."""
    exercises = [exercise(seed, index) for index in indices]
    collate = ConversationCollator(tokenizer, exercises, lambda e: e, loss="assistant-only", max_length=512)
    return collate([{"sample": number} for number in range(len(exercises))])


def make_optimizers(model: Qwen2ForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else."""
    inner = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if not any(parameter is matrix for matrix in inner)]
    return [
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.Muon(inner, lr=settings.muon_learning_rate, momentum=0.95, weight_decay=0.01),
    ]


def rate_factor(step: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to 3 percent."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / settings.steps))))


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, count: int) -> dict[str, float]:
    """By kind, the share of held-out exercises that are answered letter by letter; `count` of all kinds together.

    Writing a sentence has no right answer and is left out.
    """
    drawn = (exercise(HELD_OUT_SEED, FULL_LENGTH_FROM + index) for index in itertools.count())
    exercises = list(itertools.islice((each for each in drawn if not each.sample_id.startswith("write")), count))

    def ask(index: int) -> Conversation:
        return Conversation(sample_id=exercises[index].sample_id, messages=exercises[index].messages[:1])

    model.eval()
    answers = generate_answers(model, tokenizer, ask, count, batch_size=32, max_new_tokens=128)
    right: dict[str, list[bool]] = {}
    for each, answer in zip(exercises, answers, strict=True):
        right.setdefault(each.sample_id.partition("/")[0], []).append(each.messages[1]["content"] == answer)
    return {kind: round(sum(values) / len(values), 4) for kind, values in sorted(right.items())}


@click.command(help=__doc__)
@click.option("--out", "out_dir", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--steps", default=Settings.steps, show_default=True, help="Optimizer steps.")
@click.option("--seed", default=Settings.seed, show_default=True, help="Of the weights and the exercises.")
def main(out_dir: Path, steps: int, seed: int) -> None:
    configure_logging("pretrain")
    settings = Settings(steps=steps, seed=seed)
    model, tokenizer = build_tiny_qwen2(corpus(), seed=settings.seed)
    log.info("%s weights", f"{sum(p.numel() for p in model.parameters()):,}")
    started = time.monotonic()
    losses = []
    for step, loss in enumerate(train(model, tokenizer, settings), start=1):
        losses.append(loss)
        if step % 25 == 0:
            rate = step / (time.monotonic() - started)
            log.info("step %d/%d  loss %.4f  %.2f steps/s", step, steps, sum(losses[-25:]) / 25, rate)
    seconds = time.monotonic() - started
    with published(out_dir) as folder:
        save_model(model, tokenizer, folder)
        # The figures are those of what is written, rounded to bfloat16.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        figures = measure(model, tokenizer, MEASURED)
        log.info("answered right  %s", "  ".join(f"{kind} {share:.3f}" for kind, share in figures.items()))
        record = {
            "settings": asdict(settings),
            "first_losses": [round(loss, 4) for loss in losses[:FIRST_STEPS]],
            "final_loss": round(sum(losses[-25:]) / len(losses[-25:]), 4),
            "seconds": round(seconds),
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "figures": figures,
            "model_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        }
        (folder / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
        (folder / "README.md").write_text(model_card(record))
    log.info("wrote %s", out_dir)


def model_card(record: dict[str, Any]) -> str:
    settings = record["settings"]
    rows = "".join(f"| {EXERCISES[kind]} | {share:.3f} |\n" for kind, share in record["figures"].items())
    return f"""# The tiny Qwen2

A Qwen2 of 1 million weights that stands in for Qwen2.5 where there is no GPU. It was pre-trained on generated
Vietnamese-like sentences, each by itself, and on exercises with random words of the same vocabulary:

- to repeat words or a sentence,
- to join the syllables of words with underscores,
- to write a random tree with brackets from its outline; its labels are the names of AMR's roles, put anywhere,
- to write formulas such as `a ! f ! g b` as trees: `(f :ARG0 (a #1) :ARG1 (g :ARG0 #1 :ARG1 (b)))`.

Trees are written with pointers, or as PENMAN does, a word's first letter before it, or both ways one after the other.
So the model knows the notation, and that something may be mentioned twice. It has never seen the graph of a sentence,
nor the instructions of the task. Its tokenizer has: its pieces were learnt from such texts too, so that they are short.
Sentences are drawn from the grammar that the task's data is drawn from (`sources/grammar.py`), under another seed: of a
held-out sentence the model may have read the words, never the graph.

Made on {record["date"]} in {record["seconds"] / 60:.0f} minutes on {settings["threads"]} CPU cores:
{settings["steps"]} steps of {settings["batch_size"]} exercises, seed {settings["seed"]}.

    python -m stages.tasks.amr.pretrain --out data/tiny/qwen2

| held-out exercise | answered letter by letter |
|---|---|
{rows}
`pretraining.json` holds all settings and the first losses, which a test reproduces. sha256 of `model.safetensors`:
`{record["model_sha256"]}`. The licence is that of the code, Apache-2.0.
"""


if __name__ == "__main__":
    main()
