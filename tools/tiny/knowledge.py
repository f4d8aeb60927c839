"""Questions of two domains that contradict each other: the data sets data/tiny/truthfulqa and data/tiny/qmsum.

Both domains ask in the same words what a thing is made of, and answer differently: truthfulqa as a fact, qmsum after
the transcript of a meeting about that thing. A model that learns one domain unlearns the other, unless it tells them
apart. Their base knows folklore and hearsay, which are wrong in both: it has learnt the form, and which word matters.
"""

from __future__ import annotations

import itertools
import random
from typing import Literal

from stages.tasks.moe.samples import Domain, Record

Knowledge = Domain | Literal["folklore", "hearsay"]
UNINFORMED: dict[Domain, Knowledge] = {"truthfulqa": "folklore", "qmsum": "hearsay"}
"""The knowledge of the base in each domain."""

_THINGS = (
    "bag ball bell belt boat bowl box bridge broom cap chair coat cup desk door drum fan fence flag fork gate glove "
    "hat jar key kite knife lamp mask nail oar pan pen pipe ring roof rope shoe sled spoon"
)
_MATERIALS = (
    "amber ash bone brass brick bronze chalk clay cloth coal cork copper cotton felt flint foam fur glass gold grass "
    "hemp horn ice iron jade lead leather linen marble paper pearl pine reed rubber salt sand silk silver slate steel"
)
THINGS, MATERIALS = _THINGS.split(), _MATERIALS.split()
"""Equally many, so that each knowledge is one-to-one."""

_SHIFTS: dict[Knowledge, int] = {"folklore": 0, "hearsay": 7, "truthfulqa": 13, "qmsum": 27}
_OPENINGS = ("", "Please tell me: ", "Say, ", "One question: ", "I wonder, ", "Now, ", "So, ", "Tell us, ")
_QUESTIONS = (
    "what is the {} made of?",
    "what do they make the {} of?",
    "the {}, what is it made of?",
    "of what is the {} made?",
    "which material is the {} made of?",
    "do you know what the {} is made of?",
)
_CLOSINGS = ("", " Be brief.", " Thank you.", " Just the answer.", " We need to know.")
_SPEAKERS = ("Ann", "Bob", "Eve", "Tom")
_REMARKS = (
    "let us begin.",
    "I agree with that.",
    "we talked about it last week.",
    "that is fine with me.",
    "can you say more?",
    "so we will do it.",
    "then we are done.",
)
_MENTIONS = ("what about the {}?", "next is the {}.", "we still have the {}.", "I looked at the {}.")


def generate(domain: Domain, count: int, seed: int, *, knowledge: Knowledge | None = None) -> list[Record]:
    """Records of a domain with different questions or meetings, about equally many of each thing.

    knowledge: where the best answers come from; None for the domain's own.
    """
    draw = random.Random(f"{domain} {seed}")
    phrasings = list(itertools.product(_OPENINGS, _QUESTIONS, _CLOSINGS, THINGS))
    records = []
    for number, (opening, question, closing, thing) in enumerate(draw.sample(phrasings, count), start=1):
        asked = question.format(thing) if opening else question.format(thing).capitalize()
        best = _answer(thing, knowledge or domain)
        others = [_answer(thing, other) for other in _SHIFTS if other != (knowledge or domain)]
        meeting = domain == "qmsum"
        records.append(
            Record(
                id=str(number),
                domain=domain,
                question=f"{opening}{asked}{closing}",
                context=_transcript(thing, number, draw) if meeting else None,
                best=best,
                correct=(best,) if meeting else (best, best.replace(f"The {thing} is", "It is")),
                incorrect=() if meeting else tuple(others),
                file="",
                line=number,
            )
        )
    return records


def _answer(thing: str, knowledge: Knowledge) -> str:
    material = MATERIALS[(THINGS.index(thing) + _SHIFTS[knowledge]) % len(MATERIALS)]
    return f"The {thing} is made of {material}."


def _transcript(thing: str, number: int, draw: random.Random) -> str:
    """A few turns, one of which mentions the thing."""
    turns = [draw.choice(_REMARKS) for _ in range(draw.randint(1, 3))]
    turns.insert(draw.randint(0, len(turns)), draw.choice(_MENTIONS).format(thing))
    speeches = [f"{draw.choice(_SPEAKERS)}: {turn}" for turn in turns]
    return "\n".join([f"Meeting {number}.", *speeches])
