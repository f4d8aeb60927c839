"""Pictures in a data set, which anybody may have made: what is opened at all, and what Pillow raises on the rest."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image, UnidentifiedImageError

DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,  # by inheritance none of the others
)
"""Raised by Pillow and its plugins on a picture that is none, or not a whole one."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that photographs come in. For others Pillow would run Ghostscript (EPS)."""


def open_picture(encoded: bytes) -> Image.Image:
    """The picture, only its beginning read so far. Raises one of DECODING_ERRORS where it is none, and where it has
    16-bit or floating-point greyscale pixels: Pillow cuts them off at 255, and the picture is white or black.
    """
    Image.init()  # or it knows but some of them
    try:
        picture = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:  # whose words name an address in memory, another one each time
        raise UnidentifiedImageError(f"cannot identify image as {', '.join(FORMATS)}") from None
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"greyscale pixels of more than 8 bits (Pillow's mode {picture.mode}); convert them to 8 bits")
    return picture
