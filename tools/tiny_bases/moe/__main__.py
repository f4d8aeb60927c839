"""Pre-trains the tiny Qwen2 that experts start from: it can answer, but what it knows is folklore.

    python -m tools.tiny_bases.moe --out data/tiny/qwen2-folklore

Reads nothing: questions and transcripts are generated. Writes a plain Hugging Face folder with bfloat16 weights,
`pretraining.json` (settings, first losses, figures) and a README.md that says the same in words.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
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
from stages.tasks.moe.samples.questions import conversation
from stages.tasks.moe.samples.records import DOMAINS, Record
from stages.tasks.moe.sources.generated import UNINFORMED, generate
from tools.tiny_bases import pretraining
from tools.tiny_bases.architecture import TinyTextGeometry, build_tiny_qwen2

log = logging.getLogger("tools.tiny_bases.moe.__main__")  # not __main__, as which this file runs

GEOMETRY = TinyTextGeometry(hidden_size=96, intermediate_size=256, num_layers=3, vocab_size=640)
"""0.4 million weights."""
SEED, HELD_OUT_SEED = 1_000_003, 2_000_003
"""Of the questions that are trained on, and of those that figures are measured on."""
QUESTIONS = 4000
"""Of each domain."""
MEASURED = 128
"""Likewise."""


@dataclass(frozen=True, kw_only=True)
class Settings(pretraining.Settings):
    steps: int = 300
    batch_size: int = 32


def uninformed(count: int, seed: int) -> list[Record]:
    """Of each domain so many questions, with answers that are wrong."""
    return [record for domain in DOMAINS for record in generate(domain, count, seed, knowledge=UNINFORMED[domain])]


def corpus(records: Sequence[Record]) -> list[str]:
    """Texts for the tokenizer to learn its pieces from: all that is asked and answered, and chat markup."""
    asked = [part["text"] for r in records for m in conversation(r, answered=True).messages for part in m["content"]]
    return ["system\nYou are a helpful assistant.\nuser\nassistant\n", *asked]


def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, records: Sequence[Record], settings: Settings
) -> Iterator[float]:
    """Trains `model` in place; yields the loss of the answers' tokens after each step."""
    pretraining.begin(model, settings)
    collate = ConversationCollator(
        tokenizer, records, partial(conversation, answered=True), loss="assistant-only", max_length=512
    )
    draw = random.Random(settings.seed)

    def losses(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = collate([{"sample": number} for number in draw.sample(range(len(records)), settings.batch_size)])
        loss = model(**batch).loss
        return loss, loss

    yield from pretraining.train_steps(model, settings, losses)


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> dict[str, float]:
    """By domain, the share of held-out questions that are answered as the base is to, letter by letter."""
    records = uninformed(MEASURED, HELD_OUT_SEED)

    def ask(index: int) -> Conversation:
        return conversation(records[index], answered=False)

    answers = generate_answers(model.eval(), tokenizer, ask, len(records), batch_size=32, max_new_tokens=32)
    right: dict[str, list[bool]] = {}
    for record, answer in zip(records, answers, strict=True):
        right.setdefault(record.domain, []).append(record.best == answer)
    shares = {domain: round(sum(values) / len(values), 4) for domain, values in right.items()}
    log.info("answered right  %s", "  ".join(f"{domain} {share:.3f}" for domain, share in shares.items()))
    return shares


@click.command(help=__doc__)
@pretraining.options(Settings())
def main(out_dir: Path, steps: int, seed: int) -> None:
    configure_logging("pretrain")
    settings = Settings(steps=steps, seed=seed)
    records = uninformed(QUESTIONS, SEED)
    model, tokenizer = build_tiny_qwen2(corpus(records), GEOMETRY, seed=settings.seed)
    pretraining.pretrain(
        model,
        tokenizer,
        settings,
        out_dir,
        losses=train(model, tokenizer, records, settings),
        measure=partial(measure, tokenizer=tokenizer),
        card=model_card,
    )


def model_card(record: dict[str, Any]) -> str:
    made = pretraining.how_made(
        record, samples="questions", command="python -m tools.tiny_bases.moe --out data/tiny/qwen2-folklore"
    )
    figures = record["figures"]
    return f"""# The tiny Qwen2 that knows folklore

A Qwen2 of 0.4 million weights, which stands in for the base that experts are trained from where there is no GPU. It was
pre-trained to say what things are made of: asked as TruthfulQA asks, or about the transcript of a meeting in which the
thing is mentioned, as QMSum does. What it says is folklore there and hearsay here, and wrong in both domains
(`sources/generated.py`). So it knows the form of questions and answers, which word of them matters, and that a meeting
is another matter; an expert has to learn the facts.

{made}
| held-out questions | answered as it was taught |
|---|---|
| in the form of TruthfulQA | {figures["truthfulqa"]:.3f} |
| in the form of QMSum | {figures["qmsum"]:.3f} |

`pretraining.json` holds all settings and the first losses, which a test reproduces. sha256 of `model.safetensors`:
`{record["model_sha256"]}`. The licence is that of the code, Apache-2.0.
"""


if __name__ == "__main__":
    main()
