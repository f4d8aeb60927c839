"""Pre-trains the tiny Qwen2 that stands in for the big one: it can write trees, but has never parsed a sentence.

    python -m tools.tiny_bases.amr --out data/tiny/qwen2

Reads nothing: sentences and exercises are generated. Writes a plain Hugging Face folder with bfloat16 weights,
`pretraining.json` (settings, first losses, figures) and a README.md that says the same in words.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from stages.core.logs import configure_logging
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.generation import generate_answers
from stages.kit.training.collators import ConversationCollator
from tools.tiny_bases import pretraining
from tools.tiny_bases.amr.exercises import FULL_LENGTH_FROM, corpus, exercise
from tools.tiny_bases.architecture import build_tiny_qwen2

log = logging.getLogger("tools.tiny_bases.amr.__main__")  # not __main__, as which this file runs

HELD_OUT_SEED = 2_000_003
"""Of the exercises that figures are measured on; not used in training."""
MEASURED = 256
"""How many of them."""

EXERCISES = {
    "repeat": "repeat words or a sentence",
    "join": "join the syllables of words",
    "nest": "a tree from its outline",
    "formula": "a formula as a tree",
}
"""Of the figures, in words."""


@dataclass(frozen=True, kw_only=True)
class Settings(pretraining.Settings):
    steps: int = 2000
    batch_size: int = 32


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, settings: Settings) -> Iterator[float]:
    """Trains `model` in place; yields the loss of the answers' tokens after each step."""
    pretraining.begin(model, settings)

    def losses(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = step * settings.batch_size
        loss = model(**make_batch(tokenizer, settings.seed, range(first, first + settings.batch_size))).loss
        return loss, loss

    yield from pretraining.train_steps(model, settings, losses)


def make_batch(tokenizer: Qwen2Tokenizer, seed: int, indices: range) -> dict[str, torch.Tensor]:
    """The model's inputs and `labels` for these exercises, (B, T)."""
    exercises = [exercise(seed, index) for index in indices]
    collate = ConversationCollator(tokenizer, exercises, lambda e: e, loss="assistant-only", max_length=512)
    return collate([{"sample": number} for number in range(len(exercises))])


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
    shares = {kind: round(sum(values) / len(values), 4) for kind, values in sorted(right.items())}
    log.info("answered right  %s", "  ".join(f"{kind} {share:.3f}" for kind, share in shares.items()))
    return shares


@click.command(help=__doc__)
@pretraining.options(Settings())
def main(out_dir: Path, steps: int, seed: int) -> None:
    configure_logging("pretrain")
    settings = Settings(steps=steps, seed=seed)
    model, tokenizer = build_tiny_qwen2(corpus(), seed=settings.seed)
    pretraining.pretrain(
        model,
        tokenizer,
        settings,
        out_dir,
        losses=train(model, tokenizer, settings),
        measure=partial(measure, tokenizer=tokenizer, count=MEASURED),
        card=model_card,
    )


def model_card(record: dict[str, Any]) -> str:
    made = pretraining.how_made(
        record, samples="exercises", command="python -m tools.tiny_bases.amr --out data/tiny/qwen2"
    )
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

{made}
| held-out exercise | answered letter by letter |
|---|---|
{rows}
`pretraining.json` holds all settings and the first losses, which a test reproduces. sha256 of `model.safetensors`:
`{record["model_sha256"]}`. The licence is that of the code, Apache-2.0.
"""


if __name__ == "__main__":
    main()
