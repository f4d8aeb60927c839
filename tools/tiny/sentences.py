"""Sentences with their AMR graphs, both drawn from one small grammar: the data set data/tiny/visempar.

The roles and habits are those of ViSemPar: words of several syllables are one concept with underscores; control verbs,
coordinated verbs and purposes share their agent (re-entrancy); people and places have names; numbers are constants.
Some sentences are odd. What matters is that the graph follows from the sentence and from nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeAlias

from stages.tasks.amr.samples import graphs

LENGTHS = range(4, 17)
"""Words in a sentence; its final mark counts as one, as in ViSemPar's tokenized text."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PRONOUNS = _words("tôi anh chị em ông bà họ nó chúng_tôi mọi_người")
PEOPLE = _words(
    "bác_sĩ giáo_viên nông_dân công_nhân học_sinh kỹ_sư chủ_tịch nhà_báo ca_sĩ y_tá "
    "cậu_bé cô_gái bạn mẹ cha hàng_xóm khách thầy_giáo nhân_viên ngư_dân"
)
FOOD = _words("cơm cá bánh thịt trái_cây rau cháo phở")
TEXTS = _words("sách thư báo truyện hợp_đồng hồ_sơ bài_thơ báo_cáo")
THINGS = _words("xe nhà ghế bàn cửa thuyền máy_tính đồng_hồ xe_đạp trang_trại")
LAMPS = _words("đèn nến bếp")
TOPICS = _words("công_việc gia_đình thời_tiết chính_sách cuộc_sống chiến_tranh tương_lai giá_cả")
PLACES = _words("trường chợ làng thành_phố bệnh_viện nhà_máy vườn thư_viện bờ_biển cánh_đồng")
CLASSIFIERS = dict(
    pair.split(":")
    for pair in _words(
        "sách:quyển truyện:cuốn thư:bức báo:tờ cá:con bánh:chiếc xe:chiếc nhà:ngôi ghế:cái bàn:cái cửa:cánh "
        "thuyền:con đồng_hồ:chiếc đèn:ngọn nến:cây hợp_đồng:bản báo_cáo:bản"
    )
)
QUALITIES = _words("lớn nhỏ cũ mới đẹp đắt quan_trọng lạ tốt xanh")
TEMPERS = _words("vui buồn mệt_mỏi trẻ thông_minh nổi_tiếng lười_biếng trung_thành hạnh_phúc giỏi")
DEGREES = _words("rất hơi khá quá")
POINTERS = _words("này ấy kia")
MANNERS = _words("chậm_rãi cẩn_thận nhanh_chóng vui_vẻ lặng_lẽ")
TENSES = _words("đã đang sẽ")
MODALITIES = _words("phải nên có_thể cần")
TIMES = {word: word for word in _words("hôm_qua hôm_nay ngày_mai buổi_sáng năm_ngoái mùa_hè")} | {
    "hiện_nay": "now",
    "bây_giờ": "now",
}
"""The concept of each time; ViSemPar writes some of them in English."""
UNITS = _words("ngày tháng năm giờ phút")
NUMBERS = dict(zip(_words("hai ba bốn năm sáu bảy tám chín mười"), range(2, 11), strict=True)) | {
    "hai mươi": 20,
    "ba mươi": 30,
    "một trăm": 100,
}
FAMILY_NAMES = _words("Nguyễn Trần Lê Phạm Bùi Đặng")
MIDDLE_NAMES = _words("Văn Thị Minh Ngọc")
GIVEN_NAMES = _words("Lan Hải Dũng Hương Nam Linh Sơn Mai")
CITIES = ("Hà Nội", "Đà Nẵng", "Huế", "Cần Thơ", "Hải Phòng", "Sài Gòn")
COUNTRIES = ("Việt Nam", "Lào", "Nhật Bản", "Pháp")
TRANSITIVE = (
    (_words("ăn nấu mua bán"), "patient", FOOD),
    (_words("đọc viết mượn dịch"), "theme", TEXTS),
    (_words("sửa sơn bán cất_giữ mua"), "patient", THINGS),
    (_words("thắp tắt"), "patient", LAMPS),
)
"""Verbs, the role of their object, and the possible objects. The subject is the :agent."""
FEELING = _words("nhớ yêu_mến tin_tưởng sợ")
"""Verbs whose subject is the :pivot."""
MEETING = _words("gặp tìm chờ giúp_đỡ chăm_sóc")
MOVING = _words("đi đến trở_về")
SPEAKING = _words("nói hỏi kể")
RESTING = _words("ngủ nghỉ_ngơi làm_việc khóc cười")
WISHES = {"muốn": "pivot", "định": "pivot", "thích": "pivot", "cố_gắng": "agent", "hứa": "agent", "quyết_định": "agent"}
"""Verbs whose subject is also the agent of the following verb, each with the subject's role."""
ORDERS = _words("mời khuyên nhờ yêu_cầu")
"""Verbs whose object is the agent of the following verb."""


def vocabulary() -> list[str]:
    """Every word of the grammar with underscores between its syllables, names excluded."""
    groups = (
        *(PRONOUNS, PEOPLE, FOOD, TEXTS, THINGS, LAMPS, TOPICS, PLACES, CLASSIFIERS.values(), QUALITIES, TEMPERS),
        *(DEGREES, POINTERS, MANNERS, TENSES, MODALITIES, TIMES, UNITS, FEELING, MEETING, MOVING, SPEAKING, RESTING),
        *(WISHES, ORDERS, *(verbs for verbs, _, _ in TRANSITIVE)),
    )
    return sorted({word for group in groups for word in group})


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
        words = rng.choice(sorted(TIMES))
        text = f"{_spoken(words)} {text}" if rng.random() < 0.6 else f"{text} {_spoken(words)}"
        root.add("time", Node(TIMES[words]))
    elif rng.random() < 0.12:
        number, value = _number(rng)
        unit = rng.choice(UNITS)
        text = f"{text} trong {number} {unit}"
        root.add("duration", Node("temporal-quantity", [("quant", value), ("unit", Node(unit))]))
    return text, root


def _clause(rng: random.Random, *, short: bool = False) -> Phrase:
    subject, who = _pronoun(rng) if short else _somebody(rng)
    kind = rng.random()
    if kind < 0.2:
        return _description(rng, *(_thing(rng, THINGS) if rng.random() < 0.5 else (subject, who)))
    if kind < 0.3 and not short:
        (first, left), (second, right) = _action(rng, who), _action(rng, who)
        return f"{subject} {first} và {second}", Node("and", [("op1", left), ("op2", right)])
    text, root = _action(rng, who) if kind < 0.6 or short else _chain(rng, who)
    return _modified(rng, subject, text, root)


def _modified(rng: random.Random, subject: str, text: str, root: Node) -> Phrase:
    """Tense, modality and negation, which stand between a subject and its verb."""
    kind = rng.random()
    if kind < 0.35:
        role, words = ("tense", TENSES) if kind < 0.2 else ("modality", MODALITIES)
        word = rng.choice(words)
        text, root = f"{_spoken(word)} {text}", root.add(role, Node(word))
    if rng.random() < 0.2:
        text, root = f"{rng.choice(('không', 'chưa', 'chẳng'))} {text}", root.add("polarity", "-")
    return f"{subject} {text}", root


def _description(rng: random.Random, subject: str, who: Node) -> Phrase:
    """A quality of a person or a thing."""
    qualities = QUALITIES if who.concept in THINGS else TEMPERS
    quality = rng.choice(qualities)
    root = Node(quality, [("domain", who)])
    kind = rng.random()
    if kind < 0.25:
        other, whom = _thing(rng, THINGS, plain=True) if who.concept in THINGS else _pronoun(rng)
        root.add("degree", Node("hơn")).add("compared-to", whom)
        return f"{subject} {_spoken(quality)} hơn {other}", root
    if kind < 0.4:
        other = rng.choice([another for another in qualities if another != quality])
        both = Node("and", [("op1", Node(quality)), ("op2", Node(other))])
        return f"{subject} vừa {_spoken(quality)} vừa {_spoken(other)}", both.add("domain", who)
    if kind < 0.7:
        degree = rng.choice(DEGREES)
        return f"{subject} {degree} {_spoken(quality)}", root.add("degree", Node(degree))
    return f"{subject} không {_spoken(quality)}", root.add("polarity", "-")


def _chain(rng: random.Random, who: Node) -> Phrase:
    """One verb that governs another, whose agent stands elsewhere in the sentence: a re-entrancy."""
    kind = rng.random()
    if kind < 0.6:
        wish = rng.choice(sorted(WISHES))
        text, action = _action(rng, who)
        return f"{_spoken(wish)} {text}", Node(wish, [(WISHES[wish], who), ("theme", action)])
    if kind < 0.8:
        order = rng.choice(ORDERS)
        other, whom = _person(rng)
        text, action = _action(rng, whom)
        root = Node(order, [("agent", who), ("goal", whom), ("topic", action)])
        return f"{_spoken(order)} {other} {text}", root
    place, where = _place(rng)
    text, action = _action(rng, who)
    moving = rng.choice(MOVING)
    return f"{_spoken(moving)} {place} để {text}", Node(moving, [("agent", who), ("goal", where), ("purpose", action)])


def _action(rng: random.Random, who: Node | None) -> Phrase:
    """A verb with what belongs to it. who: its subject, named elsewhere; None for somebody who is ordered to."""
    kind = rng.random()
    role = "agent"
    if kind < 0.5:
        verbs, object_role, things = rng.choice(TRANSITIVE)
        text, root = _verb(rng, verbs, object_role, _thing(rng, things))
    elif kind < 0.6:
        text, root = _verb(rng, MEETING, "theme", _person(rng))
    elif kind < 0.7 and who is not None:
        role = "pivot"
        text, root = _verb(rng, FEELING, "theme", _person(rng))
    elif kind < 0.8:
        text, root = _verb(rng, MOVING, "goal", _place(rng))
    elif kind < 0.9:
        verb, topic = rng.choice(SPEAKING), rng.choice(TOPICS)
        other, whom = _person(rng)
        text = f"{verb} với {other} về {_spoken(topic)}"
        root = Node(verb, [("goal", whom), ("topic", Node(topic))])
    else:
        verb, manner = rng.choice(RESTING), rng.choice(MANNERS)
        text, root = f"{_spoken(verb)} {_spoken(manner)}", Node(verb, [("manner", Node(manner))])
    if who is not None:
        root.edges.insert(0, (role, who))
    return text, root


def _verb(rng: random.Random, verbs: tuple[str, ...], role: str, thing: Phrase) -> Phrase:
    """One of the verbs with what it acts on."""
    verb, (text, node) = rng.choice(verbs), thing
    return f"{_spoken(verb)} {text}", Node(verb, [(role, node)])


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
    verbs, role, things = rng.choice(TRANSITIVE)
    verb, thing = rng.choice(verbs), rng.choice(things)
    action = Node(verb, [(role, Node(thing))])
    return f"người {_spoken(verb)} {_spoken(thing)}", Node("person", [("agent-of", action)])


def _person(rng: random.Random, *, plain: bool = False) -> Phrase:
    kind = rng.random()
    if kind < 0.25 and not plain:
        names = [rng.choice(FAMILY_NAMES), rng.choice(MIDDLE_NAMES), rng.choice(GIVEN_NAMES)]
        return _named("person", names if rng.random() < 0.6 else names[2:])
    noun = rng.choice(PEOPLE)
    text, node = _spoken(noun), Node(noun)
    if plain:
        return text, node
    if kind < 0.4:
        return _qualified(rng, TEMPERS, text, node)
    if kind < 0.5:
        number, value = _number(rng)
        return f"{number} {text}", node.add("quant", value)
    if kind < 0.6:
        return _qualified(rng, POINTERS, text, node)
    return text, node


def _qualified(rng: random.Random, words: tuple[str, ...], text: str, node: Node) -> Phrase:
    word = rng.choice(words)
    return f"{text} {_spoken(word)}", node.add("mod", Node(word))


def _pronoun(rng: random.Random) -> Phrase:
    pronoun = rng.choice(PRONOUNS)
    return _spoken(pronoun), Node(pronoun)


def _thing(rng: random.Random, things: tuple[str, ...], *, plain: bool = False) -> Phrase:
    """A thing, counted, with its classifier, a quality or an owner, or none of these."""
    noun = rng.choice(things)
    text, node = _spoken(noun), Node(noun)
    if noun in CLASSIFIERS and rng.random() < 0.5:
        classifier = CLASSIFIERS[noun]
        text, node = f"{classifier} {text}", node.add("classifier", Node(classifier))
        if rng.random() < 0.6 and not plain:
            number, value = _number(rng)
            text, node = f"{number} {text}", node.add("quant", value)
    if plain:
        return text, node
    kind = rng.random()
    if kind < 0.2:
        return _qualified(rng, QUALITIES, text, node)
    if kind < 0.3:
        owner, whose = _pronoun(rng)
        return f"{text} của {owner}", node.add("poss", whose)
    if kind < 0.4:
        return _qualified(rng, POINTERS, text, node)
    return text, node


def _place(rng: random.Random) -> Phrase:
    kind = rng.random()
    if kind < 0.25:
        return _named("city", rng.choice(CITIES).split())
    if kind < 0.4:
        return _named("country", rng.choice(COUNTRIES).split())
    place = rng.choice(PLACES)
    return _spoken(place), Node(place)


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


def _spoken(concept: str) -> str:
    return concept.replace("_", " ")
