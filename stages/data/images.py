"""The records that have an image, and images as a model sees them."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP")
"""The only formats that are opened. Of others, a small file can cost gigabytes (the tiles of a TIFF) or run another
program (Ghostscript for EPS)."""


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
    look: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64), compare=False, repr=False)
    """Its description for near-duplicates, while the dataset is prepared."""

    def open_image(self) -> Image.Image:
        """The decoded image, RGB."""
        with opened(self.image) as image:
            return as_rgb(image).copy()

    def subject(self) -> str:
        """The image's digest: the same image may not be in two splits."""
        return self.sha256

    def content(self) -> list[Any]:
        """The input of a record's digest; a task adds its annotations."""
        return [self.image_id, hashlib.sha256(self.image).hexdigest(), self.sha256]


def opened(encoded: bytes) -> Image.Image:
    """The image, of which only the header is read so far. Raises ValueError, or one of Pillow's errors."""
    Image.init()  # or Pillow knows only some of the formats
    try:
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:  # its message contains an address in memory, another one each time
        raise ValueError(f"none of {', '.join(FORMATS)}, the formats that are opened; convert it") from None


def as_rgb(image: Image.Image) -> Image.Image:
    """The image as a viewer shows it: what is transparent on white (as in qwen-vl-utils and vLLM)."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
