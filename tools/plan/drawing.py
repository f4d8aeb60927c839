"""A prediction drawn: a table with a bar to scale, and recipes by sizes of GPU. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from stages.kit.memory.budget import (
    LETTERS,
    apportion,
    entries,
    fact_lines,
    gib_text,
    spent_bytes,
    verdict,
    verdict_line,
)
from stages.kit.planning.prediction import BUDGET, Prediction, Verdict
from stages.kit.reporting.tables import Column, Row, Table, terminal_table

STYLES: dict[Verdict, str] = {"fits": "bold green", "too close": "bold yellow", "does not fit": "bold red"}

MAX_BAR_WIDTH = 100
"""Of the bar itself; on a wider terminal it would only be harder to read off."""
MIN_BAR_WIDTH = 12
"""Where the terminal leaves less beside the figures, the figures are left out."""


def budget_table(prediction: Prediction, capacity_bytes: int | None = None) -> RenderableType:
    """For `rich.console.Console.print`: the budget, the bar, and what follows from them.

    capacity_bytes: what can be used of the device; None where that is not known, and nothing is said of it then.
    Of several GPUs the fullest has the table, and each a bar.
    """
    facts = Text("\n".join(fact_lines(prediction, capacity_bytes)))
    if capacity_bytes is not None:
        facts.append(f"\n{verdict_line(prediction, capacity_bytes)}", STYLES[verdict(prediction, capacity_bytes)])
    bar = budget_bar(prediction, capacity_bytes)
    if prediction.gpus:
        bar = Group(*(_GpuBar(prediction, capacity_bytes, gpu) for gpu in range(len(prediction.gpus))))
    return Group(terminal_table(entries_table(prediction)), Text(), bar, Text(), facts)


def entries_table(prediction: Prediction) -> Table:
    """A row for each thing that memory is spent on, and the total."""
    columns = (
        *(Column("letter", ""), Column("budget", "Budget")),
        *(Column("gib", "GiB", ".2f"), Column("share", "Share", ".1%")),
    )
    *spent, total = entries(prediction)
    rows = [Row(cells=entry) for entry in spent]
    return Table(columns=columns, rows=(*rows, Row(cells=total, emphasised=True)))


def budget_bar(prediction: Prediction, capacity_bytes: int | None = None) -> RenderableType:
    """For `Console.print`: `bar_text` as wide as the terminal, and as the encoding of its output allows."""
    return _Bar(prediction, capacity_bytes)


def bar_text(
    prediction: Prediction,
    capacity_bytes: int | None = None,
    *,
    width: int = 80,
    ascii_only: bool = False,
    scale_bytes: int = 0,
) -> str:
    """The budget on one line of at most `width` characters, to scale: `W████D▓G▒O░░·····┃ 17.20 of 21.84 GiB`.

    Each entry is its letter and then its shade; one too small for a character is left out. The bar's end, or where the
    budget exceeds the capacity a place within it, is the limit. scale_bytes: at least this much for the whole bar, so
    that several can be compared.
    """
    shades, unused, limit = ("#=+-", ".", "|") if ascii_only else ("█▓▒░", "·", "┃")
    whole_bytes = max(prediction.total_bytes, capacity_bytes or 0, scale_bytes)
    figures = f" {gib_text(prediction.total_bytes):>{len(gib_text(scale_bytes)) if scale_bytes else 0}}"
    figures += " GiB" if capacity_bytes is None else f" of {gib_text(capacity_bytes)} GiB"
    if width < len(figures) + MIN_BAR_WIDTH:
        figures = ""
    num_cells = min(width - len(figures), MAX_BAR_WIDTH)
    if capacity_bytes is not None:
        num_cells -= 1  # the limit's own
    spent = spent_bytes(prediction)
    *shares, num_unused = apportion([*spent.values(), whole_bytes - prediction.total_bytes], max(num_cells, 0))
    shade = {entry: shades[index % len(shades)] for index, entry in enumerate(BUDGET)}
    bar = "".join(
        LETTERS[entry] + shade[entry] * (share - 1) for entry, share in zip(spent, shares, strict=True) if share
    )
    bar += unused * num_unused
    if capacity_bytes is not None:
        at = len(bar)
        if whole_bytes > capacity_bytes:
            # Rounded down: however small the excess, something is seen to lie behind the limit.
            at = len(bar) * capacity_bytes // whole_bytes
        bar = bar[:at] + limit + bar[at:]
    return (bar + figures)[: max(width, 0)]


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    verdict: Verdict
    predicted_bytes: int
    setting: str = ""
    """In a few words, the cheapest setting that fits; empty where the recipe fits as it is, or never."""


def matrix_table(rows: Mapping[str, Mapping[float, MatrixCell]]) -> Table:
    """Recipes by sizes of GPU in GB, for `terminal_table` or `markdown`; a missing one shows as absent.

    Cells have several lines: so five sizes fit 80 characters.
    """
    sizes = sorted({size for cells in rows.values() for size in cells})
    columns = (Column("recipe", "Recipe"), *(Column(f"{size:g}gb", f"{size:g} GB") for size in sizes))
    return Table(
        columns=columns,
        rows=tuple(
            Row(cells=(recipe, *(_matrix_text(cells[size]) if size in cells else None for size in sizes)))
            for recipe, cells in rows.items()
        ),
    )


@dataclass(frozen=True)
class _Bar:
    prediction: Prediction
    capacity_bytes: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = bar_text(self.prediction, self.capacity_bytes, width=options.max_width, ascii_only=options.ascii_only)
        yield Text(line, no_wrap=True)


@dataclass(frozen=True)
class _GpuBar:
    """One of several, all to the scale of the fullest, with its verdict."""

    prediction: Prediction
    capacity_bytes: int | None
    gpu: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        each, line = self.prediction.gpus[self.gpu], Text(f"GPU {self.gpu} ", no_wrap=True)
        judged = None if self.capacity_bytes is None else verdict(each, self.capacity_bytes)
        room = options.max_width - len(line) - (len("does not fit") + 1 if judged else 0)
        scale_bytes = max(self.prediction.total_bytes, self.capacity_bytes or 0)
        line.append(
            bar_text(each, self.capacity_bytes, width=room, ascii_only=options.ascii_only, scale_bytes=scale_bytes)
        )
        if judged:
            line.append(f" {judged}", STYLES[judged])
        yield line


def _matrix_text(cell: MatrixCell) -> str:
    return "\n".join(filter(None, (cell.verdict, f"{gib_text(cell.predicted_bytes)} GiB", cell.setting)))
