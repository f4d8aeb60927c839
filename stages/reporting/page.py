"""The comparison as one HTML file that needs nothing else: no network, no script, no other file.

Plots are drawn by matplotlib without pyplot and its global state, once in the colours of a light page and once in those
of a dark one; the page shows the one that fits the reader's display.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.text import Text

from stages.core.atomic import atomic_write
from stages.evaluation.statistics import Floats, Interval
from stages.reporting.compare import Comparison, Metric, interval_words
from stages.reporting.runs import FAILURE, Run
from stages.reporting.sections import (
    comparison_markdown,
    comparison_table,
    comparison_text,
    design_words,
    fairness,
    flat_costs,
    flat_metrics,
    origin_warnings,
    print_comparison,
    report_tables,
)
from stages.reporting.tables import cell_text, csv_text

TEMPLATE = "page.html"
MAX_IMAGE_WIDTH = 512
"""Pixels; wider images are scaled down, since a page has dozens."""
MAX_PNG_BYTES = 60_000
"""Larger images are stored as JPEG, which shrinks photographs tenfold."""
Theme: TypeAlias = Mapping[str, str]
"""Colours by name, of the page and of its plots; series-0, grey, is that of baselines."""
_COLOURS = ("card", "ink", "muted", "grid", "better", "worse", *(f"series-{number}" for number in range(8)))
_LIGHT = "ffffff 1d2129 5f6777 dfe3ea 15803d c02626 737b8c 2f6bd8 c2530a 0b8467 8b3fc0 9a7400 c22f6b 3d7890"
_DARK = "181c24 e8ebf1 a2abbb 2f3644 5fd38a ff8b87 98a1b3 7fabff ff9f5f 46d0aa cf98f5 e2bf45 ff8ab3 86c5df"
LIGHT, DARK = (
    {name: f"#{colour}" for name, colour in zip(_COLOURS, colours.split(), strict=True)} for colours in (_LIGHT, _DARK)
)
_DASHES: Any = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
WIDTH = 5.6
"""Inches of a plot; a page scales it."""
LABEL_LENGTH = 48
"""Characters of an interval's label that leave room for its figures in the same line."""
_CURVE_CAPTIONS = {
    "training loss": "Training loss as logged (faint) and smoothed. Losses of different masking do not compare.",
    "validation loss": "Loss while training, of samples that the model is not trained on.",
    "validation score": "Mean score of the completions of some of them.",
}
"""Captions, by the names of runs.CURVES."""


def style(theme: Theme) -> dict[Any, Any]:
    """Matplotlib's settings for plots of a theme."""
    return {
        "svg.hashsalt": "bakeoff",  # the same plot has the same bytes
        "svg.fonttype": "none",  # text, in a font of the reader's: a third of the size
        "text.parse_math": False,  # names are not formulas
        "font.size": 10,
        "axes.edgecolor": theme["grid"],
        "axes.labelcolor": theme["muted"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": theme["grid"],
        "grid.linewidth": 0.7,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.labelcolor": theme["ink"],
        "text.color": theme["ink"],
        "xtick.color": theme["muted"],
        "ytick.color": theme["muted"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }


Plot: TypeAlias = Callable[[Axes, Theme], None]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A plot as two data: URIs."""

    light: str
    dark: str
    caption: str
    description: str
    """Its text for screen readers."""


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    label: str
    value: float
    interval: Interval | None
    text: str
    """The figures, at the end of the row."""
    colour: str
    """Its name in a theme."""
    dots: tuple[float, ...] = ()
    """Values that `value` is the mean of, drawn below it."""


def write_report(comparison: Comparison, report_dir: Path, *, profile: str, console: Console) -> None:
    """Write the files of a report, and print its table."""
    written = {
        "table.txt": comparison_text(comparison),
        "comparison.md": comparison_markdown(comparison),
        "comparison.csv": csv_text(comparison_table(comparison)),
        "comparison.json": json.dumps(flat_metrics(comparison), indent=2) + "\n",
        "costs.json": json.dumps(flat_costs(comparison), indent=2) + "\n",
        "index.html": render_page(comparison, profile=profile),
    }
    for name, text in written.items():
        atomic_write(text, report_dir / name)
    print_comparison(comparison, console)
    console.print(Text(f"The whole report: {report_dir / 'index.html'}"), soft_wrap=True)


def render_page(comparison: Comparison, *, profile: str) -> str:
    """The whole page; names and texts are escaped, whatever they contain."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["cell_text"] = cell_text
    report, runs = comparison.report, comparison.runs
    # Grey for baselines, and for each recipe its own, whether or not others were run.
    recipes = itertools.cycle(f"series-{number}" for number in range(1, 8))
    colours = {each.name: next(recipes) if each.baseline else "series-0" for each in comparison.contenders}
    return environment.get_template(TEMPLATE).render(
        comparison=comparison,
        report=report,
        profile=profile,
        tables=report_tables(comparison),
        themes={"light": LIGHT, "dark": DARK},
        colours=colours,
        scores=_score_drawing(comparison, colours),
        differences=[plot for metric in report.measured if (plot := _difference_drawing(metric, comparison))],
        curves=_curve_drawings(runs, colours),
        galleries={run.name: _gallery(run) for run in runs if not report.shown and any(run.examples.values())},
        marked=_marked(runs) if report.shown else {},
        fairness=fairness(comparison),
        origin_warnings=origin_warnings(comparison.all_runs),
        design=design_words(comparison),
    )


def data_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def inline_image(path: Path) -> str:
    """A PNG file as a data: URI, scaled down and stored as JPEG if it is large."""
    with Image.open(path, formats=["PNG"]) as image:
        if image.width <= MAX_IMAGE_WIDTH and path.stat().st_size <= MAX_PNG_BYTES:
            return data_uri("image/png", path.read_bytes())
        shrunk, stored = image.convert("RGB"), io.BytesIO()
    shrunk.thumbnail((MAX_IMAGE_WIDTH, image.height), Image.Resampling.LANCZOS)
    # Without chroma subsampling: it would smear the thin red and green outlines.
    shrunk.save(stored, "JPEG", quality=85, subsampling=0)
    return data_uri("image/jpeg", stored.getvalue())


def _gallery(run: Run) -> dict[str, list[str]]:
    """The images of a run's examples by kind."""
    return {
        _heading(run, kind): [inline_image(path) for path in paths]
        for kind, examples in run.examples.items()
        if (paths := [path for path in examples.values() if path])
    }


def _heading(run: Run, kind: str) -> str:
    """A kind of examples; of a kind of failure, how many completions there are."""
    count = run.metrics.get(f"{FAILURE}{kind}")
    return kind if count is None else f"{kind.replace('_', ' ')}: {count} of {run.metrics['samples']}"


def _marked(runs: Sequence[Run]) -> dict[int, dict[str, str | None]]:
    """The samples that are an example of any run, the random ones first: the kinds with the runs' names, the images."""
    examples = [(run, kind) for run in runs for kind in run.examples]
    marked: dict[int, dict[str, str | None]] = {}
    for run, kind in sorted(examples, key=lambda each: each[1] != "random"):
        for sample, path in run.examples[kind].items():
            mark = kind if kind == "random" else f"{run.name}, {_heading(run, kind)}"
            marked.setdefault(sample, {})[mark] = inline_image(path) if path else None
    return marked


def drawing(plot: Plot, *, height: float, caption: str, description: str) -> Drawing:
    """A plot in both themes. height: in inches."""
    sources = []
    for theme in (LIGHT, DARK):
        stored = io.BytesIO()
        with mpl.rc_context(style(theme)):
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            plot(figure.add_subplot(), theme)
            figure.savefig(stored, format="svg", transparent=True, metadata={"Date": None})
        sources.append(data_uri("image/svg+xml", stored.getvalue()))
    return Drawing(light=sources[0], dark=sources[1], caption=caption, description=description)


def interval_drawing(
    rows: Sequence[IntervalRow], xlabel: str, *, reference: float | None = None, caption: str, description: str
) -> Drawing:
    wrapped = [replace(row, label=textwrap.fill(row.label, LABEL_LENGTH)) for row in rows]
    plot = partial(plot_intervals, rows=wrapped, xlabel=xlabel, reference=reference)
    values = "; ".join(f"{row.label} {row.text}" for row in rows)
    height = 0.75 + (0.28 + 0.17 * max(len(row.label.splitlines()) for row in wrapped)) * len(rows)
    return drawing(plot, height=height, caption=caption, description=f"{description}: {values}")


def _score_drawing(comparison: Comparison, colours: Mapping[str, str]) -> Drawing:
    primary = comparison.report.primary
    rows = [
        IntervalRow(
            label=contender.name,
            value=contender.score.mean,
            interval=contender.score.interval,
            text=f"{contender.score.mean:.3f}{interval_words(contender.score.interval)}",
            colour=colours[contender.name],
            dots=contender.score.by_training if comparison.over_seeds else (),
        )
        for contender in comparison.evaluated
    ]
    over_seeds = "each recipe, the mean over its seeds, with its 95% interval; a dot is one training."
    return interval_drawing(
        rows,
        primary.heading,
        caption=f"{primary.heading} of {over_seeds if comparison.over_seeds else 'each model with its 95% interval.'}",
        description=f"{primary.heading} and 95% interval",
    )


def _difference_drawing(metric: Metric, comparison: Comparison) -> Drawing | None:
    """A forest plot of the insights by a metric; None if none of them is decided."""
    primary = metric.key == comparison.report.primary.key
    rows = [
        IntervalRow(
            label=insight.topic,
            value=insight.difference.mean,
            interval=insight.difference.interval,
            text=f"{insight.difference.mean:+.3f}{interval_words(insight.difference.interval, sign='+')}",
            colour=insight.difference.verdict if insight.difference.verdict in ("better", "worse") else "muted",
        )
        for insight in comparison.insights
        if insight.difference and insight.metric.key == metric.key
    ]
    if not rows:
        return None
    words = comparison.report.primary_words if primary else metric.heading
    grouped = comparison.counts[1] and not metric.guard
    ahead = "Right" if metric.higher_is_better else "Left"
    return interval_drawing(
        rows,
        f"difference in {words}, paired by {'group' if grouped else 'sample'}",
        reference=0.0,
        caption="Each difference with its own 95% interval. "
        f"{ahead} of the dashed line the first of the pair is ahead. "
        "Coloured differences are significant after correcting for the number of questions.",
        description="Paired differences",
    )


def _curve_drawings(runs: Sequence[Run], colours: Mapping[str, str]) -> list[Drawing]:
    """A drawing of each curve that any run has."""
    drawings = []
    for figure, caption in _CURVE_CAPTIONS.items():
        curves = {run.name: run.curves[figure] for run in runs if figure in run.curves}
        if curves:
            smoothed = figure == "training loss"
            plot = partial(plot_curves, curves=curves, colours=colours, ylabel=figure, smoothed=smoothed)
            title = f"{figure.capitalize()} by optimizer step, one curve for each of {', '.join(curves)}"
            drawings.append(drawing(plot, height=3.2, caption=caption, description=title))
    return drawings


def plot_curves(
    axes: Axes, theme: Theme, *, curves: Mapping[str, Floats], colours: Mapping[str, str], ylabel: str, smoothed: bool
) -> None:
    """Curves by step: the points, or the logged values, faint, and a smoothed curve."""
    for (name, (steps, values)), dash in zip(curves.items(), itertools.cycle(_DASHES), strict=False):
        line: dict[str, Any] = {"color": theme[colours[name]], "linewidth": 1.9, "linestyle": dash, "label": name}
        if smoothed:
            axes.plot(steps, values, color=line["color"], linewidth=0.8, alpha=0.3)
            axes.plot(steps, smooth(values), **line)
        else:
            axes.plot(steps, values, marker="o", markersize=4, **line)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(ylabel)
    figure = axes.get_figure(root=True)
    assert figure is not None
    columns = max(1, min(3, 60 // max(map(len, curves))))  # what is wider than the figure is cut
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(curves) / columns))
    figure.legend(loc="outside lower center", ncols=columns, handlelength=2.6, columnspacing=1.4)


def plot_intervals(
    axes: Axes, theme: Theme, *, rows: Sequence[IntervalRow], xlabel: str, reference: float | None
) -> None:
    """A forest plot: per row a point and its interval, the label above.

    reference: position of a dashed line for no difference; None for no line.
    """
    axes.grid(visible=False, axis="y")
    if reference is not None:
        axes.axvline(reference, color=theme["muted"], linewidth=1.1, linestyle=(0, (4, 3)))
    write = partial(
        axes.annotate,
        xycoords=("axes fraction", "data"),
        xytext=(0, 8),
        textcoords="offset points",
        va="bottom",
        bbox={"facecolor": theme["card"], "edgecolor": "none", "pad": 1.0},
    )
    for index, row in enumerate(rows):
        colour = theme[row.colour]
        if row.interval is not None:
            axes.plot(
                [row.interval.low, row.interval.high], [index, index], color=colour, linewidth=2.4,
                solid_capstyle="butt", marker="|", markersize=8, markeredgewidth=1.6,
            )  # fmt: skip
        axes.plot(row.value, index, "o", color=colour, markersize=6.5)
        axes.plot(row.dots, [index + 0.17] * len(row.dots), "o", color=colour, markersize=3.5, alpha=0.6)
        write(row.label, (0, index), ha="left", color=theme["ink"])
        write(row.text, (1, index), ha="right", color=theme["muted"], fontsize=9)
    axes.set_ylim(len(rows) - 0.65, -0.8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.04)
    axes.set_xlabel(xlabel)


def smooth(values: Floats, share: float = 0.15) -> Floats:
    """Moving mean over about `share` of the curve, its window cut off at the ends; NaN if all of it is.

    values: (steps,). Returns (steps,).
    """
    half = int(len(values) * share / 2)
    windows = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return np.array([np.nanmean(window) if np.isfinite(window).any() else np.nan for window in windows])
