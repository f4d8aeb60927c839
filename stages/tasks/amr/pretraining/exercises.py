"""What the tiny text base is pre-trained on: sentences by themselves, and exercises on random words.

None shows a sentence with its graph. They teach what a large model brings along anyway: how sentences go, to say again
what was said, which syllables make a word, and how a tree is written, with labels that are the names of AMR's roles but
mean nothing: here they stand anywhere.
Everything is a pure function of a seed and an index; nothing is stored.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator

from stages.kit.data.conversation import Conversation
from stages.tasks.amr.sources.grammar import (
    CITIES,
    COUNTRIES,
    FAMILY_NAMES,
    GIVEN_NAMES,
    MIDDLE_NAMES,
    draw,
    generate,
    vocabulary,
)

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

LABELS = (
    *("agent", "theme", "patient", "pivot", "topic", "goal", "mod", "domain", "time", "location", "quant"),
    *("classifier", "polarity", "mode", "tense", "modality", "degree", "compared-to", "manner", "purpose"),
    *("cause", "poss", "duration", "unit", "name", "op1", "op2", "op3", "ARG0", "ARG1", "ARG2", "agent-of"),
    *("theme-of", "prep", "source", "part-of"),
)
"""Names of AMR's roles, which only ever label random trees here."""
ENGLISH = (
    *("person", "name", "city", "country", "and", "contrast-01", "amr-unknown", "now", "temporal-quantity"),
    *("interrogative", "imperative", "expressive"),
)
"""Concepts of AMR that are no Vietnamese words: more random words."""
NAMES = sorted({*FAMILY_NAMES, *MIDDLE_NAMES, *GIVEN_NAMES, *" ".join(CITIES + COUNTRIES).split()})
_WORDS = [*vocabulary(), *ENGLISH]

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
    text = draw(rng)[0] if rng.random() < 0.4 else _said(_some_words(rng, longest))
    return f"Chép lại.\n{text}", text


def join(rng: random.Random, longest: int) -> Exercise:
    """Which syllables make a word."""
    words = _some_words(rng, longest)
    return f"Tách từ.\n{_said(words)}", " ".join(words)


def sort(rng: random.Random, longest: int) -> Exercise:
    words = _some_words(rng, min(longest, 9))
    numbered = [f"{number} {_said([word])}" for number, word in enumerate(words, start=1)]
    return f"Xếp thứ tự.\n{' ; '.join(rng.sample(numbered, len(words)))}", " ".join(words)


def nest(rng: random.Random, longest: int) -> Exercise:
    """A random tree of random words, given as an outline (depth, label, word), to be written with brackets."""
    outline = [(0, "", rng.choice(_WORDS))]
    for _ in range(rng.randint(1, min(longest, 8) - 1)):
        depth = rng.randint(1, outline[-1][0] + 1) if _branches(outline[-1][2]) else rng.randint(1, outline[-1][0])
        word = rng.choice(_WORDS) if rng.random() < 0.75 else _leaf(rng)
        outline.append((depth, rng.choice(LABELS), word))
    style = rng.choice(list(TREE_STYLES))
    trees = [_brackets(outline, lettered=lettered) for lettered in TREE_STYLES[style]]
    listed = " ; ".join(
        f"{depth} {label} {_said([word])}" if depth else _said([word]) for depth, label, word in outline
    )
    return f"{style}.\n{listed}", "\n---\n".join(trees)


TREE_STYLES = {"Vẽ cây": (False,), "Vẽ cây có chữ đầu": (True,), "Vẽ cây hai lần": (False, True)}
"""Whether each tree asked for has its words' first letters before them."""


def _brackets(outline: list[tuple[int, str, str]], *, lettered: bool) -> str:
    """Words in brackets, what is no word without, labels behind a colon."""
    used: Counter[str] = Counter()
    text = ""
    for (depth, label, word), (following, _, _) in zip(outline, [*outline[1:], (0, "", "")], strict=True):
        text += f" :{label} " if depth else ""
        branches = _branches(word)
        if branches and lettered:
            used[word[0]] += 1
            text += f"({word[0]}{used[word[0]] if used[word[0]] > 1 else ''} / {word}"
        else:
            text += f"({word}" if branches else word
        text += ")" * (depth + branches - following)
    return text


def _leaf(rng: random.Random) -> str:
    """What stands in a tree without brackets of its own: a number, a sign, a letter, or a name in quotes."""
    kind = rng.random()
    if kind < 0.3:
        return f'"{rng.choice(NAMES)}"'
    if kind < 0.6:
        return rng.choice("abcđhmnôtcvx") + rng.choice(("", "", "2", "3"))
    return rng.choice((str(rng.randint(1, 100)), "-", "#1", "#2"))


def _branches(word: str) -> bool:
    """Whether something in an outline is a word, which has brackets and may have others below it."""
    return not re.fullmatch(r'".*"|#?[0-9]+|-|\w[0-9]?', word)


def _some_words(rng: random.Random, longest: int) -> list[str]:
    return rng.choices(_WORDS, k=rng.randint(2, longest))


def _said(words: list[str]) -> str:
    return " ".join(words).replace("_", " ")


KINDS: dict[str, tuple[Callable[[random.Random, int], Exercise], int]] = {
    "write": (write, 2),
    "repeat": (repeat, 2),
    "join": (join, 1),
    "sort": (sort, 2),
    "nest": (nest, 6),
}
"""What is drawn, and how often."""
