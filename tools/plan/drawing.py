"""A prediction drawn: a table with a bar to scale, and recipes by sizes of GPU. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Sequence
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
from tools.plan.recipe_memory import RecipeMemory

STYLES: dict[Verdict, str] = {"fits": "bold green", "too close": "bold yellow", "does not fit": "bold red"}
MAX_BAR_WIDTH, MIN_BAR_WIDTH = 100, 12
"""A longer bar would be harder to read off; where less is left beside the figures, these are left out."""


def budget_table(prediction: Prediction, capacity_bytes: int | None = None) -> RenderableType:
    """The budget, the bar, and what follows from them; of several GPUs, the fullest has the table and each a bar.

    capacity_bytes: usable memory of the device; None where it is not known, and nothing is said of it then.
    """
    columns = (
        *(Column("letter", ""), Column("budget", "Budget")),
        *(Column("gib", "GiB", ".2f"), Column("share", "Share", ".1%")),
    )
    *spent, total = (Row(cells=entry) for entry in entries(prediction))
    table = Table(columns=columns, rows=(*spent, Row(cells=total.cells, emphasised=True)))
    bars = [BudgetBar(prediction, capacity_bytes)]
    if prediction.gpus:
        scale_bytes = max(prediction.total_bytes, capacity_bytes or 0)
        bars = [BudgetBar(each, capacity_bytes, n, scale_bytes) for n, each in enumerate(prediction.gpus)]
    facts = Text("\n".join(fact_lines(prediction, capacity_bytes)))
    if capacity_bytes is not None:
        facts.append(f"\n{verdict_line(prediction, capacity_bytes)}", STYLES[verdict(prediction, capacity_bytes)])
    return Group(terminal_table(table), Text(), *bars, Text(), facts)


@dataclass(frozen=True)
class BudgetBar:
    """`bar_text` as the terminal's width and encoding allow; for one of several GPUs with its number and verdict."""

    prediction: Prediction
    capacity_bytes: int | None
    gpu: int | None = None
    scale_bytes: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name, judged = "" if self.gpu is None else f"GPU {self.gpu} ", None
        if name and self.capacity_bytes is not None:
            judged = verdict(self.prediction, self.capacity_bytes)
        width = options.max_width - len(name) - (len(" does not fit") if judged else 0)
        bar = bar_text(
            self.prediction,
            self.capacity_bytes,
            width=width,
            ascii_only=options.ascii_only,
            scale_bytes=self.scale_bytes,
        )
        line = Text(name + bar, no_wrap=True)
        if judged:
            line.append(f" {judged}", STYLES[judged])
        yield line


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
    num_cells = min(width - len(figures), MAX_BAR_WIDTH) - (capacity_bytes is not None)  # the limit takes one
    spent = spent_bytes(prediction)
    *shares, num_unused = apportion([*spent.values(), whole_bytes - prediction.total_bytes], max(num_cells, 0))
    shade = {entry: shades[index % len(shades)] for index, entry in enumerate(BUDGET)}
    drawn = (LETTERS[entry] + shade[entry] * (share - 1) for entry, share in zip(spent, shares, strict=True) if share)
    bar = "".join(drawn) + unused * num_unused
    if capacity_bytes is not None:
        # Rounded down: however small the excess, something is seen to lie behind the limit.
        at = len(bar) * min(capacity_bytes, whole_bytes) // max(whole_bytes, 1)
        bar = bar[:at] + limit + bar[at:]
    return (bar + figures)[: max(width, 0)]


def matrix_table(answers: Sequence[RecipeMemory]) -> Table:
    """Recipes by sizes of GPU, each with the cheapest setting that fits. Cells have several lines: five sizes fit 80
    characters."""
    sizes = sorted({answer.memory_gb for answer in answers if answer.memory_gb is not None})
    cells = {(answer.recipe, answer.memory_gb): _cell(answer) for answer in answers}
    return Table(
        columns=(Column("recipe", "Recipe"), *(Column(f"{size:g}gb", f"{size:g} GB") for size in sizes)),
        rows=tuple(
            Row(cells=(recipe, *(cells.get((recipe, size)) for size in sizes)))
            for recipe in dict.fromkeys(answer.recipe for answer in answers)
        ),
    )


def _cell(answer: RecipeMemory) -> str:
    cheapest = answer.cheapest
    if cheapest is None:
        return f"{answer.memory.verdict}\n{answer.memory.total_gib:.2f} GiB"
    # The accumulation follows from the micro-batch.
    changed = [
        f"{name} {value}"
        for name, value in cheapest.settings.items()
        if value != answer.settings[name] and name != "grad_accumulation" and cheapest.verdict != "does not fit"
    ]
    return "\n".join(filter(None, (cheapest.verdict, f"{cheapest.total_gib:.2f} GiB", ",\n".join(changed))))
