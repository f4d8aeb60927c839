"""Images of a dataset: reading and checking them, and the records that have one."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import warnings
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from stages.core.records import shown
from stages.data.near import Description, describe_image

DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,  # by inheritance none of the others
)
"""Raised by Pillow and its plugins on bytes that are no image, or not a whole one."""

FORMATS = ("JPEG", "PNG", "WEBP")
"""The only formats that are opened. Of others, a small file can cost gigabytes (the tiles of a TIFF) or run another
program (Ghostscript for EPS)."""
MAX_SCANS = 100
MAX_SCANNED = 1_000_000_000
"""Limits of a JPEG's scans, each of which costs a pass over all pixels, and of the pixels of all scans. Encoders write
about ten."""
MAX_IMAGE_PIXELS = 64_000_000
"""Default limit of an image's pixels: more than most cameras make. Half as many of a WebP: its decoder takes four
bytes for each of them four times. Reading so many was measured to take 0.7 GB, whatever the size of the file."""
MAX_ASPECT = 200
"""The image processor refuses longer images (smart_resize in transformers/models/qwen2_vl)."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Turns that undo an EXIF orientation. 1 is upright; values beyond 8 are not in the standard."""


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """Fields of a record with one image, in every task."""

    image_id: str
    image: bytes
    """Encoded (JPEG, PNG, ...), upright: no EXIF orientation is left to apply."""
    width: int
    height: int
    """In pixels, of the upright image."""
    sha256: str = ""
    """SHA-256 of the upright image's pixels."""
    look: Description = field(default_factory=lambda: np.empty(0, dtype=np.uint64), compare=False, repr=False)
    """describe_image of it, while the dataset is prepared."""

    def description(self) -> Description:
        return self.look

    def open_image(self) -> Image.Image:
        """The decoded image, RGB."""
        with _open(self.image) as image:
            return _rgb(image).copy()

    def subject(self) -> str:
        """The image's digest: the same image may not be in two splits."""
        return self.sha256

    def content(self) -> list[Any]:
        """The input of a record's digest; a task adds its annotations."""
        return [self.image_id, hashlib.sha256(self.image).hexdigest(), self.sha256]


def parse_image(image_id: Any, encoded: Any, max_pixels: int) -> tuple[dict[str, Any], list[str]]:
    """The fields of an ImageRecord, and their problems.

    max_pixels: an image with more is refused before it is decoded, and so is one of more than MAX_ASPECT.
    The bytes stay as they are unless the image has to be turned; then they are a JPEG of quality 95 without chroma
    subsampling, so that annotations of fine lines still fit.
    """
    problems = []
    if not isinstance(image_id, str) or not image_id:
        problems.append(f"image_id is {shown(image_id)}, expected a non-empty string")
    if not isinstance(encoded, bytes) or not encoded:
        return {}, [*problems, f"no image: expected its bytes, found {shown(encoded)}"]
    try:
        encoded, upright = _upright(encoded, max_pixels)
        width, height = upright.size
        # Size and pixels before they are encoded again: copies of an image without loss have one digest.
        digest = hashlib.sha256(struct.pack("<II", width, height))
        digest.update(upright.tobytes())
    except DECODING_ERRORS as error:
        return {}, [*problems, f"unreadable image: {error}"]
    fields = {"image_id": image_id, "image": encoded, "width": width, "height": height, "sha256": digest.hexdigest()}
    fields["look"] = describe_image(upright)
    return fields, problems


def _rgb(image: Image.Image) -> Image.Image:
    """The image as a viewer shows it: what is transparent on white (as in qwen-vl-utils and vLLM)."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def _open(encoded: bytes) -> Image.Image:
    """The image, of which only the header is read so far. Raises one of DECODING_ERRORS."""
    Image.init()  # or Pillow knows only some of the formats
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:  # its message contains an address in memory, another one each time
        raise ValueError(f"none of {', '.join(FORMATS)}, the formats that are opened; convert it") from None
    if num_scans(encoded) > MAX_SCANS:
        raise ValueError(f"a JPEG of more than {MAX_SCANS} scans; save it again with fewer")
    if image.mode.startswith(("I", "F")):  # Pillow cuts them off at 255, and the image is white or black
        raise ValueError(f"greyscale pixels of more than 8 bits (Pillow's mode {image.mode}); convert them to 8 bits")
    return image


_MARKER = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])")
"""The beginning of a JPEG's segments. Within compressed data, 0xff is followed by 0 or a restart marker (ITU T.81)."""


def num_scans(encoded: bytes) -> int:
    """The scans of a JPEG before its end, counted up to one more than MAX_SCANS; 0 for other formats."""
    scans, place = 0, 2
    while encoded[:2] == b"\xff\xd8" and scans <= MAX_SCANS and (marker := _MARKER.search(encoded, place)):
        kind, place = marker[1], marker.end()
        if kind == b"\xd9":
            break
        scans += kind == b"\xda"
        place += int.from_bytes(encoded[place : place + 2], "big")
    return scans


def _refuse_size(image: Image.Image, scans: int, max_pixels: int) -> None:
    width, height = image.size
    most = max_pixels // 2 if image.format == "WEBP" else max_pixels
    if (pixels := width * height) > most:
        half = "half of " if most < max_pixels else ""
        raise ValueError(f"{width} x {height} pixels, more than {half}max_image_pixels, {most:,}")
    if scans * pixels > MAX_SCANNED:
        raise ValueError(f"a JPEG of {width} x {height} pixels in {scans} scans; save it again with fewer")
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise ValueError(
            f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other, which no model here takes"
        )


def _upright(encoded: bytes, max_pixels: int) -> tuple[bytes, Image.Image]:
    """Decode an image in full and undo its EXIF orientation: (encoded, decoded). Raises one of DECODING_ERRORS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a large photograph is none; errors remain
        with _open(encoded) as opened:
            _refuse_size(opened, num_scans(encoded), max_pixels)
            turn = _TURNS.get(opened.getexif().get(ExifTags.Base.Orientation, 1))
            if turn is None:
                opened.load()
                return encoded, _rgb(opened)
            # ImageOps.exif_transpose writes the other tags again, and fails if one is of another type than its own.
            turned = _rgb(opened.transpose(turn))
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue(), turned
