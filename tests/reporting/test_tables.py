from __future__ import annotations

import csv
import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stages.evaluation.statistics import Interval
from stages.reporting.tables import (
    Column,
    Row,
    Table,
    cell_text,
    csv_text,
    in_parts,
    markdown,
    terminal_table,
)

COLUMNS = (Column("model", "Model"), Column("score", "Score", ".2f"), Column("score", "95% interval", ".2f"))
TABLE = Table(
    columns=COLUMNS,
    rows=(
        Row(cells=("plain", 0.5, Interval(0.4, 0.6))),
        Row(cells=("top", 0.75, Interval(0.7, 0.8)), emphasised=True),
        Row(cells=("absent", None, None), note="not run: dvc repro evaluate@absent"),
    ),
)


def shown(table: Table, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(terminal_table(table))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_takes_names_as_text_and_folds_them() -> None:
    row = Row(cells=("[red]a-name[/red]-that-is-very-long", 0.5, None))
    text = shown(Table(columns=COLUMNS, rows=(row,)), width=30)
    assert "…" not in text
    assert "".join(line[:10].strip() for line in text.splitlines()[2:]).endswith("[red]a-name[/red]-that-is-very-long")


def test_markdown_escapes_markup_and_has_notes_below() -> None:
    text = markdown(TABLE)
    assert "| **top** | **0.75** | **\\[0.70, 0.80\\]** |" in text
    assert text.endswith("\n- absent: not run: dvc repro evaluate@absent\n")
    row = Row(cells=("a|b <script> *c* [d](e)\nf", 0.5, None))
    line = markdown(Table(columns=COLUMNS, rows=(row,))).splitlines()[2]
    assert line.startswith(r"| a\|b \<script\> \*c\* \[d\](e) f | 0.50 |")


def test_csv_keeps_full_precision_and_splits_intervals() -> None:
    table = Table(columns=COLUMNS, rows=(Row(cells=("x,y", 1 / 3, Interval(0.1, 2 / 3))), *TABLE.rows[2:]))
    header, first, absent = csv.reader(io.StringIO(csv_text(table)))
    assert header == ["model", "score", "score_low", "score_high", "note"]
    assert first[0] == "x,y"
    assert [float(value) for value in first[1:4]] == [1 / 3, 0.1, 2 / 3]
    assert absent == ["absent", "", "", "", "not run: dvc repro evaluate@absent"]


@pytest.mark.parametrize(
    ("value", "format", "text"),
    [
        (0.914, ".1%", "91.4%"),
        (1234567, ",", "1,234,567"),
        (15 * 2**20, "bytes", "15.0 MiB"),
        (59.97, "seconds", "1 min 00 s"),
        (7500, "seconds", "2 h 05 min"),
    ],
)
def test_formats_of_cells(value: float, format: str, text: str) -> None:  # noqa: A002 - as Column calls it
    assert cell_text(value, Column("", "", format)) == text


def test_a_table_that_only_its_headings_widen_is_not_split() -> None:
    columns = (Column("model", "Model"), Column("one", "In words", ".2f"), Column("two", "Two words", ".2f"))
    table = Table(columns=columns, rows=(Row(cells=("a model", 0.5, 0.5)),))
    assert in_parts(table, 28) == [table]
    assert len(in_parts(table, 20)) == 2
    for width in (21, 27):
        (part,) = in_parts(table, width)
        lines = shown(part).splitlines()
        assert [line.split() for line in lines[:2]] == [["In", "Two"], ["Model", "words", "words"]]
        assert max(map(len, lines)) == 21


@given(
    st.lists(st.tuples(st.text("abc", min_size=1, max_size=30), st.booleans()), min_size=1, max_size=12),
    st.integers(20, 120),
)
def test_a_wide_table_is_split_between_figures(made: list[tuple[str, bool]], width: int) -> None:
    columns = [Column("model", "Model")]
    for number, (heading, with_interval) in enumerate(made):
        columns += [Column(f"figure {number}", heading, ".2f")] * (2 if with_interval else 1)
    table = Table(columns=tuple(columns), rows=(Row(cells=("a model", *(float(i) for i in range(1, len(columns))))),))
    parts = in_parts(table, width)
    assert [column for part in parts for column in part.columns[1:]] == columns[1:]
    assert [cell for part in parts for cell in part.rows[0].cells[1:]] == list(table.rows[0].cells[1:])
    for part in parts:
        assert part.columns[0].key == "model"
        assert part.rows[0].cells[0] == "a model"
    for part, following in itertools.pairwise(parts):
        assert part.columns[-1].key != following.columns[1].key
        assert len(in_parts(part, width)) == 1
    for part in parts:
        if len({column.key for column in part.columns}) > 2:
            assert Console(width=1000).measure(terminal_table(part)).maximum <= width
