from __future__ import annotations

import base64
import io
import itertools
import re
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from stages.evaluation.statistics import Interval
from stages.reporting import page
from stages.reporting.page import (
    DARK,
    LIGHT,
    MAX_IMAGE_WIDTH,
    Drawing,
    IntervalRow,
    Plot,
    drawing,
    inline_image,
    interval_drawing,
    plot_curves,
    plot_intervals,
)


def drawings() -> list[Drawing]:
    rows = [
        IntervalRow(label="a <b>", value=0.1, interval=Interval(0.05, 0.2), text="+0.1", colour="better"),
        IntervalRow(label="one sample", value=-0.2, interval=None, text="-0.2", colour="muted"),
    ]
    curves = {name: np.stack([np.arange(20.0), np.linspace(2, 1, 20)]) for name in "ab"}
    colours = {"a": "series-1", "b": "series-2"}
    plots: list[Plot] = [
        partial(plot_intervals, rows=rows, xlabel="difference", reference=0.0),
        *(
            partial(plot_curves, curves=curves, colours=colours, ylabel="a $loss$", smoothed=each)
            for each in (False, True)
        ),
    ]
    return [drawing(plot, height=3, caption="", description="") for plot in plots]


def test_drawings_are_reproducible_and_in_the_colours_of_each_theme() -> None:
    for each in drawings():
        for source, theme in ((each.light, LIGHT), (each.dark, DARK)):
            drawn = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()
            ET.fromstring(drawn)
            assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= set(theme.values())
    assert drawings() == drawings()


LONG = [f"recipes.r{number}-llm-only.learning_rate=0.0002, seed=3" for number in range(8)]
LONG += ["a-recipe-with-a-name-of-many-words against another-recipe-with-a-name-of-many-words", "x" * 100]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    drawn: list[Figure] = []

    def figure(**options: Any) -> Figure:
        drawn.append(Figure(**options))
        return drawn[-1]

    monkeypatch.setattr(page, "Figure", figure)
    return drawn


def test_long_labels_cover_no_figures(figures: list[Figure]) -> None:
    rows = [
        IntervalRow(label=label, value=0.1, interval=Interval(0.05, 0.2), text="+0.100 [+0.050, +0.200]", colour="ink")
        for label in LONG[-3:]
    ]
    shown = interval_drawing(rows, "difference", caption="", description="Paired differences")
    assert all(row.label in shown.description for row in rows)
    for figure in figures:
        figure.draw_without_rendering()
        extents = [text.get_window_extent() for text in figure.axes[0].texts]
        assert not [one for one, other in itertools.combinations(extents, 2) if one.overlaps(other)]
        assert all(figure.bbox.contains(*corner) for extent in extents for corner in extent.corners())


def test_a_legend_of_long_names_leaves_the_curves_their_room(figures: list[Figure]) -> None:
    curves = {name: np.stack([np.arange(20.0), np.linspace(2, 1, 20)]) for name in LONG}
    for names in (LONG[:1], LONG[:8]):
        some, colours = {name: curves[name] for name in names}, dict.fromkeys(names, "ink")
        plot = partial(plot_curves, curves=some, colours=colours, ylabel="loss", smoothed=False)
        drawing(plot, height=3.2, caption="", description="")
    one, *_, eight = (figure.axes[0].get_window_extent().height for figure in figures)
    assert eight > 0.9 * one


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L"])
def test_a_large_image_is_scaled_down_and_shrunk(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "large.png"
    noise = np.random.default_rng(0).integers(0, 255, (300, 1200, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)
    source = inline_image(path)
    assert source.startswith("data:image/jpeg;base64,")
    stored = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert stored.size == (MAX_IMAGE_WIDTH, 128)
    assert len(source) < path.stat().st_size
