"""Pictures in a dataset, which anybody may have made: reading and checking them, and the records that have one."""

from __future__ import annotations

import hashlib
import io
import math
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps, UnidentifiedImageError

from stages.core.records import shown

if TYPE_CHECKING:
    from stages.kit.data.prepared import PreparedRow

DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,  # by inheritance none of the others
)
"""Raised by Pillow and its plugins on bytes that are no picture, or not a whole one."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of photographs. For others Pillow would run another program, Ghostscript for EPS."""
MAX_IMAGE_PIXELS = 64_000_000
"""Default limit of a picture's pixels: more than most cameras make, and 0.6 GB to decode."""
MAX_ASPECT = 200
"""The image processor refuses longer pictures (smart_resize in transformers/models/qwen2_vl)."""

_ORIENTATION = 0x0112
_TURNED = range(2, 9)  # 1 is upright; anything else is not in the standard and means nothing


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """Fields of the records of every task on pictures."""

    image_id: str
    image: bytes
    """Encoded (JPEG, PNG, ...), upright: no EXIF orientation is left to apply."""
    width: int
    height: int
    """In pixels, of the upright image."""
    sha256: str = ""
    """SHA-256 of the upright image's pixels."""
    place: PreparedRow | None = field(default=None, compare=False, repr=False)

    def open_image(self) -> Image.Image:
        """The decoded picture, RGB. Raises UserError where prepared data are damaged."""
        try:
            with _unreadable_as_value_error(), _open(self.image) as image:
                return image.convert("RGB")
        except ValueError as error:
            if self.place is None:
                raise
            raise self.place.damaged(str(error)) from None

    def subject(self) -> str:
        """Equal for records that may not be in two splits: of the same picture."""
        return self.sha256

    def content(self) -> list[Any]:
        """Input of the digest of records; a task adds its annotations."""
        return [self.image_id, hashlib.sha256(self.image).hexdigest(), self.sha256]


def parse_image(row: Mapping[str, Any], max_pixels: int) -> tuple[dict[str, Any], list[str]]:
    """The fields of an ImageRecord in a raw row, read from image_id and image.bytes, and what is wrong with them.

    max_pixels: of a picture that is decoded.
    The bytes stay as they are unless the image has to be turned; then they are a JPEG of quality 95 without chroma
    subsampling, so that annotations of fine lines still fit.
    """
    image_id, image = row.get("image_id"), row.get("image")
    problems = []
    if not isinstance(image_id, str) or not image_id:
        problems.append(f"image_id is {shown(image_id)}, expected a non-empty string")
    encoded = image.get("bytes") if isinstance(image, Mapping) else None
    if not isinstance(encoded, bytes) or not encoded:
        return {}, [*problems, "no image: there are no bytes in column image"]
    try:
        with _unreadable_as_value_error():
            encoded, upright = _upright(encoded, max_pixels)
            width, height = upright.size
            # Taken before the pixels are encoded again: a lossless copy of the same picture has the same digest.
            sha256 = _digest(upright)
    except ValueError as error:
        return {}, [*problems, str(error)]
    if max(width, height) > MAX_ASPECT * min(width, height):
        problems.append(
            f"the image of {shown(image_id)} is {width} x {height} pixels: one side is more than {MAX_ASPECT} times "
            "the other, which no model here takes"
        )
    fields = {"image_id": image_id, "image": encoded, "width": width, "height": height, "sha256": sha256}
    return fields, problems


def require_prepared_image(row: Mapping[str, Any]) -> None:
    """Raises ValueError where a prepared row's image is none, or not as large as the row says."""
    with _unreadable_as_value_error(), _open(row["image"]) as image:  # its beginning; the rest is read when needed
        size = image.size
    if size != (row["width"], row["height"]):
        raise ValueError(f"the image is {size}, expected {(row['width'], row['height'])}")


@contextmanager
def _unreadable_as_value_error() -> Iterator[None]:
    try:
        yield
    except DECODING_ERRORS as error:
        raise ValueError(f"unreadable image: {error}") from error


def _open(encoded: bytes) -> Image.Image:
    """The picture, only its beginning read so far. Raises one of DECODING_ERRORS where it is none."""
    Image.init()  # or it knows but some of the formats
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:  # its message names an address in memory, another one each time
        raise UnidentifiedImageError(f"cannot identify image as {', '.join(FORMATS)}") from None
    if image.mode.startswith(("I", "F")):  # Pillow cuts them off at 255, and the picture is white or black
        raise ValueError(f"greyscale pixels of more than 8 bits (Pillow's mode {image.mode}); convert them to 8 bits")
    return image


def _upright(encoded: bytes, max_pixels: int) -> tuple[bytes, Image.Image]:
    """Decode an image in full and undo its EXIF orientation: (encoded, decoded). Raises one of DECODING_ERRORS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a large photograph is none; errors remain
        with _open(encoded) as opened:
            if math.prod(opened.size) > max_pixels:
                width, height = opened.size
                raise ValueError(f"{width} x {height} pixels, more than max_image_pixels, {max_pixels:,}")
            if opened.getexif().get(_ORIENTATION) not in _TURNED:
                return encoded, opened.convert("RGB")
            turned = ImageOps.exif_transpose(opened).convert("RGB")
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue(), turned


def _digest(image: Image.Image) -> str:
    """SHA-256 of the size and the RGB pixels: the same picture with other metadata counts as the same."""
    width, height = image.size
    return hashlib.sha256(struct.pack("<II", width, height) + image.tobytes()).hexdigest()
