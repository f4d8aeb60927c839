"""What the tiny text base is pre-trained on: sentences by themselves, and exercises on random words.

None shows a sentence with its graph, or any role of a graph. They teach what a language model brings along anyway: how
sentences go, to say again what was said, which syllables make a word, and to close the brackets it opens.
Everything is a pure function of a seed and an index; nothing is stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from stages.kit.data.conversation import Conversation
from stages.tasks.amr.sources.grammar import draw, generate, vocabulary

SHORTEST, LONGEST = 3, 10
"""How many words the first exercises have at most, and the last ones."""
EXERCISES_A_WORD = 1000
"""After how many exercises they may be a word longer."""
FULL_LENGTH_FROM = (LONGEST - SHORTEST) * EXERCISES_A_WORD
"""The index from which exercises are as long as they get."""
TOKENIZER_ONLY = (
    "system\nYou are a helpful assistant.\nuser\nassistant\n",
    (
        "Phân tích câu sau thành đồ thị AMR theo hai bước: trước hết viết đồ thị không có biến, sau dòng --- viết lại "
        "đồ thị đầy đủ có biến theo ký pháp PENMAN.\n---\n"
    ),
    "trên một dòng, không dùng biến; nút được nhắc lại thì đánh dấu bằng con trỏ #1, #2, ...",
)
"""Chat markup, and words that one asks a parser in."""
CORPUS_SEED, CORPUS_EXERCISES_SEED = 1_000_003, 1

_WORDS = vocabulary()

Exercise = tuple[str, str]
"""Question and answer."""


def exercise(seed: int, index: int) -> Conversation:
    """Exercise `index` of the endless series `seed`, answered; its sample_id starts with its kind.

    They start short and grow longer.
    """
    rng = random.Random(f"exercise/{seed}/{index}")
    (kind,) = rng.choices(list(KINDS), weights=[weight for _, weight in KINDS.values()])
    question, answer = KINDS[kind][0](rng, min(LONGEST, SHORTEST + index // EXERCISES_A_WORD))
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(sample_id=f"{kind}/{seed}/{index}", messages=messages)


def corpus() -> Iterator[str]:
    """Texts from which the tokenizer learns its pieces.

    Graphs are among them, for the pieces that roles and brackets are written in: the tokenizer has seen graphs, the
    model has not.
    """
    for sentence, graph in generate(3000, CORPUS_SEED):
        yield sentence
        yield " ".join(graph.split())
    for index in range(6000):
        yield from (message["content"] for message in exercise(CORPUS_EXERCISES_SEED, index).messages)
        yield from TOKENIZER_ONLY


def write(rng: random.Random, _longest: int) -> Exercise:
    """A sentence, asked for by nothing: plain language modelling."""
    return "Viết một câu.", draw(rng)[0]


def repeat(rng: random.Random, longest: int) -> Exercise:
    text = draw(rng)[0] if rng.random() < 0.3 else _said(_some_words(rng, longest))
    return f"Chép lại: {text}", text


def join(rng: random.Random, longest: int) -> Exercise:
    """Which syllables make a word."""
    words = _some_words(rng, longest)
    return f"Tách từ: {_said(words)}", " ".join(words)


def initials(rng: random.Random, longest: int) -> Exercise:
    """Every word behind its first letter."""
    words = _some_words(rng, longest)
    return f"Chữ đầu: {_said(words)}", " , ".join(f"{word[0]} / {word}" for word in words)


def nest(rng: random.Random, longest: int) -> Exercise:
    """A random tree of random words, given word by word with its depth, to be written with brackets."""
    words = _some_words(rng, longest)
    depths = [0]
    for _ in words[1:]:
        depths.append(rng.randint(1, depths[-1] + 1))
    lettered = rng.random() < 0.5
    answer = ""
    for word, depth, following in zip(words, depths, [*depths[1:], 0], strict=True):
        answer += f" ({word[0]} / {word}" if lettered else f" ({word}"
        answer += ")" * (depth + 1 - following)
    listed = " ".join(f"{_said([word])} {depth}" for word, depth in zip(words, depths, strict=True))
    return f"Vẽ cây{' có chữ đầu' if lettered else ''}: {listed}", answer.strip()


def _some_words(rng: random.Random, longest: int) -> list[str]:
    return rng.choices(_WORDS, k=rng.randint(2, longest))


def _said(words: list[str]) -> str:
    return " ".join(words).replace("_", " ")


KINDS: dict[str, tuple[Callable[[random.Random, int], Exercise], int]] = {
    "write": (write, 2),
    "repeat": (repeat, 2),
    "join": (join, 2),
    "initials": (initials, 2),
    "nest": (nest, 4),
}
"""What is drawn, and how often."""
