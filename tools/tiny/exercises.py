"""Pre-training data of the tiny text base: sentences by themselves, and exercises on random words.

None shows a sentence with its graph. They teach what a large model brings along anyway: how sentences go, to repeat a
text, which syllables make a word, and how a tree is written. Its labels are the names of AMR's roles, but mean nothing:
here they stand anywhere. Everything is a pure function of a seed and an index.
"""

from __future__ import annotations

import random

from stages.data.conversation import Conversation, message
from stages.tasks.amr.samples import encode
from tools.tiny.sentences import NAMES, WORDS, Node, draw, vocabulary

SHORTEST, LONGEST, EXERCISES_A_WORD = 3, 10, 1000
"""Words that the first exercises have at most, and the last ones; exercises after which they may be a word longer."""

LABELS = WORDS["roles"]
"""Names of AMR's roles, which only ever label random trees here."""
ENGLISH = ("person", "name", "city", "country", "and", "contrast-01", "amr-unknown", "now", "temporal-quantity")
"""Concepts of AMR that are no Vietnamese words: more random words."""
_NAMES = (name for group in (*NAMES, "cities", "countries") for name in WORDS[group])
SYLLABLES = sorted({part for name in _NAMES for part in name.split("_")})
"""Parts of names."""
_WORDS = [*vocabulary(), *ENGLISH]
TREE_STYLES = {"Vẽ cây": "ptr", "Vẽ cây có chữ đầu": "full", "Vẽ cây hai lần": "mtup"}
"""The request for a tree, in other words than the task's, and the answer format in which it is to be written."""

KINDS = {"write": 2, "repeat": 2, "join": 2, "nest": 3, "formula": 4}
"""The weight of each kind of exercises."""


def exercise(seed: int, index: int) -> Conversation:
    """Exercise `index` of the endless series `seed`, answered; its sample_id starts with its kind. They grow longer."""
    rng = random.Random(f"exercise/{seed}/{index}")
    (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
    longest = min(LONGEST, SHORTEST + index // EXERCISES_A_WORD)
    if kind in ("nest", "formula"):
        text, root = (nest if kind == "nest" else formula)(rng, longest)
        style = rng.choice(list(TREE_STYLES))
        question, answer = f"{style}.\n{text}", encode(root.graph(), TREE_STYLES[style])
    else:
        question, answer = text_exercise(rng, kind, longest)
    messages = [message("user", question), message("assistant", answer)]
    return Conversation(sample_id=f"{kind}/{seed}/{index}", messages=messages)


def text_exercise(rng: random.Random, kind: str, longest: int) -> tuple[str, str]:
    """A sentence to be written, which is plain language modelling; a text to be repeated; syllables to be joined."""
    if kind == "write":
        return "Viết một câu.", draw(rng)[0]
    if kind == "repeat":
        text = draw(rng)[0] if rng.random() < 0.6 else _said(rng.choices(_WORDS, k=rng.randint(2, longest)))
        return f"Chép lại.\n{text}", text
    words = rng.choices(_WORDS, k=rng.randint(2, longest))
    return f"Tách từ.\n{_said(words)}", " ".join(words)


def nest(rng: random.Random, longest: int) -> tuple[str, Node]:
    """A tree of random words from its outline, which has the depth and the label of each."""
    root = Node(rng.choice(_WORDS))
    path, lines = [root], [_said([root.concept])]
    for _ in range(rng.randint(1, min(longest, 8) - 1)):
        depth, label = rng.randint(1, len(path)), rng.choice(LABELS)
        del path[depth:]
        if rng.random() < 0.25:
            # A constant, which stands in a tree without brackets.
            name, number = rng.choice(SYLLABLES), rng.randint(1, 100)
            word = rng.choice((f'"{name}"', str(number), "-", "interrogative", "imperative"))
            path[-1].add(label, word)
        else:
            word = rng.choice(_WORDS)
            path.append(Node(word))
            path[-2].add(label, path[-1])
        lines.append(f"{depth} {label} {_said([word])}")
    return " ; ".join(lines), root


def formula(rng: random.Random, longest: int) -> tuple[str, Node]:
    """A formula of random words as a tree: `a ! f b` is f(a, b), `a ! f ! g b` is f(a, g(a, b)), and `+` joins two."""
    text, root = _formula(rng, longest)
    if longest > 5 and rng.random() < 0.3:
        other, second = _formula(rng, longest)
        text, root = f"{text} + {other}", Node("and", [("op1", root), ("op2", second)])
    return text, root


def _formula(rng: random.Random, longest: int) -> tuple[str, Node]:
    first, left = _term(rng)
    second, right = _term(rng)
    head = Node(rng.choice(_WORDS), [("ARG0", left), ("ARG1", right)])
    text = f"! {_said([head.concept])} {second}"
    if longest > 4 and rng.random() < 0.4:
        head = Node(rng.choice(_WORDS), [("ARG0", left), ("ARG1", head)])
        text = f"! {_said([head.concept])} {text}"
    return f"{first} {text}", head


def _term(rng: random.Random) -> tuple[str, Node]:
    """A word; `a * b` hangs the second on the first."""
    word = rng.choice(_WORDS)
    if rng.random() < 0.6:
        return _said([word]), Node(word)
    if rng.random() < 0.3:
        value = str(rng.randint(1, 100))
        return f"{value} * {_said([word])}", Node(word, [("ARG2", value)])
    other = rng.choice(_WORDS)
    return f"{_said([word])} * {_said([other])}", Node(word, [("ARG2", Node(other))])


def _said(words: list[str]) -> str:
    return " ".join(words).replace("_", " ")
