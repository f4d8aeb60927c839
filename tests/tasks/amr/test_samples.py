import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.tasks.amr.samples import (
    ANSWER_FORMATS,
    SEPARATOR,
    complete,
    conversation,
    decode,
    encode,
    parse_record,
    probes,
)
from stages.tasks.amr.samples.graphs import Node, canonical, penman, read_graph
from tests.tasks.amr.drawn import TEXTS, graphs

GRAPH = read_graph("(x1 / nói :agent (x2 / chủ tịch :mod t) :topic (x3 / đi :agent x2 :theme x1))")
FULL = "(n / nói :agent (c / chủ_tịch :mod t) :topic (đ / đi :agent c :theme n))"


@pytest.mark.parametrize(
    ("answer_format", "expected"),
    [
        ("full", FULL),
        ("ptr", "(nói #1 :agent (chủ_tịch #2 :mod t) :topic (đi :agent #2 :theme #1))"),
        ("mtup", f"(nói :agent (chủ_tịch :mod t) :topic (đi :agent c :theme n)){SEPARATOR}{FULL}"),
    ],
)
def test_each_format_has_its_form(answer_format: str, expected: str) -> None:
    assert encode(GRAPH, answer_format) == expected


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
@given(graph=graphs())
def test_an_encoded_graph_is_decoded_again(answer_format: str, graph: Node) -> None:
    text = encode(graph, answer_format)
    assert "\n" not in text.replace(SEPARATOR, "")
    decoded = decode(text, answer_format)
    assert decoded.problem is None
    assert decoded.graph == canonical(graph)


@given(graph=graphs())
def test_the_first_step_is_restored_but_for_constants_that_look_like_variables(graph: Node) -> None:
    looks = {"t", "t2", "t3", "đ", "n2"}
    if not looks & graph.constants():
        assert decode(encode(graph, "mtup"), "mtup").restored == canonical(graph)


@pytest.mark.parametrize(
    ("text", "answer_format", "reason"),
    [
        ("", "full", "there is no graph"),
        ("(tôi :agent #1)", "ptr", "no node is called #1"),
        ("(tôi #1 :agent (ta #1))", "ptr", "two nodes are called #1"),
        ("(t / tôi)", "mtup", "not followed by a line of ---"),
        (f"(tôi){SEPARATOR}(t / tôi", "mtup", "never closed"),
    ],
)
def test_a_broken_completion_has_a_reason(text: str, answer_format: str, reason: str) -> None:
    decoded = decode(text, answer_format)
    assert decoded.graph is None
    assert reason in (decoded.problem or "")


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
@given(text=TEXTS)
def test_any_completion_is_decoded_and_repaired(answer_format: str, text: str) -> None:
    decoded = decode(text, answer_format)
    fixed = decoded.repaired
    assert (decoded.graph is None) != (decoded.problem is None)
    if decoded.graph is not None:
        assert fixed == decoded.graph
    if fixed is not None:
        again = canonical(fixed)
        assert read_graph(penman(again)) == again
        assert decode(encode(again, "ptr"), "ptr").graph == again


@pytest.mark.parametrize(
    ("text", "answer_format", "expected"),
    [
        ("Đáp án: (t / tôi) .", "full", "(t / tôi)"),
        ("(đ / đi :agent (t / tôi) :time (n / ngày", "full", "(đ / đi :agent (t / tôi) :time (n / ngày))"),
        ("(đ / đi :agent (t / tôi) (b / bạn) :mod 2)", "full", "(đ / đi :agent (t / tôi) :mod 2)"),
        ("(đ / đi :agent (t / tôi) :mod (t / ta) :op1 t)", "full", "(đ / đi :agent (t / tôi) :mod (x / ta) :op1 t)"),
        ("(đi :agent (tôi))) :mod x", "ptr", "(đ / đi :agent (t / tôi))"),
        ("(đi :agent #1 :theme (tôi #1 :poss #2", "ptr", "(đ / đi :agent t :theme (t / tôi))"),
        (f"(đi :agent (tôi)){SEPARATOR}", "mtup", "(đ / đi :agent (t / tôi))"),
        ("(đi :agent (tôi :poss đ", "mtup", "(đ / đi :agent (t / tôi :poss đ))"),
        (f"(đi :agent (tôi)){SEPARATOR}(đ / đi :agent (t / ta", "mtup", "(đ / đi :agent (t / ta))"),
        ("(đ / đi : :agent (t / / tôi) :1 x / y", "full", "(đ / đi :agent (t / tôi))"),
        ("(o\N{COMBINING CIRCUMFLEX ACCENT} / x :a o\N{COMBINING CIRCUMFLEX ACCENT}", "full", "(x / x :a x)"),
    ],
)  # fmt: skip
def test_repair_keeps_sound_parts(text: str, answer_format: str, expected: str) -> None:
    decoded = decode(text, answer_format)
    assert decoded.graph is None
    assert decoded.repaired is not None
    assert canonical(decoded.repaired) == read_graph(expected)


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
@given(graph=graphs(), rest=st.text(max_size=5))
def test_a_completion_is_complete_at_its_last_parenthesis_and_not_before(
    answer_format: str, graph: Node, rest: str
) -> None:
    text = encode(graph, answer_format)
    assert complete(text + rest, answer_format)
    assert not any(complete(text[:end], answer_format) for end in range(len(text)))


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_a_sentence_is_asked_composed_and_answered_by_its_graph(answer_format: str) -> None:
    sentence = "To\N{COMBINING CIRCUMFLEX ACCENT}i đi ."
    record = parse_record("s1", sentence, "(đ1/đi\r\n :agent(t/tôi))", file="a", line=3)
    asked, answered = (conversation(record, answered=flag, answer_format=answer_format) for flag in (False, True))
    assert (asked.answered(), answered.answered(), asked.sample_id) == (False, True, "s1")
    assert asked.messages == answered.messages[:1]
    assert asked.messages[0]["content"][0]["text"].endswith("\nTôi đi .")
    assert decode(answered.messages[1]["content"][0]["text"], answer_format).graph == record.parsed()
    assert [probe.answered() for probe in probes(answer_format)] == [True, True]
