from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stages.kit.reporting.compare import Contender
from stages.kit.reporting.page import MAX_IMAGE_WIDTH, contender_colours, inline_image, typeset


def decoded(source: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))


def test_a_small_picture_is_stored_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "small.png"
    Image.new("RGB", (30, 20), "red").save(path)
    picture = inline_image(path, "a picture")
    assert base64.b64decode(picture.source.removeprefix("data:image/png;base64,")) == path.read_bytes()
    assert (picture.width, picture.height, picture.description) == (30, 20, "a picture")


def test_a_large_picture_is_scaled_down_and_shrunk(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    noise = np.random.default_rng(0).integers(0, 255, (300, 1200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    picture = inline_image(path, "a picture")
    assert picture.source.startswith("data:image/jpeg;base64,")
    assert decoded(picture.source).size == (picture.width, picture.height) == (MAX_IMAGE_WIDTH, 128)
    assert len(picture.source) < path.stat().st_size


@pytest.mark.parametrize("mode", ["RGBA", "P", "L"])
def test_every_kind_of_png_can_be_shrunk(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "odd.png"
    Image.new("RGB", (1000, 50), "red").convert(mode).save(path)
    assert decoded(inline_image(path, "").source).size[0] == MAX_IMAGE_WIDTH


def test_figures_stay_on_one_line_and_names_keep_their_hyphens() -> None:
    assert typeset("r4-joint by -0.1 [-0.2, +0.3].") == "r4-joint by −0.1 [−0.2,\N{NO-BREAK SPACE}+0.3]."
    assert typeset("v1-2 and x.-3") == "v1-2 and x.-3"
    assert [typeset(words) for words in ("no difference", "not run", "nox is best")] == [
        "No difference",
        "Not run",
        "nox is best",
    ]


def test_a_recipe_keeps_its_colour_whether_or_not_others_were_run() -> None:
    contenders = [
        Contender(name="base", baseline=None, runs=(), primary="score"),
        *(Contender(name=name, baseline="base", runs=(), primary="score") for name in "abcdefgh"),
    ]
    colours = contender_colours(contenders)
    assert colours["base"] == "series-0"
    assert [colours[name] for name in "abgh"] == ["series-1", "series-2", "series-7", "series-1"]
