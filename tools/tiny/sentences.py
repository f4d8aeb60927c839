"""Sentences with their AMR graphs, both drawn from one small grammar: the data set data/tiny/visempar.

The roles and habits are those of ViSemPar: words of several syllables are one concept with underscores; control verbs,
coordinated verbs and purposes share their agent (re-entrancy); people and places have names; numbers are constants.
Some sentences are odd. What matters is that the graph follows from the sentence and from nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from stages.tasks.amr.samples import graphs

LENGTHS = range(4, 17)
"""Words in a sentence; its final mark counts as one, as in ViSemPar's tokenized text."""

_LINES = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
WORDS = {group: tuple(words) for group, *words in map(str.split, _LINES) if group != "#"}
CLASSIFIERS = dict(pair.split(":") for pair in WORDS["classifiers"])
TIMES = {word: word for word in WORDS["times"]} | {"hiện_nay": "now", "bây_giờ": "now"}
"""The concept of each time; ViSemPar writes some of them in English."""
NUMBERS = {word: number for number, word in enumerate(WORDS["numbers"], start=1) if number > 1}
NUMBERS |= {"hai mươi": 20, "ba mươi": 30, "một trăm": 100}
TRANSITIVE = (
    ("consuming", "patient", "food"),
    ("reading", "theme", "texts"),
    ("keeping", "patient", "things"),
    ("lighting", "patient", "lamps"),
)
"""Verbs, the role of their object, and the possible objects. The subject is the :agent. That of `feeling` is the
:pivot, and the object of `orders` is the agent of the following verb."""
WISHES = {word: role for role in ("pivot", "agent") for word in WORDS[f"wishing_as_{role}"]}
"""Verbs whose subject is also the agent of the following verb, each with the subject's role."""
NAMES = ("family_names", "middle_names", "given_names")
_BESIDE = {*NAMES, "cities", "countries", "roles", "classifiers", "numbers", "syllables"}


def vocabulary() -> list[str]:
    """Every word of the grammar with underscores between its syllables, names excluded."""
    groups = [words for group, words in WORDS.items() if group not in _BESIDE]
    return sorted({word for group in (*groups, CLASSIFIERS.values()) for word in group})


@dataclass(eq=False)
class Node:
    """A concept with its edges in order. A node that is the target of several edges is a re-entrancy."""

    concept: str
    edges: list[tuple[str, Node | str]] = field(default_factory=list)
    """(role without the colon, target); a string is a constant as PENMAN writes it."""

    def add(self, role: str, target: Node | str) -> Node:
        self.edges.append((role, target))
        return self

    def graph(self) -> graphs.Node:
        """The graph as read from PENMAN: the first edge to a node holds it, later ones refer to it."""
        numbers: dict[Node, int] = {}

        def converted(target: Node | str) -> graphs.Node | graphs.Reference | str:
            if isinstance(target, str):
                return target
            return graphs.Reference(numbers[target]) if target in numbers else defined(target)

        def defined(node: Node) -> graphs.Node:
            numbers[node] = len(numbers)
            return graphs.Node(node.concept, tuple((f":{role}", converted(target)) for role, target in node.edges))

        return defined(self)


Phrase: TypeAlias = tuple[str, Node]
"""Words and their meaning."""


def generate(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different sentences and their graphs as indented PENMAN; a smaller count gives the first of them."""
    rng = random.Random(f"amr/{seed}")
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        pairs.setdefault(*draw(rng))
    return list(pairs.items())


def draw(rng: random.Random) -> tuple[str, str]:
    """One sentence and its graph."""
    while True:
        text, root = _sentence(rng)
        if len(text.split()) in LENGTHS:
            return text, graphs.penman_lines(root.graph())


# Below, every function draws one kind of phrase.


def _pick(rng: random.Random, words: Sequence[str]) -> Phrase:
    word = rng.choice(words)
    return _spoken(word), Node(word)


def _spoken(concept: str) -> str:
    return concept.replace("_", " ")


def _sentence(rng: random.Random) -> Phrase:
    kind = rng.random()
    if kind < 0.08:  # "hãy ..." tells somebody to do something
        text, root = _action(rng, None)
        return f"hãy {text} !", root.add("mode", "imperative")
    if kind < 0.2:
        (first, left), (second, right) = _clause(rng, short=True), _clause(rng, short=True)
        if rng.random() < 0.5:
            return f"{first} nhưng {second} .", Node("contrast-01", [("ARG1", left), ("ARG2", right)])
        return f"{first} vì {second} .", left.add("cause", right)
    text, root = _adjuncts(rng, *_clause(rng))
    if kind < 0.26:
        return f"vì sao {text} ?", root.add("cause", Node("amr-unknown")).add("mode", "interrogative")
    if kind < 0.33:
        return f"{text} phải không ?", root.add("mode", "interrogative")
    return f"{text} .", root


def _adjuncts(rng: random.Random, text: str, root: Node) -> Phrase:
    """When and where, on either side of a clause."""
    if rng.random() < 0.15:
        place, where = _place(rng)
        text, root = f"{text} ở {place}", root.add("location", where)
    if rng.random() < 0.3:
        words = rng.choice(sorted(TIMES))
        text = f"{_spoken(words)} {text}" if rng.random() < 0.6 else f"{text} {_spoken(words)}"
        root.add("time", Node(TIMES[words]))
    elif rng.random() < 0.12:
        (number, value), (spoken, unit) = _number(rng), _pick(rng, WORDS["units"])
        text = f"{text} trong {number} {spoken}"
        root.add("duration", Node("temporal-quantity", [("quant", value), ("unit", unit)]))
    return text, root


def _clause(rng: random.Random, *, short: bool = False) -> Phrase:
    subject, who = _pick(rng, WORDS["pronouns"]) if short else _somebody(rng)
    kind = rng.random()
    if kind < 0.2:
        return _description(rng, *(_thing(rng, "things") if rng.random() < 0.5 else (subject, who)))
    if kind < 0.3 and not short:
        (first, left), (second, right) = _action(rng, who), _action(rng, who)
        return f"{subject} {first} và {second}", _both(left, right)
    text, root = _action(rng, who) if kind < 0.6 or short else _chain(rng, who)
    # Tense, modality and negation stand between a subject and its verb.
    kind = rng.random()
    if kind < 0.35:
        role, group = ("tense", "tenses") if kind < 0.2 else ("modality", "modalities")
        word, modifier = _pick(rng, WORDS[group])
        text, root = f"{word} {text}", root.add(role, modifier)
    if rng.random() < 0.2:
        text, root = f"{rng.choice(('không', 'chưa', 'chẳng'))} {text}", root.add("polarity", "-")
    return f"{subject} {text}", root


def _both(left: Node, right: Node) -> Node:
    return Node("and", [("op1", left), ("op2", right)])


def _description(rng: random.Random, subject: str, who: Node) -> Phrase:
    """A quality of a person or a thing."""
    is_thing = who.concept in WORDS["things"]
    qualities = WORDS["qualities" if is_thing else "tempers"]
    spoken, root = _pick(rng, qualities)
    root.add("domain", who)
    kind = rng.random()
    if kind < 0.25:
        other, whom = _thing(rng, "things", plain=True) if is_thing else _pick(rng, WORDS["pronouns"])
        return f"{subject} {spoken} hơn {other}", root.add("degree", Node("hơn")).add("compared-to", whom)
    if kind < 0.4:
        other, second = _pick(rng, [another for another in qualities if another != root.concept])
        return f"{subject} vừa {spoken} vừa {other}", _both(Node(root.concept), second).add("domain", who)
    if kind < 0.7:
        degree, how = _pick(rng, WORDS["degrees"])
        return f"{subject} {degree} {spoken}", root.add("degree", how)
    return f"{subject} không {spoken}", root.add("polarity", "-")


def _chain(rng: random.Random, who: Node) -> Phrase:
    """One verb that governs another, whose agent stands elsewhere in the sentence: a re-entrancy."""
    kind = rng.random()
    if kind < 0.6:
        (verb, root), (text, action) = _pick(rng, sorted(WISHES)), _action(rng, who)
        return f"{verb} {text}", root.add(WISHES[root.concept], who).add("theme", action)
    if kind < 0.8:
        (verb, root), (other, whom) = _pick(rng, WORDS["orders"]), _person(rng)
        text, action = _action(rng, whom)
        return f"{verb} {other} {text}", root.add("agent", who).add("goal", whom).add("topic", action)
    (place, where), (text, action), (verb, root) = _place(rng), _action(rng, who), _pick(rng, WORDS["moving"])
    return f"{verb} {place} để {text}", root.add("agent", who).add("goal", where).add("purpose", action)


def _action(rng: random.Random, who: Node | None) -> Phrase:
    """A verb with what belongs to it. who: its subject, named elsewhere; None for somebody who is ordered to."""
    kind = rng.random()
    subject_role = "agent"
    if kind < 0.8:
        if kind < 0.5:
            verbs, role, things = rng.choice(TRANSITIVE)
            target = _thing(rng, things)
        elif kind < 0.6:
            verbs, role, target = "meeting", "theme", _person(rng)
        elif kind < 0.7 and who is not None:
            subject_role = "pivot"
            verbs, role, target = "feeling", "theme", _person(rng)
        else:
            verbs, role, target = "moving", "goal", _place(rng)
        verb, root = _pick(rng, WORDS[verbs])
        text, root = f"{verb} {target[0]}", root.add(role, target[1])
    elif kind < 0.9:
        (verb, root), (topic, what), (other, whom) = (
            *(_pick(rng, WORDS[group]) for group in ("speaking", "topics")),
            _person(rng),
        )
        text = f"{verb} với {other} về {topic}"
        root.add("goal", whom).add("topic", what)
    else:
        (verb, root), (manner, how) = (_pick(rng, WORDS[group]) for group in ("resting", "manners"))
        text = f"{verb} {manner}"
        root.add("manner", how)
    if who is not None:
        root.edges.insert(0, (subject_role, who))
    return text, root


def _somebody(rng: random.Random) -> Phrase:
    """A subject."""
    kind = rng.random()
    if kind < 0.35:
        return _pick(rng, WORDS["pronouns"])
    if kind < 0.8:
        return _person(rng)
    if kind < 0.9:
        (first, left), (second, right) = _person(rng, plain=True), _pick(rng, WORDS["pronouns"])
        return f"{first} và {second}", _both(left, right)
    # "người thắp đèn": who does something, called by what he does
    verbs, role, things = rng.choice(TRANSITIVE)
    (verb, action), (thing, node) = (_pick(rng, WORDS[group]) for group in (verbs, things))
    return f"người {verb} {thing}", Node("person", [("agent-of", action.add(role, node))])


def _person(rng: random.Random, *, plain: bool = False) -> Phrase:
    kind = rng.random()
    if kind < 0.25 and not plain:
        names = [rng.choice(WORDS[group]) for group in NAMES]
        return _named("person", names if rng.random() < 0.6 else names[2:])
    text, node = _pick(rng, WORDS["people"])
    if plain:
        return text, node
    if kind < 0.4:
        return _qualified(rng, "tempers", text, node)
    if kind < 0.5:
        number, value = _number(rng)
        return f"{number} {text}", node.add("quant", value)
    return _qualified(rng, "pointers", text, node) if kind < 0.6 else (text, node)


def _qualified(rng: random.Random, group: str, text: str, node: Node) -> Phrase:
    word, modifier = _pick(rng, WORDS[group])
    return f"{text} {word}", node.add("mod", modifier)


def _thing(rng: random.Random, group: str, *, plain: bool = False) -> Phrase:
    """A thing, counted, with its classifier, a quality or an owner, or none of these."""
    text, node = _pick(rng, WORDS[group])
    if node.concept in CLASSIFIERS and rng.random() < 0.5:
        classifier = CLASSIFIERS[node.concept]
        text, node = f"{classifier} {text}", node.add("classifier", Node(classifier))
        if rng.random() < 0.6 and not plain:
            number, value = _number(rng)
            text, node = f"{number} {text}", node.add("quant", value)
    if plain:
        return text, node
    kind = rng.random()
    if kind < 0.2:
        return _qualified(rng, "qualities", text, node)
    if kind < 0.3:
        owner, whose = _pick(rng, WORDS["pronouns"])
        return f"{text} của {owner}", node.add("poss", whose)
    return _qualified(rng, "pointers", text, node) if kind < 0.4 else (text, node)


def _place(rng: random.Random) -> Phrase:
    kind = rng.random()
    if kind < 0.4:
        concept, group = ("city", "cities") if kind < 0.25 else ("country", "countries")
        return _named(concept, rng.choice(WORDS[group]).split("_"))
    return _pick(rng, WORDS["places"])


def _named(kind: str, names: list[str]) -> Phrase:
    name = Node("name", [(f"op{number}", f'"{part}"') for number, part in enumerate(names, start=1)])
    return " ".join(names), Node(kind, [("name", name)])


def _number(rng: random.Random) -> tuple[str, str]:
    """A number in words or digits, and its value."""
    if rng.random() < 0.5:
        words = rng.choice(sorted(NUMBERS))
        return words, str(NUMBERS[words])
    value = str(rng.randint(2, 99))
    return value, value
