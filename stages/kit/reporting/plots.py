"""Figures of a report as SVG, without pyplot and its global state.

A figure is drawn in the colours of a light page. `svg` names each of them as a CSS variable with that colour
as its fallback, so a page can redefine them (for the dark) and the SVG alone still looks right. Text stays
text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.kit.reporting.runs import Curve
from stages.kit.statistics import Floats, Interval

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
_DASHES = (
    "solid",
    (0, (5, 1.5)),
    (0, (1.5, 1.2)),
    (0, (6, 1.5, 1.5, 1.5)),
    (0, (8, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are no formulas
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
WIDTH, HEIGHT = 5.6, 3.5  # inches; a page scales them


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    label: str
    value: float
    interval: Interval | None
    text: str
    """The figures in words, at the end of the row."""
    colour: str
    """A name of PALETTE."""
    dots: tuple[float, ...] = ()
    """Values that `value` is the mean of, drawn below it."""


def series_colour(index: int) -> str:
    """The palette name of the index-th recipe, counted from 0; the baseline has `series-0`."""
    return f"series-{1 + index % 7}"


def plot_losses(curves: Mapping[str, Curve], colours: Mapping[str, str]) -> Figure:
    """Training loss by step: what was logged, faint, and its smoothed course."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(WIDTH, HEIGHT)
        for index, (name, curve) in enumerate(curves.items()):
            colour = PALETTE[colours[name]]
            axes.plot(curve.steps, curve.values, color=colour, linewidth=0.8, alpha=0.3)
            axes.plot(
                curve.steps,
                smooth(curve.values),
                color=colour,
                linewidth=1.9,
                linestyle=_dash(index),
                label=name,
            )
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("training loss")
        _legend(figure)
    return figure


def plot_scores(scores: Mapping[str, Floats], colours: Mapping[str, str], heading: str) -> Figure:
    """For each model, the share of samples that score at least x: read off at 0.5, it is the share over 0.5.

    scores: by model, (samples,) in 0..1.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(WIDTH, HEIGHT)
        grid = np.linspace(0, 1, 201)
        for index, (name, values) in enumerate(scores.items()):
            axes.plot(
                grid,
                share_at_least(values, grid),
                color=PALETTE[colours[name]],
                linewidth=1.9,
                linestyle=_dash(index),
                label=name,
            )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set_xlabel(f"{heading} at least")
        axes.set_ylabel("share of samples")
        _legend(figure)
    return figure


def plot_intervals(rows: Sequence[IntervalRow], xlabel: str, *, reference: float | None = None) -> Figure:
    """A forest plot: per row a point and its interval, the label above.

    reference: where a dashed line stands for no difference.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(WIDTH, 0.75 + 0.45 * len(rows))
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
            _say(axes, row.label, index, at="left", color=PALETTE["ink"])
            _say(axes, row.text, index, at="right", color=PALETTE["muted"], fontsize=9)
        axes.set_ylim(len(rows) - 0.65, -0.8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.04)
        axes.set_xlabel(xlabel)
    return figure


def smooth(values: Floats, share: float = 0.15) -> Floats:
    """Moving mean over about `share` of the curve, its window cut off at the ends; NaN where all of it is.

    values: (steps,). Returns (steps,).
    """
    half = int(len(values) * share / 2)
    windows = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return np.array([np.nanmean(window) if np.isfinite(window).any() else np.nan for window in windows])


def share_at_least(values: Floats, grid: Floats) -> Floats:
    """Share of `values` (n,) that are at least each of `grid` (m,). Returns (m,)."""
    return 1 - np.searchsorted(np.sort(values), grid, side="left") / len(values)


def svg(figure: Figure, *, name: str, title: str) -> str:
    """An `<svg>` element to put in a page, with no reference outward.

    name:  prefix of its ids, so that several drawings fit one page.
    title: its text for those who cannot see it.
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


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _say(axes: Axes, text: str, row: int, *, at: Literal["left", "right"], **style: Any) -> None:
    """Words above a row, at one end of it; on the page's own ground, so that no line runs through them."""
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


def _dash(index: int) -> object:
    return _DASHES[index % len(_DASHES)]


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, handlelength=2.6, columnspacing=1.4)
