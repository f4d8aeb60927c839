"""What Pillow raises on a picture that is none, or not a whole one."""

from __future__ import annotations

import struct
import zlib

from PIL import Image

DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,  # by inheritance none of the others
)
"""Of Pillow itself and of its plugins."""
