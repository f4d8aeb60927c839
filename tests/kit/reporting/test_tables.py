from __future__ import annotations

import csv
import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stages.core.errors import bytes_text
from stages.kit.reporting.tables import (
    Column,
    Row,
    Table,
    cell_text,
    csv_text,
    in_parts,
    markdown,
    seconds_text,
    terminal_table,
)
from stages.kit.statistics import Interval

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


def test_terminal_shows_every_row_and_what_is_absent() -> None:
    lines = shown(TABLE).splitlines()
    assert lines[0].split() == ["Model", "Score", "95%", "interval"]
    assert lines[2].split() == ["plain", "0.50", "[0.40,", "0.60]"]
    assert lines[4].split() == ["absent", "–", "–"]


def test_terminal_takes_names_as_text_not_as_markup() -> None:
    row = Row(cells=("[red]name[/red]", 0.5, None))
    assert "[red]name[/red]" in shown(Table(columns=COLUMNS, rows=(row,)))


def test_a_narrow_terminal_folds_names_and_never_cuts_them() -> None:
    row = Row(cells=("a-recipe-with-a-very-long-name", 0.5, None))
    text = shown(Table(columns=COLUMNS, rows=(row,)), width=30)
    assert "…" not in text
    assert "".join(line[:10].strip() for line in text.splitlines()[2:]).endswith("a-recipe-with-a-very-long-name")


def test_markdown_has_bold_best_row_and_notes_below() -> None:
    text = markdown(TABLE)
    assert "| **top** | **0.75** | **\\[0.70, 0.80\\]** |" in text
    assert text.endswith("\n- absent: not run: dvc repro evaluate@absent\n")


def test_markdown_escapes_what_would_be_markup() -> None:
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


def test_a_row_has_as_many_cells_as_the_table_has_columns() -> None:
    with pytest.raises(AssertionError, match="short"):
        Table(columns=COLUMNS, rows=(Row(cells=("short",)),))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (15 * 2**20, "15.0 MiB"), (300 * 2**30, "300 GiB"),
        (3 * 2**40, "3.00 TiB"),
    ],
)  # fmt: skip
def test_bytes_in_words(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9.44, "9.4 s"),
        (59.97, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_formats_of_cells() -> None:
    assert cell_text(0.914, Column("", "", ".1%")) == "91.4%"
    assert cell_text(1234567, Column("", "", ",")) == "1,234,567"
    assert cell_text(2**30, Column("", "", "bytes")) == "1.00 GiB"
    assert cell_text(61, Column("", "", "seconds")) == "1 min 01 s"


@given(
    st.lists(st.tuples(st.text("abc", min_size=1, max_size=30), st.booleans()), min_size=1, max_size=12),
    st.integers(20, 120),
)
def test_a_wide_table_comes_in_parts_with_every_column_once_and_a_figure_beside_its_interval(
    made: list[tuple[str, bool]], width: int
) -> None:
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
