from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stages.evaluation.statistics import Interval
from stages.reporting.page import (
    DARK,
    LIGHT,
    MAX_IMAGE_WIDTH,
    Drawing,
    IntervalRow,
    Plot,
    drawing,
    inline_image,
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
