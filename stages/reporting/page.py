"""The comparison as one HTML file that needs nothing else: no network, no script, no other file.

Figures are drawn by matplotlib without pyplot and its global state, in the colours of a light page. `svg` replaces each
colour by a CSS variable with the colour as its fallback, so that the page can redefine it for a dark display.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.text import Text

from stages.core.records import publish_text
from stages.evaluation.statistics import Floats, Interval
from stages.reporting.compare import Comparison, Contender, Metric, interval_words
from stages.reporting.runs import FAILURE, Curve, Run
from stages.reporting.sections import (
    comparison_markdown,
    comparison_table,
    comparison_text,
    cost_table,
    design_words,
    evidence_table,
    flat_costs,
    flat_metrics,
    memory_table,
    origin_warnings,
    origins_table,
    plan_settings,
    print_comparison,
    quantization_table,
    split_settings,
    trainable_table,
)
from stages.reporting.tables import cell_text, csv_text

TEMPLATE = "page.html"
MAX_IMAGE_WIDTH = 512
"""Pixels; wider images are scaled down, since a page has dozens."""
MAX_PNG_BYTES = 60_000
"""Larger images are stored as JPEG, which shrinks photographs tenfold."""
PALETTE = {
    "card": "#ffffff",
    "ink": "#1d2129",
    "muted": "#5f6777",
    "grid": "#dfe3ea",
    "better": "#15803d",
    "worse": "#c02626",
    "series-0": "#737b8c",  # grey: the baseline
    "series-1": "#2f6bd8",
    "series-2": "#c2530a",
    "series-3": "#0b8467",
    "series-4": "#8b3fc0",
    "series-5": "#9a7400",
    "series-6": "#c22f6b",
    "series-7": "#3d7890",
}
_DASHES: Any = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are not formulas
    "font.family": ["sans-serif"],
    "font.size": 10,
    "axes.edgecolor": PALETTE["grid"],
    "axes.labelcolor": PALETTE["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": PALETTE["grid"],
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.labelcolor": PALETTE["ink"],
    "text.color": PALETTE["ink"],
    "xtick.color": PALETTE["muted"],
    "ytick.color": PALETTE["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
WIDTH = 5.6  # inches; a page scales it
_CURVE_CAPTIONS = {
    "training loss": "Training loss as logged (faint) and smoothed. Losses of different masking do not compare.",
    "validation loss": "Loss while training, of samples that the model is not trained on.",
    "validation score": "Mean score of the answers to some of them.",
}
"""Captions, by the names of runs.CURVES."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    svg: Markup
    caption: str


@dataclass(frozen=True, kw_only=True)
class InlineImage:
    source: str
    """A data: URI."""
    width: int
    height: int
    description: str


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    label: str
    value: float
    interval: Interval | None
    text: str
    """The figures, at the end of the row."""
    colour: str
    """A name of PALETTE."""
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
        publish_text(text, report_dir / name)
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
    trained = [run for run in runs if run.plan]
    colours = contender_colours(comparison.contenders)
    differing, outstanding, shared = split_settings({run.name: plan_settings(run.plan) for run in trained if run.plan})
    return environment.get_template(TEMPLATE).render(
        comparison=comparison,
        report=report,
        profile=profile,
        table=comparison_table(comparison),
        palette=PALETTE,
        colours=colours,
        scores=_score_drawing(comparison, colours),
        differences=[drawing for metric in report.measured if (drawing := _difference_drawing(metric, comparison))],
        curves=_curve_drawings(runs, colours),
        galleries={run.name: _gallery(run) for run in runs if any(run.examples.values())},
        differing=differing,
        outstanding=outstanding,
        shared=shared,
        trainable=trainable_table(trained),
        costs=cost_table(runs),
        quantization=quantization_table(runs, report.primary),
        memory=memory_table(runs),
        origins=origins_table(runs),
        origin_warnings=origin_warnings(comparison.all_runs),
        evidence=evidence_table(comparison),
        design=design_words(comparison),
    )


def contender_colours(contenders: Sequence[Contender]) -> dict[str, str]:
    """Palette names: grey for baselines, and for each recipe its own, whether or not others were run."""
    recipes = itertools.cycle(range(1, 8))
    return {each.name: "series-0" if each.baseline is None else f"series-{next(recipes)}" for each in contenders}


def inline_image(path: Path, description: str) -> InlineImage:
    """An image file as a data: URI, scaled down and stored as JPEG if it is large."""
    with Image.open(path, formats=["PNG", "JPEG"]) as image:
        size, media_type, content = image.size, "image/png", path.read_bytes()
        if image.width > MAX_IMAGE_WIDTH or len(content) > MAX_PNG_BYTES or image.format != "PNG":
            scale = min(1.0, MAX_IMAGE_WIDTH / image.width)
            size = round(image.width * scale), round(image.height * scale)
            stored = io.BytesIO()
            # Without chroma subsampling: it would smear the thin red and green outlines.
            image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(stored, "JPEG", quality=85, subsampling=0)
            media_type, content = "image/jpeg", stored.getvalue()
    source = f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
    return InlineImage(source=source, width=size[0], height=size[1], description=description)


def _gallery(run: Run) -> dict[str, list[InlineImage]]:
    """The examples of a run by kind, and how many answers there are of each kind of failure."""

    def heading(kind: str) -> str:
        count = run.metrics.get(f"{FAILURE}{kind}")
        return kind if count is None else f"{kind.replace('_', ' ')}: {count} of {run.metrics['samples']}"

    return {
        heading(kind): [inline_image(path, f"{run.name}, {path.stem.replace('-', ' ')}") for path in paths]
        for kind, paths in run.examples.items()
        if paths
    }


def _drawing(figure: Figure, name: str, caption: str, description: str) -> Drawing:
    return Drawing(svg=Markup(svg(figure, name=name, title=description)), caption=caption)


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
    return _drawing(
        plot_intervals(rows, primary.heading),
        "scores",
        f"{primary.heading} of {over_seeds if comparison.over_seeds else 'each model with its 95% interval.'}",
        f"{primary.heading} and 95% interval: " + "; ".join(f"{row.label} {row.text}" for row in rows),
    )


def _difference_drawing(metric: Metric, comparison: Comparison) -> Drawing | None:
    """A forest plot of the insights by a metric; None if none of them has an answer."""
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
    ahead = "Right" if metric.higher_is_better else "Left"
    return _drawing(
        plot_intervals(rows, f"difference in {words}, paired by sample", reference=0.0),
        "differences" if primary else f"differences-{metric.key}",
        f"Each difference with its own 95% interval. {ahead} of the dashed line the first of the pair is ahead. "
        "Coloured differences are significant after correcting for the number of questions.",
        "Paired differences: " + "; ".join(f"{row.label} {row.text}" for row in rows),
    )


def _curve_drawings(runs: Sequence[Run], colours: Mapping[str, str]) -> list[Drawing]:
    """A drawing of each curve that any run has."""
    drawings = []
    for figure, caption in _CURVE_CAPTIONS.items():
        curves = {run.name: run.curves[figure] for run in runs if figure in run.curves}
        if curves:
            title = f"{figure.capitalize()} by optimizer step, one curve for each of {', '.join(curves)}"
            plot = plot_curves(curves, colours, figure, smoothed=figure == "training loss")
            drawings.append(_drawing(plot, figure.replace(" ", "-"), caption, title))
    return drawings


def plot_curves(curves: Mapping[str, Curve], colours: Mapping[str, str], figure_name: str, *, smoothed: bool) -> Figure:
    """A figure by step: the points, or the logged values, faint, and a smoothed curve."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(3.5)
        for index, (name, curve) in enumerate(curves.items()):
            colour, dash = PALETTE[colours[name]], _DASHES[index % len(_DASHES)]
            if smoothed:
                axes.plot(curve.steps, curve.values, color=colour, linewidth=0.8, alpha=0.3)
            values, marker = (smooth(curve.values), None) if smoothed else (curve.values, "o")
            axes.plot(
                curve.steps,
                values,
                color=colour,
                linewidth=1.9,
                linestyle=dash,
                marker=marker,
                markersize=4,
                label=name,
            )
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(figure_name)
        figure.legend(loc="outside lower center", ncols=3, fontsize=9, handlelength=2.6, columnspacing=1.4)
    return figure


def plot_intervals(rows: Sequence[IntervalRow], xlabel: str, *, reference: float | None = None) -> Figure:
    """A forest plot: per row a point and its interval, the label above.

    reference: position of a dashed line for no difference.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(0.75 + 0.45 * len(rows))
        axes.grid(visible=False, axis="y")
        if reference is not None:
            axes.axvline(reference, color=PALETTE["muted"], linewidth=1.1, linestyle=(0, (4, 3)))
        for index, row in enumerate(rows):
            colour = PALETTE[row.colour]
            if row.interval is not None:
                axes.plot(
                    [row.interval.low, row.interval.high], [index, index], color=colour, linewidth=2.4,
                    solid_capstyle="butt", marker="|", markersize=8, markeredgewidth=1.6,
                )  # fmt: skip
            axes.plot(row.value, index, "o", color=colour, markersize=6.5)
            axes.plot(row.dots, [index + 0.17] * len(row.dots), "o", color=colour, markersize=3.5, alpha=0.6)
            _write(axes, row.label, index, at="left", color=PALETTE["ink"])
            _write(axes, row.text, index, at="right", color=PALETTE["muted"], fontsize=9)
        axes.set_ylim(len(rows) - 0.65, -0.8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.04)
        axes.set_xlabel(xlabel)
    return figure


def smooth(values: Floats, share: float = 0.15) -> Floats:
    """Moving mean over about `share` of the curve, its window cut off at the ends; NaN if all of it is.

    values: (steps,). Returns (steps,).
    """
    half = int(len(values) * share / 2)
    windows = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return np.array([np.nanmean(window) if np.isfinite(window).any() else np.nan for window in windows])


def svg(figure: Figure, *, name: str, title: str) -> str:
    """An `<svg>` element for a page, without references to other files.

    name:  prefix of its ids, so that several drawings fit one page.
    title: its text for screen readers.
    The same figure gives the same text, so that a report only changes with its data.
    """
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    # Inside HTML these namespaces are implied, and the plain href is understood.
    drawn = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", drawn).replace("xlink:href", "href")
    drawn = re.sub(r'\bid="', f'id="{name}-', drawn)
    drawn = re.sub(r'(url\(|href=")#', rf"\1#{name}-", drawn)
    box = drawn[drawn.index('viewBox="') :].split('"', 2)[1]
    drawn = f'<svg viewBox="{box}" role="img" aria-label="{escape(title, quote=True)}">' + drawn[drawn.index(">") + 1 :]
    for variable, colour in PALETTE.items():
        drawn = drawn.replace(colour, f"var(--{variable}, {colour})")
    return drawn.strip()


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _write(axes: Axes, text: str, row: int, *, at: Literal["left", "right"], **style: Any) -> None:
    """Write text above a row, at one end of it, on the page's own background, so that no line runs through it."""
    axes.annotate(
        text,
        (0 if at == "left" else 1, row),
        xycoords=("axes fraction", "data"),
        xytext=(0, 8),
        textcoords="offset points",
        ha=at,
        va="bottom",
        bbox={"facecolor": PALETTE["card"], "edgecolor": "none", "pad": 1.0},
        **style,
    )
