import hashlib
import io
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import ExifTags, Image, ImageEnhance, ImageFile, ImageFilter, ImageOps

from stages.data import given_images as images
from stages.data.given_images import MAX_IMAGE_PIXELS, MAX_SCANS, num_scans, parse_image
from stages.data.images import ImageRecord
from stages.data.near import Description, describe_image, near_duplicates
from tests import ROOT
from tests.data.images import bomb, patch_jpeg, png


def parsed(image: bytes) -> ImageRecord:
    fields, problems = parse_image("a", image, MAX_IMAGE_PIXELS)
    assert not problems
    return ImageRecord(**fields)


def problems(image: Any, max_pixels: int = MAX_IMAGE_PIXELS, image_id: Any = "a") -> list[str]:
    return parse_image(image_id, image, max_pixels)[1]


def saved(form: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (40, 30)).save(buffer, form, **options)
    return buffer.getvalue()


def animated(form: str) -> bytes:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, form, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA"])
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3])
def test_a_transparent_image_is_on_white(mode: str, form: str, orientation: int) -> None:
    image = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    image.paste((200, 0, 0, 255), (20, 15, 40, 30))
    image.paste((0, 0, 0, 128), (0, 15, 20, 30))
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    (image if form == "WEBP" or mode == "PA" else image.convert(mode)).save(buffer, form, exif=exif, **options)
    record = parsed(buffer.getvalue())
    colours = [record.open_image().getpixel(place) for place in ((2, 2), (38, 28), (2, 28))]
    if orientation == 3:
        colours = [record.open_image().getpixel(place) for place in ((37, 27), (1, 1), (37, 1))]
    assert np.abs(np.array(colours[0]) - 255).max() < 3
    assert np.array(colours[1])[1:].mean() < 100
    assert np.abs(np.array(colours[2]) - 127).max() < 4 or mode == "P"


def test_an_opaque_image_is_the_same_with_and_without_an_alpha_channel() -> None:
    colours = np.random.default_rng(7).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for image in (Image.fromarray(colours), Image.fromarray(colours).convert("L")):
        buffers = [io.BytesIO(), io.BytesIO()]
        image.save(buffers[0], "PNG")
        image.convert("LA" if image.mode == "L" else "RGBA").save(buffers[1], "PNG")
        plain, opaque = (parsed(buffer.getvalue()) for buffer in buffers)
        assert plain.sha256 == opaque.sha256
        assert plain.open_image().tobytes() == opaque.open_image().tobytes() == image.convert("RGB").tobytes()


def test_an_upright_image_keeps_its_bytes() -> None:
    for image in (png(), patch_jpeg((0.2, 0.1, 0.9, 0.5), (160, 120), orientation=1)):
        assert parsed(image).image == image


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (None, "no image"),
        (b"<html>not found</html>", "unreadable image: none of JPEG, PNG, WEBP"),
        (saved("EPS"), "none of JPEG, PNG"),  # Pillow would start Ghostscript
        (saved("TIFF"), "none of JPEG, PNG"),  # its tiles may be larger than the image
        (patch_jpeg((0, 0, 1, 1), (160, 120), 1)[:-300], "unreadable image: .*truncated"),
        (png(size=(805, 4)), "unreadable image: 805 x 4 pixels: .* more than 200 times"),
        (animated("PNG"), "unreadable image: an animation; save the frame that is meant"),
        (animated("WEBP"), "unreadable image: an animation"),
        (saved("PNG", mode="I;16"), "greyscale pixels of more than 8 bits .*I;16"),
    ],
)
def test_what_is_no_whole_image_is_reported(image: Any, problem: str) -> None:
    (found,) = problems(image)
    assert re.search(problem, found)
    assert problems(image, image_id=None) == ["image_id is None, expected a non-empty string", found]


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG of a few kilobytes can be one of gigabytes."""
    image, long, huge, webp = png(size=(40, 30)), png(size=(1, 201)), bomb(13_000), saved("WEBP")
    assert problems(image, 1200) == []
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("it was decoded"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    assert problems(image, 1199) == ["unreadable image: 40 x 30 pixels, more than max_image_pixels, 1,199"]
    assert problems(huge) == ["unreadable image: 13000 x 13000 pixels, more than max_image_pixels, 64,000,000"]
    assert "1 x 201 pixels: one side is more" in problems(long)[0]
    assert "40 x 30 pixels, more than half of max_image_pixels, 1,199" in problems(webp, 2399)[0]


@pytest.mark.parametrize("orientation", range(1, 10))
def test_an_image_is_turned_as_pillow_does_whatever_its_other_tags_are(orientation: int) -> None:
    noise = Image.fromarray(np.random.default_rng(7).integers(0, 256, (4, 6, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    noise.save(buffer, "JPEG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(buffer))
    entries = struct.pack(">HHIHH", 0x112, 3, 1, orientation, 0) + struct.pack(">HHI4s", 0x11A, 2, 2, b"a")
    tags = b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 2) + entries + bytes(4)  # the resolution is text
    buffer = io.BytesIO()
    noise.save(buffer, "JPEG", exif=tags)
    found = parsed(buffer.getvalue())
    assert (found.width, found.height) == expected.size
    assert found.sha256 == hashlib.sha256(struct.pack("<II", *expected.size) + expected.tobytes()).hexdigest()


def with_scans(count: int) -> bytes:
    """A JPEG with its last scan repeated until there are so many."""
    whole = saved("JPEG", progressive=True)
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:end] + whole[last:end] * (count - num_scans(whole)) + whole[end:]


def test_a_jpeg_of_too_many_scans_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes of scans take minutes."""
    assert problems(with_scans(MAX_SCANS)) == []
    thumbnail = b"\xff\xe1" + (2 + 300).to_bytes(2) + b"\xff\xda\x00\x02" * 75
    with_thumbnail = patch_jpeg((0, 0, 1, 1), (40, 30), 1).replace(b"\xff\xd8", b"\xff\xd8" + thumbnail * 2, 1)
    assert problems(with_thumbnail + b"\xff\xda\x00\x02" * 999) == []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    assert "more than 100 scans" in problems(with_scans(2_000))[0]
    monkeypatch.setattr(images, "MAX_SCANNED", 40 * 30 * 50 - 1)
    assert "40 x 30 pixels in 50 scans" in problems(with_scans(50))[0]


@pytest.mark.parametrize("image", [*map(saved, ("JPEG", "PNG", "WEBP", "MPO")), animated("MPO")])
def test_photographs_of_every_usual_form_are_read(image: bytes) -> None:
    """A phone's MPO has a second image, such as a map of depths."""
    assert parsed(image).open_image().size == (40, 30)


def drawn(split: str, step: int) -> list[tuple[str, Image.Image]]:
    rows = pq.read_table(ROOT / f"data/tiny/nutrition-tables/data/{split}-00000-of-00001.parquet").to_pylist()
    return [(row["image_id"], Image.open(io.BytesIO(row["image"]["bytes"]))) for row in rows[::step]]


@pytest.fixture(scope="module")
def originals() -> list[tuple[str, Image.Image, Description]]:
    """Every third image to report on, by name, and what it resembles others by."""
    return [(name, image, describe_image(image)) for name, image in drawn("val", 3)]


def with_strip(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.paste((20, 20, 20), (0, image.height * 93 // 100, *image.size))
    return image


@pytest.mark.parametrize(
    ("quality", "change"),
    [
        pytest.param(40, lambda image: image, id="quality"),
        pytest.param(70, lambda image: image.reduce(2), id="half the size"),
        pytest.param(70, lambda image: image.resize([side * 3 // 4 for side in image.size]), id="three quarters"),
        pytest.param(85, lambda image: image.resize([side * 2 for side in image.size]), id="twice the size"),
        pytest.param(85, lambda image: image.resize((512, 512)), id="squeezed"),
        pytest.param(85, lambda image: ImageOps.crop(image, image.width // 50), id="cropped by 2 % on every side"),
        pytest.param(85, lambda image: ImageEnhance.Brightness(image).enhance(0.7), id="darker"),
        pytest.param(85, lambda image: ImageEnhance.Brightness(image).enhance(1.3), id="brighter"),
        pytest.param(85, lambda image: ImageEnhance.Contrast(image).enhance(0.6), id="less contrast"),
        pytest.param(85, ImageOps.grayscale, id="grey"),
        pytest.param(85, lambda image: image.filter(ImageFilter.GaussianBlur(1)), id="blurred"),
        pytest.param(85, lambda image: image.rotate(1, fillcolor="white"), id="turned by 1 degree"),
        pytest.param(85, with_strip, id="a strip below"),
        pytest.param(85, ImageOps.mirror, id="mirrored"),
        pytest.param(85, ImageOps.flip, id="upside down, mirrored"),
        *(
            pytest.param(85, lambda image, turn=turn: image.transpose(turn), id=turn.name)
            for turn in (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.TRANSVERSE)
        ),
        *(
            pytest.param(85, lambda image, angle=angle: image.rotate(angle), id=f"turned by {angle} degrees")
            for angle in (-15, -9, 3, 12)
        ),
        pytest.param(70, lambda image: ImageOps.mirror(image).rotate(10, fillcolor="white"), id="mirrored and turned"),
    ],
)
def test_a_changed_copy_of_an_image_resembles_its_original(
    originals: list[tuple[str, Image.Image, Description]], quality: int, change: Callable[[Image.Image], Image.Image]
) -> None:
    copies = []
    for name, image, _ in originals:
        buffer = io.BytesIO()
        change(image).save(buffer, "JPEG", quality=quality)
        copies.append((name, describe_image(Image.open(buffer))))
    others = [(name, description) for name, _, description in originals]
    found = [(copy, original) for _, copy, _, original in near_duplicates({"val": others, "train": copies})]
    assert len(found) >= 0.95 * len(originals)
    assert all(copy == original for copy, original in found)


def test_different_images_of_one_kind_do_not_resemble_each_other() -> None:
    splits = ("val", "train")
    described = {split: [(name, describe_image(image)) for name, image in drawn(split, 1)] for split in splits}
    assert list(near_duplicates(described)) == []


def test_blank_images_and_plain_gradients_do_not_resemble_each_other() -> None:
    gradient = Image.linear_gradient("L")
    pairs = [(Image.new("L", (40, 30), 255), Image.new("L", (80, 60))), (gradient, gradient.rotate(90))]
    frames = [Image.new("L", (300, 100), 255) for _ in range(2)]  # with plain centres
    for number, frame in enumerate(frames):
        frame.paste(Image.fromarray(np.random.default_rng(number).integers(0, 256, (90, 90), dtype=np.uint8)), (0, 5))
    pairs.append((frames[0], frames[1]))
    for one, other in pairs:
        assert list(near_duplicates({"val": [(0, describe_image(one))], "train": [(0, describe_image(other))]})) == []


def test_the_same_image_with_other_metadata_is_the_same_subject() -> None:
    plain, with_metadata = saved("PNG"), saved("PNG", dpi=(300, 300))
    assert plain != with_metadata
    assert parsed(plain).subject() == parsed(with_metadata).subject()
    assert parsed(png((10, 20, 30))).subject() != parsed(png((10, 20, 31))).subject()
    assert parsed(png(size=(40, 30))).subject() != parsed(png(size=(30, 40))).subject()
