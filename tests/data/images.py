"""Small encoded images."""

from __future__ import annotations

import io
import zlib

from PIL import Image, ImageDraw

WHITE, RED = (255, 255, 255), (220, 20, 20)


def png(colour: tuple[int, int, int] = (90, 120, 200), size: tuple[int, int] = (40, 30)) -> bytes:
    """A plain PNG."""
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def bomb(side: int = 60_000) -> bytes:
    """A PNG of a few hundred bytes that claims to have so many rows and columns."""
    header = b"IHDR" + side.to_bytes(4) * 2 + png()[24:29]
    return png()[:12] + header + zlib.crc32(header).to_bytes(4) + png()[33:]


def patch_jpeg(box: tuple[float, float, float, float], size: tuple[int, int], orientation: int) -> bytes:
    """A JPEG that *shows*, its EXIF orientation applied, a red patch at `box` on white, `size` large."""
    upright = Image.new("RGB", size, WHITE)
    x0, y0, x1, y1 = (round(v * s) for v, s in zip(box, size * 2, strict=True))
    ImageDraw.Draw(upright).rectangle((x0, y0, x1 - 1, y1 - 1), fill=RED)
    # A camera stores the inverse of what a viewer does for the orientation (EXIF 2.32, tag 0x0112).
    stored = {
        1: None,
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    (upright.transpose(stored) if stored is not None else upright).save(buffer, "JPEG", quality=95, exif=exif)
    return buffer.getvalue()
