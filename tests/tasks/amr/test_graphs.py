import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.tasks.amr.samples import ANSWER_FORMATS, complete, decode
from stages.tasks.amr.samples.graphs import (
    MAX_DEPTH,
    MalformedGraph,
    Node,
    Reference,
    canonical,
    penman,
    read_graph,
    variable_names,
)
from tests.damage import damaged_text, quick
from tests.tasks.amr.drawn import PIECES, as_drawn, graphs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(t / tôi)", Node("tôi")),
        ("(t/tôi\r\n    :mod(đ/đó))\r\n", Node("tôi", ((":mod", Node("đó")),))),
        ("(c / chủ\n  tịch :poss ông\t nội)", Node("chủ tịch", ((":poss", "ông nội"),))),
        ("(ô1 / ông :poss-of (m / mũ :mod ô1))", Node("ông", ((":poss-of", Node("mũ", ((":mod", Reference(0)),))),))),
        ("(a / ăn :agent c :theme (c / cơm))", Node("ăn", ((":agent", Reference(1)), (":theme", Node("cơm"))))),
        ("(v / tốc :unit (k / km/h) :time 10:30)", Node("tốc", ((":unit", Node('"km/h"')), (":time", '"10:30"')))),
        ("(t / tôi~e.4 :polarity~e.1 -~e.2,3)", Node("tôi", ((":polarity", "-"),))),
        ('(n / name :op1 "Hà \n Nội")', Node("name", ((":op1", '"Hà Nội"'),))),
        ("(t / trang :mod #1)", Node("trang", ((":mod", '"#1"'),))),
        ("(t / tôi :theme t2)", Node("tôi", ((":theme", "t2"),))),
        ("(o\N{COMBINING CIRCUMFLEX ACCENT} / x :theme ô)", Node("x", ((":theme", Reference(0)),))),
        ("(ô / x :theme o\N{COMBINING CIRCUMFLEX ACCENT})", Node("x", ((":theme", Reference(0)),))),
        ("(t / a/\\)", Node('"a/\\\\"')),
    ],
)
def test_the_spellings_of_annotators_are_read(text: str, expected: Node) -> None:
    assert read_graph(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", None, "there is no graph"),
        ("tôi", 0, "starts with a parenthesis"),
        ("(t / tôi", None, "a parenthesis is never closed"),
        ("(t / tôi))", 0, "text after the graph"),
        ("(t / tôi\n  :time( / 1900))", 1, "a node has no variable"),
        ("(t /\n :a (b / c))", 1, "node t has no concept"),
        ("(t / tôi\n\n :a )", 2, "role :a has no target"),
        ("(t / tôi :a (t / ta))", None, "two nodes are called t"),
        ('(t / tôi\n :op1 "Hà Nội)', 1, "a quote is opened and never closed"),
        ("(t / tôi\n :a (b / bạn) ta)", 1, "expected a role"),
        ("(# / x)", 0, "# is no variable"),
        ("(a / b / c)", 0, "/ is neither a role nor a word"),
        ("(a / b\n : agent c)", 1, ": is neither a role nor a word"),
        ("(a / b " + ":c (d / e " * MAX_DEPTH + ")" * (MAX_DEPTH + 1), 0, "nested more than 100 deep"),
    ],
)
def test_a_malformed_graph_says_where_and_why(text: str, line: int | None, reason: str) -> None:
    with pytest.raises(MalformedGraph, match=reason) as raised:
        read_graph(text)
    assert raised.value.line == line


@given(graphs())
def test_reading_gives_back_what_was_written(graph: Node) -> None:
    assert read_graph(as_drawn(graph)) == read_graph(as_drawn(graph, indent="    ")) == graph
    for indented in (False, True):
        assert read_graph(penman(graph, indented=indented)) == canonical(graph) == canonical(canonical(graph))


def test_variables_are_letters_of_the_concepts_and_pass_over_what_is_taken() -> None:
    graph = read_graph('(x / tôi :a (y / "Tin" :b (z / 1900)) :c (w / Đi) :d (v / đó))')
    assert variable_names(graph) == ["t", "t2", "x", "đ", "đ2"]
    assert variable_names(graph, taken={"t", "đ2"}) == ["t2", "t3", "x", "đ", "đ3"]


@given(graph=graphs(), data=st.data())
@quick(80)
def test_a_graph_with_its_text_damaged_is_a_graph_or_malformed(graph: Node, data: st.DataObject) -> None:
    text = data.draw(damaged_text(as_drawn(graph, indent=data.draw(st.sampled_from(["", "    "]))), PIECES))
    for variables in (True, False):
        try:
            form = canonical(read_graph(text, variables=variables))
            assert read_graph(penman(form)) == form
        except MalformedGraph as malformed:
            assert malformed.line is None or 0 <= malformed.line <= text.count("\n")


LONG = (
    *("(", ")", '"', "\\", '\\"', '"\\', ":", "::", "/", "#", " ", "\n", "~e.1", ",1", "1:", "a", "a ", "(a"),
    *("(a / b", " :c", " :c d", " :c (d / e)", " :c #1", " #1", "\N{COMBINING CIRCUMFLEX ACCENT}", "/ ", "# "),
    *('" "', "()", " :c (d #1)", "\n---\n"),
)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("before", "repeated"),
    [
        *(("(a / b", each) for each in LONG),
        *(('(a / "', each) for each in LONG if each == "a" or {*each} & {'"', "\\"}),
    ],
)
def test_an_endless_completion_takes_linear_time(before: str, repeated: str) -> None:
    """Twenty-five thousand characters, of which the square would take minutes."""
    text = before + repeated * (25_000 // len(repeated))
    for answer_format in ANSWER_FORMATS:
        decode(text, answer_format)
        complete(text, answer_format)
