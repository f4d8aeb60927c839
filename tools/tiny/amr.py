"""Pre-trains the tiny Qwen2 that stands in for the big one: it can write trees, but has never parsed a sentence.

    python -m tools.tiny.amr --out data/tiny/qwen2

Reads nothing: sentences and exercises are generated. Writes a plain Hugging Face folder with bfloat16 weights,
`pretraining.json` (settings, first losses, figures) and a README.md that says the same in words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from stages.kit.data.conversation import Conversation
from tools.tiny.architecture import Geometry, build_tiny_qwen2
from tools.tiny.exercises import FULL_LENGTH_FROM, corpus, exercise
from tools.tiny.pretraining import Settings, command, share_right, train_on_answers

SETTINGS = Settings(steps=2000, batch_size=32)
GEOMETRY = Geometry(
    vocab_size=1280, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_key_value_heads=2
)
"""1 million weights."""
HELD_OUT_SEED = 2_000_003
"""Of the exercises that figures are measured on."""


def prepare(settings: Settings) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer, Iterator[float]]:
    """The model, its tokenizer, and its training: the loss of the answers' tokens after each step."""
    model, tokenizer = build_tiny_qwen2(corpus(), GEOMETRY, seed=settings.seed)

    def batch_of(step: int) -> list[Conversation]:
        first = step * settings.batch_size
        return [exercise(settings.seed, index) for index in range(first, first + settings.batch_size)]

    return model, tokenizer, train_on_answers(model, tokenizer, settings, batch_of)


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, count: int = 256) -> dict[str, float]:
    """By kind, the share of `count` held-out exercises that are answered letter by letter.

    Writing a sentence has no right answer and is left out.
    """
    drawn = (exercise(HELD_OUT_SEED, index) for index in itertools.count(FULL_LENGTH_FROM))
    kept = ((kind, each) for each in drawn if (kind := each.sample_id.partition("/")[0]) != "write")
    exercises = [
        (kind, replace(each, messages=each.messages[:1]), each.messages[1]["content"])
        for kind, each in itertools.islice(kept, count)
    ]
    return dict(sorted(share_right(model, tokenizer, exercises, max_new_tokens=128).items()))


main = command(__doc__, SETTINGS, prepare, measure, card="amr.md")

if __name__ == "__main__":
    main()
