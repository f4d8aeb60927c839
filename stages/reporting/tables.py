"""Tables for the terminal, for markdown and for CSV."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from stages.core.errors import bytes_text
from stages.evaluation.statistics import Interval

Cell = str | int | float | Interval | None
ABSENT = "–"


@dataclass(frozen=True)
class Column:
    key: str
    """Machine name, the heading of the CSV."""
    heading: str
    format: str = ""
    """A format specification (`.3f`, `.1%`, `,`), or `bytes` or `seconds` for a number of those."""

    @property
    def numeric(self) -> bool:
        return bool(self.format)


@dataclass(frozen=True, kw_only=True)
class Row:
    cells: tuple[Cell, ...]
    """One for each column; None for an empty cell."""
    emphasised: bool = False
    marked: frozenset[int] = frozenset()
    """Indices of cells that stand out."""
    note: str = ""
    """Shown below the table after the first cell; in CSV, the last column."""


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    lead: str = ""
    """Sentences that introduce it."""

    @classmethod
    def of(
        cls, columns: Iterable[Column | str], rows: Iterable[Sequence[Cell]], *, title: str = "", lead: str = ""
    ) -> Table:
        """A table of plain rows; a column of texts may be given by its heading alone."""
        headed = tuple(each if isinstance(each, Column) else Column(each, each) for each in columns)
        return cls(columns=headed, rows=tuple(Row(cells=tuple(cells)) for cells in rows), title=title, lead=lead)

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """(first cell, note) of the rows that have one."""
        return tuple((str(row.cells[0]), row.note) for row in self.rows if row.note)


def cell_text(cell: Cell, column: Column) -> str:
    """A cell formatted for its column."""
    if cell is None:
        return ABSENT
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Interval):
        return f"[{cell.low:{column.format}}, {cell.high:{column.format}}]"
    if column.format == "bytes":
        return bytes_text(cell)
    if column.format == "seconds":
        return seconds_text(cell)
    return format(cell, column.format)


def seconds_text(seconds: float) -> str:
    """9.4 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def terminal_table(table: Table) -> RichTable:
    """For `rich.console.Console.print`. Cells are text, never rich markup."""
    # Two blanks between columns (one of them from the box), so that a usual table fits 80 characters.
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        # A narrow terminal folds a name and never cuts it off.
        shown.add_column(Text(column.heading), justify="right" if column.numeric else "left", overflow="fold")
    for row in table.rows:
        texts = [Text(text) for text in _texts(table, row)]
        shown.add_row(*texts, style="bold green" if row.emphasised else None)
    return shown


def in_parts(table: Table, width: int) -> list[Table]:
    """The table, its columns split into several tables if it is more than `width` characters wide; or as one, with a
    line for each word of a heading, if that is enough.

    Every part begins with the first column. Columns of one key, a figure and its interval, stay together.
    """
    broken = [replace(column, heading=column.heading.replace(" ", "\n")) for column in table.columns]
    narrow, widths = replace(table, columns=tuple(broken)), _widths(table)
    if sum(widths) - 2 > width >= sum(_widths(narrow)) - 2:
        return [narrow]
    parts: list[list[int]] = [[]]
    for _, group in itertools.groupby(range(1, len(widths)), key=lambda index: table.columns[index].key):
        together = list(group)
        if parts[-1] and sum(widths[index] for index in (0, *parts[-1], *together)) - 2 > width:
            parts.append([])
        parts[-1] += together
    return [
        Table(
            columns=tuple(table.columns[index] for index in (0, *part)),
            rows=tuple(replace(row, cells=tuple(row.cells[index] for index in (0, *part))) for row in table.rows),
        )
        for part in parts
    ]


def _widths(table: Table) -> list[int]:
    """Characters of each column in a terminal, with the two blanks after it."""
    texts = [[column.heading for column in table.columns], *(_texts(table, row) for row in table.rows)]
    return [max(len(line) for text in column for line in text.split("\n")) + 2 for column in zip(*texts, strict=True)]


def markdown(table: Table) -> str:
    """A GitHub table, emphasised rows and marked cells bold, the notes listed below it."""
    lines = [
        _markdown_line([escape_markdown(column.heading) for column in table.columns]),
        _markdown_line(["---:" if column.numeric else "---" for column in table.columns]),
    ]
    for row in table.rows:
        texts = [escape_markdown(text) for text in _texts(table, row)]
        bold = range(len(texts)) if row.emphasised else row.marked
        lines.append(_markdown_line([f"**{text}**" if text and i in bold else text for i, text in enumerate(texts)]))
    if table.notes:
        lines += ["", *(f"- {escape_markdown(name)}: {escape_markdown(note)}" for name, note in table.notes)]
    return "\n".join(lines) + "\n"


def csv_text(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_rows(table))
    return text.getvalue()


def csv_rows(table: Table) -> list[list[str | int | float | None]]:
    """Machine names, then full-precision numbers; an interval becomes two columns, KEY_low and KEY_high."""
    intervals = {index for row in table.rows for index, cell in enumerate(row.cells) if isinstance(cell, Interval)}
    header: list[str | int | float | None] = []
    for index, column in enumerate(table.columns):
        header += [f"{column.key}_low", f"{column.key}_high"] if index in intervals else [column.key]
    rows = [[*header, "note"]]
    for row in table.rows:
        values: list[str | int | float | None] = []
        for index, cell in enumerate(row.cells):
            if isinstance(cell, Interval):
                values += [cell.low, cell.high]
            else:
                values += [cell, None] if index in intervals else [cell]
        rows.append([*values, row.note or None])
    return rows


def escape_markdown(text: str) -> str:
    """Text on one line with the special characters of markdown escaped; an underscore within a word needs none."""
    return re.sub(r"([\\|<>*`\[\]]|\b_|_\b)", r"\\\1", " ".join(text.split()))


def _texts(table: Table, row: Row) -> Sequence[str]:
    return [cell_text(cell, column) for cell, column in zip(row.cells, table.columns, strict=True)]


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
