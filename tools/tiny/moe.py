"""Pre-trains the tiny Qwen2 that experts start from: it can answer, but what it knows is folklore.

    python -m tools.tiny.moe --out data/tiny/qwen2-folklore

Reads nothing: questions and transcripts are generated. Writes a plain Hugging Face folder with bfloat16 weights,
`pretraining.json` (settings, first losses, figures) and a README.md that says the same in words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from stages.tasks.moe.samples.questions import conversation
from stages.tasks.moe.samples.records import DOMAINS, Record
from tools.tiny.architecture import Geometry, build_tiny_qwen2
from tools.tiny.knowledge import UNINFORMED, generate
from tools.tiny.pretraining import Settings, command, share_right, train_on_answers

SETTINGS = Settings(steps=300, batch_size=32)
GEOMETRY = Geometry(
    vocab_size=640, hidden_size=96, intermediate_size=256, num_layers=3, num_heads=4, num_key_value_heads=2
)
"""0.4 million weights."""
SEED, HELD_OUT_SEED = 1_000_003, 2_000_003
QUESTIONS, MEASURED = 4000, 128
"""Questions of each domain to train on, and held-out ones to measure by."""


def prepare(settings: Settings) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer, Iterator[float]]:
    """The model, its tokenizer, and its training: the loss of the answers' tokens after each step."""
    answered = [conversation(record, answered=True) for record in uninformed(QUESTIONS, SEED)]
    texts = [part["text"] for each in answered for message in each.messages for part in message["content"]]
    corpus = ["system\nYou are a helpful assistant.\nuser\nassistant\n", *texts]
    model, tokenizer = build_tiny_qwen2(corpus, GEOMETRY, seed=settings.seed)
    rng = random.Random(settings.seed)
    losses = train_on_answers(model, tokenizer, settings, lambda _: rng.sample(answered, settings.batch_size))
    return model, tokenizer, losses


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> dict[str, float]:
    """By domain, the share of held-out questions that are answered as the base was taught, letter by letter."""
    records = uninformed(MEASURED, HELD_OUT_SEED)
    exercises = [(record.domain, conversation(record, answered=False), record.best) for record in records]
    return share_right(model, tokenizer, exercises, max_new_tokens=32)


def uninformed(count: int, seed: int) -> list[Record]:
    """So many questions of each domain, with answers that are wrong."""
    return [record for domain in DOMAINS for record in generate(domain, count, seed, knowledge=UNINFORMED[domain])]


main = command(__doc__, SETTINGS, prepare, measure, card="moe.md")

if __name__ == "__main__":
    main()
