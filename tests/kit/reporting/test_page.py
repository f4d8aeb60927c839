from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stages.kit.reporting.compare import Contender
from stages.kit.reporting.page import (
    MAX_IMAGE_WIDTH,
    IntervalRow,
    contender_colours,
    inline_image,
    plot_intervals,
    plot_losses,
    plot_scores,
    share_at_least,
    smooth,
    svg,
    typeset,
)
from stages.kit.reporting.runs import Curve
from stages.kit.statistics import Interval
from tests import ROOT


def drawings() -> list[str]:
    rows = [
        IntervalRow(label="a <b>", value=0.1, interval=Interval(0.05, 0.2), text="+0.1", colour="better"),
        IntervalRow(label="one sample", value=-0.2, interval=None, text="-0.2", colour="muted"),
    ]
    curves = {name: Curve(np.arange(20.0), np.linspace(2, 1, 20)) for name in "ab"}
    scores = {"a": np.array([0.1, 0.5]), "b": np.array([0.0, 1.0])}
    colours = {"a": "series-1", "b": "series-2"}
    return [
        svg(plot_intervals(rows, "difference", reference=0.0), name="forest", title='a "<b>" & c'),
        svg(plot_losses(curves, colours), name="loss", title="loss"),
        svg(plot_scores(scores, colours, "IoU"), name="scores", title="scores"),
    ]


def test_drawings_are_well_formed_reproducible_and_in_colours_of_the_page() -> None:
    for drawing in drawings():
        ET.fromstring(drawing)
        assert not re.findall(r"#[0-9a-f]{6}\b", re.sub(r"var\(--[\w-]+, #\w+\)", "", drawing))
    assert drawings() == drawings()


def test_a_drawing_has_a_label_and_its_text_as_text() -> None:
    root = ET.fromstring(drawings()[0])
    assert (root.get("role"), root.get("aria-label")) == ("img", 'a "<b>" & c')
    texts = ["".join(element.itertext()) for element in root.iter() if element.tag == "text"]
    assert {"a <b>", "one sample", "+0.1"} <= set(texts)


def test_share_at_least_counts_the_threshold_itself() -> None:
    shares = share_at_least(np.array([0.0, 0.5, 0.5, 1.0]), np.array([0.0, 0.5, 0.51, 1.0]))
    assert shares.tolist() == [1.0, 0.75, 0.25, 0.25]


def test_smoothing_keeps_the_length_and_ignores_gaps() -> None:
    values = np.array([np.nan, *np.linspace(1, 0, 40), np.inf])
    smoothed = smooth(values)
    assert len(smoothed) == len(values)
    assert smoothed[20] == pytest.approx(values[20], abs=1e-9)
    assert np.isfinite(smoothed[0])


def test_a_page_is_drawn_without_pyplot_and_torch() -> None:
    unwanted = "('matplotlib.pyplot', 'torch', 'transformers')"
    probe = f"import sys, stages.compare; sys.exit(any(name in sys.modules for name in {unwanted}))"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0


def test_a_small_image_is_stored_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "small.png"
    Image.new("RGB", (30, 20), "red").save(path)
    image = inline_image(path, "an image")
    assert base64.b64decode(image.source.removeprefix("data:image/png;base64,")) == path.read_bytes()
    assert (image.width, image.height, image.description) == (30, 20, "an image")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L"])
def test_a_large_image_is_scaled_down_and_shrunk(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "large.png"
    noise = np.random.default_rng(0).integers(0, 255, (300, 1200, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)
    image = inline_image(path, "")
    assert image.source.startswith("data:image/jpeg;base64,")
    stored = Image.open(io.BytesIO(base64.b64decode(image.source.partition(",")[2])))
    assert stored.size == (image.width, image.height) == (MAX_IMAGE_WIDTH, 128)
    assert len(image.source) < path.stat().st_size


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("r4-joint by -0.1 [-0.2, +0.3].", "r4-joint by −0.1 [−0.2,\N{NO-BREAK SPACE}+0.3]."),
        ("v1-2 and x.-3", "v1-2 and x.-3"),
        ("no difference", "No difference"),
        ("not run", "Not run"),
        ("nox is best", "nox is best"),
    ],
)
def test_typesetting_keeps_names(words: str, shown: str) -> None:
    assert typeset(words) == shown


def test_a_recipe_keeps_its_colour_whether_or_not_others_were_run() -> None:
    contenders = [
        Contender(name="base", baseline=None, primary="score"),
        *(Contender(name=name, baseline="base", primary="score") for name in "abcdefgh"),
    ]
    colours = contender_colours(contenders)
    assert colours["base"] == "series-0"
    assert [colours[name] for name in "abgh"] == ["series-1", "series-2", "series-7", "series-1"]
