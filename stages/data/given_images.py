"""Images of a source: read and checked within limits of what decoding them may cost, and turned upright."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import warnings
import zlib
from typing import Any

from PIL import ExifTags, Image

from stages.core.records import shown
from stages.data.images import as_rgb, opened
from stages.data.near import describe_image

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
    return fields | {"look": describe_image(upright)}, problems


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


def _refuse(image: Image.Image, scans: int, max_pixels: int) -> None:
    """Raises ValueError for an image that would cost too much to decode, or that is no photograph."""
    (width, height), half = image.size, "half of " if image.format == "WEBP" else ""
    most = max_pixels // 2 if half else max_pixels
    faults = {
        f"a JPEG of more than {MAX_SCANS} scans; save it again with fewer": scans > MAX_SCANS,
        # Pillow cuts them off at 255, and the image is white or black.
        f"greyscale pixels of more than 8 bits (Pillow's mode {image.mode}); convert them to 8 bits": (
            image.mode.startswith(("I", "F"))
        ),
        "an animation; save the frame that is meant": getattr(image, "is_animated", False) and image.format != "MPO",
        f"{width} x {height} pixels, more than {half}max_image_pixels, {most:,}": width * height > most,
        f"a JPEG of {width} x {height} pixels in {scans} scans; save it again with fewer": (
            scans * width * height > MAX_SCANNED
        ),
        f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other, which no model here takes": (
            max(image.size) > MAX_ASPECT * min(image.size)
        ),
    }
    if fault := next((fault for fault, there in faults.items() if there), None):
        raise ValueError(fault)


def _upright(encoded: bytes, max_pixels: int) -> tuple[bytes, Image.Image]:
    """Decode an image in full and undo its EXIF orientation: (encoded, decoded). Raises one of DECODING_ERRORS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # a large photograph is none; errors remain
        with opened(encoded) as image:
            _refuse(image, num_scans(encoded), max_pixels)
            turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
            if turn is None:
                image.load()
                return encoded, as_rgb(image)
            # ImageOps.exif_transpose writes the other tags again, and fails if one is of another type than its own.
            turned = as_rgb(image.transpose(turn))
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue(), turned
