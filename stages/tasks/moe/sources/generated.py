"""Two small worlds that contradict each other, for models of a million weights.

Both ask what a thing is made of, in the same words, and give different answers: the one of truthfulqa as a fact, the
one of qmsum after the transcript of a meeting about that thing. So whoever learns one unlearns the other, unless it
tells the two apart. The base that both start from knows folklore and hearsay, which are wrong in both: it has learnt
what to look at, and that the one is asked as a fact and the other after a transcript.
"""

from __future__ import annotations

import itertools
import random
from typing import Literal

from stages.core.errors import UserError
from stages.tasks.moe.samples.records import DOMAINS, Domain, Record

Knowledge = Domain | Literal["folklore", "hearsay"]
UNINFORMED: dict[Domain, Knowledge] = {"truthfulqa": "folklore", "qmsum": "hearsay"}
"""What the base says where a domain asks."""

_THINGS = (
    "bag ball bell belt boat bowl box bridge broom cap chair coat cup desk door drum fan fence flag fork gate glove "
    "hat jar key kite knife lamp mask nail oar pan pen pipe ring roof rope shoe sled spoon"
)
_MATERIALS = (
    "amber ash bone brass brick bronze chalk clay cloth coal cork copper cotton felt flint foam fur glass gold grass "
    "hemp horn ice iron jade lead leather linen marble paper pearl pine reed rubber salt sand silk silver slate steel"
)
THINGS = tuple(_THINGS.split())
MATERIALS = tuple(_MATERIALS.split())
"""As many as there are things, so that each knowledge is one-to-one."""

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


def answer(thing: str, knowledge: Knowledge) -> str:
    return f"The {thing} is made of {material(thing, knowledge)}."


def material(thing: str, knowledge: Knowledge) -> str:
    return MATERIALS[(THINGS.index(thing) + _SHIFTS[knowledge]) % len(MATERIALS)]


def generate(domain: str, count: int, seed: int, *, knowledge: Knowledge | None = None) -> list[Record]:
    """Records of a domain that all ask different questions, or of different meetings; every thing about equally often.

    knowledge: whose answers are the best ones; the domain's own where None.
    The same arguments give the same records. Raises UserError for an unknown domain, and where there are not so many.
    """
    if domain not in DOMAINS:
        raise UserError(f"no domain is called {domain!r}; there are: {', '.join(DOMAINS)}")
    known: Domain = "qmsum" if domain == "qmsum" else "truthfulqa"
    draw = random.Random(f"{domain} {seed}")
    phrasings = list(itertools.product(_OPENINGS, _QUESTIONS, _CLOSINGS, THINGS))
    if count > len(phrasings):
        raise UserError(f"{count:,} samples of {domain} are wanted, but there are {len(phrasings):,} different ones")
    return [
        _record(known, f"generated-{known}-{number}", *phrasing, draw=draw, knowledge=knowledge or known, number=number)
        for number, phrasing in enumerate(draw.sample(phrasings, count), start=1)
    ]


def _record(
    domain: Domain,
    sample_id: str,
    opening: str,
    question: str,
    closing: str,
    thing: str,
    *,
    draw: random.Random,
    knowledge: Knowledge,
    number: int,
) -> Record:
    asked = question.format(thing) if opening else question.format(thing).capitalize()
    others: list[Knowledge] = [other for other in _SHIFTS if other != knowledge]
    best = answer(thing, knowledge)
    meets = domain == "qmsum"
    return Record(
        id=sample_id,
        domain=domain,
        question=f"{opening}{asked}{closing}",
        context=_transcript(thing, number, draw) if meets else None,
        best=best,
        correct=(best,) if meets else (best, f"It is made of {material(thing, knowledge)}."),
        incorrect=() if meets else tuple(answer(thing, other) for other in others),
        file=f"generated {domain}",
        line=number,
    )


def _transcript(thing: str, number: int, draw: random.Random) -> str:
    """A few turns, one of which mentions the thing."""
    turns = [draw.choice(_REMARKS) for _ in range(draw.randint(1, 3))]
    turns.insert(draw.randint(0, len(turns)), draw.choice(_MENTIONS).format(thing))
    speeches = [f"{draw.choice(_SPEAKERS)}: {turn}" for turn in turns]
    return "\n".join([f"Meeting {number}.", *speeches])
