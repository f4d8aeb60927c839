from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from stages.kit.reporting import page as plots
from stages.kit.reporting.page import IntervalRow
from stages.kit.reporting.runs import Curve
from stages.kit.statistics import Interval
from tests import ROOT

CURVES = {
    "a": Curve(np.arange(20.0), np.linspace(2, 1, 20)),
    "b": Curve(np.arange(9.0), np.linspace(3, 1, 9)),
}
COLOURS = {"a": "series-1", "b": "series-2"}


def forest() -> str:
    rows = [
        IntervalRow(label="a <b>", value=0.1, interval=Interval(0.05, 0.2), text="+0.1", colour="better"),
        IntervalRow(label="one sample", value=-0.2, interval=None, text="-0.2", colour="muted"),
    ]
    return plots.svg(plots.plot_intervals(rows, "difference", reference=0.0), name="forest", title='a "<b>" & c')


def all_drawings() -> list[str]:
    scores = {"a": np.array([0.1, 0.5]), "b": np.array([0.0, 1.0])}
    return [
        forest(),
        plots.svg(plots.plot_losses(CURVES, COLOURS), name="loss", title="loss"),
        plots.svg(plots.plot_scores(scores, COLOURS, "IoU"), name="scores", title="scores"),
    ]


def test_drawings_are_well_formed() -> None:
    for drawing in all_drawings():
        ET.fromstring(drawing)


def test_drawings_are_named_for_those_who_cannot_see_them() -> None:
    root = ET.fromstring(forest())
    assert (root.get("role"), root.get("aria-label")) == ("img", 'a "<b>" & c')


def test_text_stays_text() -> None:
    texts = ["".join(element.itertext()) for element in ET.fromstring(forest()).iter() if element.tag == "text"]
    assert {"a <b>", "one sample", "+0.1"} <= set(texts)


def test_every_colour_can_be_redefined_by_the_page() -> None:
    for drawing in all_drawings():
        without_variables = re.sub(r"var\(--[\w-]+, #\w+\)", "", drawing)
        assert not re.findall(r"#[0-9a-f]{6}\b", without_variables)


def test_the_same_data_give_the_same_text() -> None:
    assert all_drawings() == all_drawings()


def test_share_at_least_counts_the_threshold_itself() -> None:
    shares = plots.share_at_least(np.array([0.0, 0.5, 0.5, 1.0]), np.array([0.0, 0.5, 0.51, 1.0]))
    assert shares.tolist() == [1.0, 0.75, 0.25, 0.25]


def test_smoothing_keeps_length_and_passes_over_gaps() -> None:
    values = np.array([np.nan, *np.linspace(1, 0, 40), np.inf])
    smoothed = plots.smooth(values)
    assert len(smoothed) == len(values)
    assert smoothed[20] == pytest.approx(values[20], abs=1e-9)
    assert np.isfinite(smoothed[0])


def test_a_page_is_drawn_without_pyplot_and_without_torch() -> None:
    unwanted = "('matplotlib.pyplot', 'torch', 'transformers')"
    probe = f"import sys, stages.compare; sys.exit(any(name in sys.modules for name in {unwanted}))"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0
