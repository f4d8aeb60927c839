import io

import numpy as np
import pytest
from PIL import Image

from stages.tasks.detection.samples import DetectionRecord
from stages.tasks.detection.scoring import MAX_WIDTH, PREDICTION_COLOUR, TRUTH_COLOUR, draw_prediction

TRUTH, PREDICTED = (0.1, 0.1, 0.5, 0.9), (0.6, 0.2, 0.9, 0.6)


def sample(width: int = 200, height: int = 100, image_id: str = "a") -> DetectionRecord:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(buffer, "PNG")
    return DetectionRecord(
        image_id=image_id,
        image=buffer.getvalue(),
        width=width,
        height=height,
        boxes=(TRUTH,),
        categories=("nutrition-table",),
        labels=("nutrition-table",),
    )


def row(iou: float, boxes: tuple[tuple[float, ...], ...] = (PREDICTED,)) -> dict[str, object]:
    return {"iou": iou, "valid": bool(boxes), "truth": [list(TRUTH)], "boxes": [list(box) for box in boxes]}


def extent(picture: Image.Image, colour: tuple[int, int, int], size: tuple[int, int]) -> tuple[float, ...]:
    """Where a colour lies, as x0 y0 x1 y1 in 0..1 of the sample below the caption."""
    pixels = np.asarray(picture)[-size[1] :]
    ys, xs = np.nonzero((pixels == colour).all(axis=2))
    return xs.min() / size[0], ys.min() / size[1], (xs.max() + 1) / size[0], (ys.max() + 1) / size[1]


def test_boxes_are_drawn_where_they_are_in_their_colours() -> None:
    picture = draw_prediction(sample(), row(0.0))
    assert extent(picture, TRUTH_COLOUR, (200, 100)) == pytest.approx(TRUTH, abs=0.011)
    assert extent(picture, PREDICTION_COLOUR, (200, 100)) == pytest.approx(PREDICTED, abs=0.011)


def test_truth_is_dashed_and_prediction_is_not() -> None:
    pixels = np.asarray(draw_prediction(sample(), row(0.0)))[-100:]
    assert 0.3 < (pixels[10, 20:100] == TRUTH_COLOUR).all(axis=1).mean() < 0.7
    assert (pixels[20, 120:180] == PREDICTION_COLOUR).all()


def test_both_show_where_they_coincide() -> None:
    pixels = np.asarray(draw_prediction(sample(), row(1.0, (TRUTH,))))[-100:]
    top = pixels[10, 20:100]
    assert {tuple(colour) for colour in top.tolist()} == {TRUTH_COLOUR, PREDICTION_COLOUR}


def test_large_picture_is_scaled_down_and_small_one_is_not() -> None:
    large, small = (draw_prediction(sample(*size), row(0.5)) for size in ((2048, 1024), (64, 64)))
    assert large.width == MAX_WIDTH
    assert large.height - 256 == small.height - 64, "a caption of the same height"
    assert small.width == 64
