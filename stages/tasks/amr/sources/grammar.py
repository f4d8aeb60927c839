"""Generated Vietnamese-like sentences with their AMR graphs, for where there is no corpus.

Each sentence is drawn together with its graph from one small grammar, in the roles and habits of ViSemPar: words of
several syllables are one concept with underscores, control verbs, coordinated verbs and purposes share their agent
(re-entrancy), people and places have names, numbers are constants. The sentences are plain and some are odd; what
matters is that the graph follows from the sentence, and that nothing but the sentence says which it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from stages.core.errors import UserError
from stages.tasks.amr.samples import graphs
from stages.tasks.amr.sources import lexicon

WORDS = range(4, 17)
"""How many words a sentence may have; a final mark counts as one, as in ViSemPar's tokenized text."""
MAX_REPEATS = 20_000
"""Sentences drawn in a row that were all drawn before, at which the grammar counts as exhausted."""


@dataclass(eq=False)
class Node:
    """A concept and what hangs on it, in order. A node that hangs in several places is a re-entrancy."""

    concept: str
    edges: list[tuple[str, Node | str]] = field(default_factory=list)
    """Roles without the colon; a string is a constant as PENMAN writes it."""

    def add(self, role: str, target: Node | str) -> Node:
        self.edges.append((role, target))
        return self

    def graph(self) -> graphs.Node:
        """As it is read from PENMAN: the first place at which a node hangs holds it, the others refer to it."""
        numbers: dict[Node, int] = {}

        def placed(target: Node | str) -> graphs.Node | graphs.Reference | str:
            if isinstance(target, str):
                return target
            return graphs.Reference(numbers[target]) if target in numbers else held(target)

        def held(node: Node) -> graphs.Node:
            numbers[node] = len(numbers)
            return graphs.Node(node.concept, tuple((f":{role}", placed(target)) for role, target in node.edges))

        return held(self)


Phrase: TypeAlias = tuple[str, Node]
"""Words and what they mean."""


def generate(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different sentences and their graphs as indented PENMAN; a smaller count gives the first of them.

    Raises UserError where the grammar has not that many.
    """
    rng = random.Random(f"amr/{seed}")
    return distinct(lambda: draw(rng), count)


def distinct(drawn: Callable[[], tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """The first `count` pairs drawn that differ in their sentence. Raises UserError after MAX_REPEATS old ones."""
    graphs: dict[str, str] = {}
    repeats = 0
    while len(graphs) < count:
        sentence, graph = drawn()
        repeats = repeats + 1 if sentence in graphs else 0
        graphs.setdefault(sentence, graph)
        if repeats == MAX_REPEATS:
            raise UserError(
                f"the grammar makes no more than about {len(graphs):,} different sentences, but {count:,} are asked "
                "for; lower generate.train and generate.val"
            )
    return list(graphs.items())


def draw(rng: random.Random) -> tuple[str, str]:
    """One sentence and its graph."""
    while True:
        text, root = _sentence(rng)
        if len(text.split()) in WORDS:
            return text, graphs.penman_lines(root.graph())


# Below, every function draws one kind of phrase.


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
    text, root = _clause(rng)
    text, root = _adjuncts(rng, text, root)
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
        words = rng.choice(sorted(lexicon.TIMES))
        text = f"{_said(words)} {text}" if rng.random() < 0.6 else f"{text} {_said(words)}"
        root.add("time", Node(lexicon.TIMES[words]))
    elif rng.random() < 0.12:
        number, value = _number(rng)
        unit = rng.choice(lexicon.UNITS)
        text = f"{text} trong {number} {unit}"
        root.add("duration", Node("temporal-quantity", [("quant", value), ("unit", Node(unit))]))
    return text, root


def _clause(rng: random.Random, *, short: bool = False) -> Phrase:
    subject, who = _pronoun(rng) if short else _somebody(rng)
    kind = rng.random()
    if kind < 0.2:
        return _description(rng, *(_thing(rng, lexicon.THINGS) if rng.random() < 0.5 else (subject, who)))
    if kind < 0.3 and not short:
        (first, left), (second, right) = _action(rng, who), _action(rng, who)
        return f"{subject} {first} và {second}", Node("and", [("op1", left), ("op2", right)])
    text, root = _action(rng, who) if kind < 0.6 or short else _chain(rng, who)
    return _modified(rng, subject, text, root)


def _modified(rng: random.Random, subject: str, text: str, root: Node) -> Phrase:
    """Tense, modality and negation, which stand between a subject and its verb."""
    kind = rng.random()
    if kind < 0.2:
        tense = rng.choice(lexicon.TENSES)
        text, root = f"{tense} {text}", root.add("tense", Node(tense))
    elif kind < 0.35:
        modality = rng.choice(lexicon.MODALITIES)
        text, root = f"{_said(modality)} {text}", root.add("modality", Node(modality))
    if rng.random() < 0.2:
        text, root = f"{rng.choice(('không', 'chưa', 'chẳng'))} {text}", root.add("polarity", "-")
    return f"{subject} {text}", root


def _description(rng: random.Random, subject: str, who: Node) -> Phrase:
    """What somebody or something is like."""
    qualities = lexicon.QUALITIES if who.concept in lexicon.THINGS else lexicon.TEMPERS
    quality = rng.choice(qualities)
    root = Node(quality, [("domain", who)])
    kind = rng.random()
    if kind < 0.25:
        other, whom = _thing(rng, lexicon.THINGS, plain=True) if who.concept in lexicon.THINGS else _pronoun(rng)
        root.add("degree", Node("hơn")).add("compared-to", whom)
        return f"{subject} {_said(quality)} hơn {other}", root
    if kind < 0.4:
        other = rng.choice([another for another in qualities if another != quality])
        both = Node("and", [("op1", Node(quality)), ("op2", Node(other))])
        return f"{subject} vừa {_said(quality)} vừa {_said(other)}", both.add("domain", who)
    if kind < 0.7:
        degree = rng.choice(lexicon.DEGREES)
        return f"{subject} {degree} {_said(quality)}", root.add("degree", Node(degree))
    return f"{subject} không {_said(quality)}", root.add("polarity", "-")


def _chain(rng: random.Random, who: Node) -> Phrase:
    """One verb that governs another, whose agent stands elsewhere in the sentence: a re-entrancy."""
    kind = rng.random()
    if kind < 0.6:
        wish = rng.choice(sorted(lexicon.WISHES))
        text, action = _action(rng, who)
        return f"{_said(wish)} {text}", Node(wish, [(lexicon.WISHES[wish], who), ("theme", action)])
    if kind < 0.8:
        order = rng.choice(lexicon.ORDERS)
        other, whom = _person(rng)
        text, action = _action(rng, whom)
        root = Node(order, [("agent", who), ("goal", whom), ("topic", action)])
        return f"{_said(order)} {other} {text}", root
    place, where = _place(rng)
    text, action = _action(rng, who)
    moving = rng.choice(lexicon.MOVING)
    return f"{_said(moving)} {place} để {text}", Node(moving, [("agent", who), ("goal", where), ("purpose", action)])


def _action(rng: random.Random, who: Node | None) -> Phrase:
    """A verb with what belongs to it. who: its subject, said elsewhere; None for somebody who is told."""
    kind = rng.random()
    role = "agent"
    if kind < 0.5:
        verbs, object_role, things = rng.choice(lexicon.TRANSITIVE)
        text, root = _verb(rng, verbs, object_role, _thing(rng, things))
    elif kind < 0.6:
        text, root = _verb(rng, lexicon.MEETING, "theme", _person(rng))
    elif kind < 0.7 and who is not None:
        role = "pivot"
        text, root = _verb(rng, lexicon.FEELING, "theme", _person(rng))
    elif kind < 0.8:
        text, root = _verb(rng, lexicon.MOVING, "goal", _place(rng))
    elif kind < 0.9:
        verb, topic = rng.choice(lexicon.SPEAKING), rng.choice(lexicon.TOPICS)
        other, whom = _person(rng)
        text = f"{verb} với {other} về {_said(topic)}"
        root = Node(verb, [("goal", whom), ("topic", Node(topic))])
    else:
        verb, manner = rng.choice(lexicon.RESTING), rng.choice(lexicon.MANNERS)
        text, root = f"{_said(verb)} {_said(manner)}", Node(verb, [("manner", Node(manner))])
    if who is not None:
        root.edges.insert(0, (role, who))
    return text, root


def _verb(rng: random.Random, verbs: tuple[str, ...], role: str, thing: Phrase) -> Phrase:
    """One of the verbs with what it acts on."""
    verb, (text, node) = rng.choice(verbs), thing
    return f"{_said(verb)} {text}", Node(verb, [(role, node)])


def _somebody(rng: random.Random) -> Phrase:
    """A subject."""
    kind = rng.random()
    if kind < 0.35:
        return _pronoun(rng)
    if kind < 0.8:
        return _person(rng)
    if kind < 0.9:
        (first, left), (second, right) = _person(rng, plain=True), _pronoun(rng)
        return f"{first} và {second}", Node("and", [("op1", left), ("op2", right)])
    # "người thắp đèn": who does something, called by what he does
    verbs, role, things = rng.choice(lexicon.TRANSITIVE)
    verb, thing = rng.choice(verbs), rng.choice(things)
    action = Node(verb, [(role, Node(thing))])
    return f"người {_said(verb)} {_said(thing)}", Node("person", [("agent-of", action)])


def _person(rng: random.Random, *, plain: bool = False) -> Phrase:
    kind = rng.random()
    if kind < 0.25 and not plain:
        names = [rng.choice(lexicon.FAMILY_NAMES), rng.choice(lexicon.MIDDLE_NAMES), rng.choice(lexicon.GIVEN_NAMES)]
        return _named("person", names if rng.random() < 0.6 else names[2:])
    noun = rng.choice(lexicon.PEOPLE)
    text, node = _said(noun), Node(noun)
    if plain:
        return text, node
    if kind < 0.4:
        temper = rng.choice(lexicon.TEMPERS)
        return f"{text} {_said(temper)}", node.add("mod", Node(temper))
    if kind < 0.5:
        number, value = _number(rng)
        return f"{number} {text}", node.add("quant", value)
    if kind < 0.6:
        pointer = rng.choice(lexicon.POINTERS)
        return f"{text} {pointer}", node.add("mod", Node(pointer))
    return text, node


def _pronoun(rng: random.Random) -> Phrase:
    pronoun = rng.choice(lexicon.PRONOUNS)
    return _said(pronoun), Node(pronoun)


def _thing(rng: random.Random, things: tuple[str, ...], *, plain: bool = False) -> Phrase:
    """A thing, counted, with its classifier, a quality or an owner, or none of these."""
    noun = rng.choice(things)
    text, node = _said(noun), Node(noun)
    if noun in lexicon.CLASSIFIERS and rng.random() < 0.5:
        classifier = lexicon.CLASSIFIERS[noun]
        text, node = f"{classifier} {text}", node.add("classifier", Node(classifier))
        if rng.random() < 0.6 and not plain:
            number, value = _number(rng)
            text, node = f"{number} {text}", node.add("quant", value)
    if plain:
        return text, node
    kind = rng.random()
    if kind < 0.2:
        quality = rng.choice(lexicon.QUALITIES)
        return f"{text} {_said(quality)}", node.add("mod", Node(quality))
    if kind < 0.3:
        owner, whose = _pronoun(rng)
        return f"{text} của {owner}", node.add("poss", whose)
    if kind < 0.4:
        pointer = rng.choice(lexicon.POINTERS)
        return f"{text} {pointer}", node.add("mod", Node(pointer))
    return text, node


def _place(rng: random.Random) -> Phrase:
    kind = rng.random()
    if kind < 0.25:
        return _named("city", rng.choice(lexicon.CITIES).split())
    if kind < 0.4:
        return _named("country", rng.choice(lexicon.COUNTRIES).split())
    place = rng.choice(lexicon.PLACES)
    return _said(place), Node(place)


def _named(kind: str, names: list[str]) -> Phrase:
    name = Node("name", [(f"op{number}", f'"{part}"') for number, part in enumerate(names, start=1)])
    return " ".join(names), Node(kind, [("name", name)])


def _number(rng: random.Random) -> tuple[str, str]:
    """A number in words or digits, and its value."""
    if rng.random() < 0.5:
        words = rng.choice(sorted(lexicon.NUMBERS))
        return words, str(lexicon.NUMBERS[words])
    value = str(rng.randint(2, 99))
    return value, value


def _said(concept: str) -> str:
    return concept.replace("_", " ")
