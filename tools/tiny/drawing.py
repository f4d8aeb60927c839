"""Draws what packages show: tables, ingredients, barcodes, logos, panels, each filling one rectangle.

Every function draws what its `rng` says and nothing else: the same state of `rng` gives the same pixels. Text
is set in the DejaVu fonts that matplotlib carries and laid out by Pillow itself, so that images do not
depend on the fonts or the layout engine of the system.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
"""Red, green, blue, each 0..255."""

FACES = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf")
_BRANDS = "Aurora Belmont Corvo Delizia Ekko Fjord Granja Halma Isola Juno Kasvi Lumen"
BRANDS = tuple(_BRANDS.split())
LOGO_TEXTS = ("Bio", "Eco", "A", "B", "No1", "OK", "Vegan")
_INGREDIENTS = (
    "sugar water wheat flour milk cocoa butter salt sunflower oil palm soy lecithin natural flavour vitamin acid "
    "citric starch corn glucose syrup egg may contain traces of nuts best before store in a cool dry place farine "
    "sucre eau sel huile lait beurre levure"
)
INGREDIENTS = tuple(_INGREDIENTS.split())
NUTRIENTS = {
    "Nutrition Facts": (
        *("Calories", "Total Fat", "Sat. Fat", "Sodium", "Total Carb."),
        *("Sugars", "Dietary Fiber", "Protein", "Calcium", "Iron"),
    ),
    "Nutrition Information": (
        *("Energy", "Fat", "of which saturates", "Carbohydrate", "of which sugars"),
        *("Fibre", "Protein", "Salt", "Calcium", "Iron"),
    ),
    "Valeurs nutritionnelles": (
        *("Energie", "Matieres grasses", "dont satures", "Glucides", "dont sucres"),
        *("Fibres", "Proteines", "Sel", "Calcium", "Fer"),
    ),
    "Nahrwerte": (
        *("Brennwert", "Fett", "davon gesaettigt", "Kohlenhydrate", "davon Zucker"),
        *("Ballaststoffe", "Eiweiss", "Salz", "Calcium", "Eisen"),
    ),
}
"""Headings of nutrition tables, and the rows below them."""


@functools.lru_cache(maxsize=256)
def load_font(face: str, size: int) -> ImageFont.FreeTypeFont:
    """A font of `size` pixels; `face` is a file name of matplotlib's own font folder."""
    path = Path(mpl.get_data_path()) / "fonts" / "ttf" / face
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def pick_font(rng: random.Random, size: float, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """A face chosen by `rng`, at least 5 px, below which nothing is legible."""
    face = "DejaVuSans-Bold.ttf" if bold else rng.choice(FACES)
    return load_font(face, max(5, int(size)))


def fit_font(font: ImageFont.FreeTypeFont, text: str, width: float) -> ImageFont.FreeTypeFont:
    """`font`, or the same face smaller where `text` would be longer than `width` pixels."""
    share = width / max(1.0, font.getlength(text))
    return font if share >= 1 else load_font(Path(str(font.path)).name, max(5, int(font.size * share)))


def pick_colour(rng: random.Random, low: int = 0, high: int = 255) -> Colour:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def ink_on(rng: random.Random, background: Colour) -> Colour:
    """A colour that can be read on `background`: dark on light, light on dark (Rec. 601 luma)."""
    luma = 0.299 * background[0] + 0.587 * background[1] + 0.114 * background[2]
    return pick_colour(rng, 0, 60) if luma > 128 else pick_colour(rng, 200, 255)


def mix(first: Colour, second: Colour, share: float) -> Colour:
    """`share` of `second` in `first`, 0..1."""
    r, g, b = (round(x + (y - x) * share) for x, y in zip(first, second, strict=True))
    return r, g, b


def gradient(rng: random.Random, width: int, height: int, start: Colour) -> Image.Image:
    """A surface that fades from `start` to a near colour, in a random direction."""
    end = mix(start, pick_colour(rng), 0.4)
    angle = rng.uniform(0, math.pi)
    rows, columns = np.mgrid[0:height, 0:width]
    share = (columns * math.cos(angle) + rows * math.sin(angle)) / (width + height) + 0.5
    share = np.clip(share, 0, 1)[..., None]  # (height, width, 1)
    return Image.fromarray((np.array(start) * (1 - share) + np.array(end) * share).astype(np.uint8))


def clutter(image: Image.Image, rng: random.Random, colour: Colour, pieces: int) -> None:
    """Soft shapes in colours near `colour`: what a surface shows that nobody is asked to find."""
    draw = ImageDraw.Draw(image)
    width, height = image.size
    for _ in range(pieces):
        x, y, radius = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0.02, 0.14) * width
        fill = mix(colour, pick_colour(rng), 0.5)
        if rng.random() < 0.5:
            draw.ellipse([x - radius, y - radius, x + radius, y + radius * rng.uniform(0.4, 1)], fill=fill)
        else:
            end = x + rng.uniform(-4, 4) * radius, y + rng.uniform(-4, 4) * radius
            draw.line([(x, y), end], fill=fill, width=rng.randint(1, 6))


def draw_barcode(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    draw.rectangle([0, 0, width, height], fill=(255, 255, 255))
    x = 3
    while x < width - 4:
        bar = rng.choice((1, 1, 2, 3))
        if rng.random() < 0.55:
            draw.rectangle([x, 3, min(x + bar - 1, width - 4), height - 4], fill=(0, 0, 0))
        x += bar


def draw_qr_code(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    draw.rectangle([0, 0, width, height], fill=(255, 255, 255))
    modules = 11
    step_x, step_y = (width - 4) / modules, (height - 4) / modules
    for row in range(modules):
        for column in range(modules):
            finder = (row < 3 or row > modules - 4) and (column < 3 or column > modules - 4)
            if finder or rng.random() < 0.5:
                x, y = 2 + column * step_x, 2 + row * step_y
                draw.rectangle([x, y, x + step_x - 1, y + step_y - 1], fill=(0, 0, 0))


def draw_logo(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    fill = pick_colour(rng)
    draw.ellipse([0, 0, width - 1, height - 1], fill=fill, outline=ink_on(rng, fill), width=rng.randint(1, 4))
    text = rng.choice(LOGO_TEXTS)
    font = fit_font(pick_font(rng, height * 0.4, bold=True), text, width * 0.8)
    draw.text((width / 2, height / 2), text, fill=ink_on(rng, fill), font=font, anchor="mm")


def draw_panel(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    fill = pick_colour(rng)
    outline = ink_on(rng, fill) if rng.random() < 0.5 else None
    draw.rectangle([0, 0, width - 1, height - 1], fill=fill, outline=outline, width=2)


def draw_text_block(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    """Running text, such as a list of ingredients, that fills the width."""
    size = rng.uniform(7, 12)
    font = pick_font(rng, size)
    fill = pick_colour(rng, 170, 255) if rng.random() < 0.7 else pick_colour(rng, 0, 70)
    draw.rectangle([0, 0, width, height], fill=fill)
    ink = ink_on(rng, fill)
    y = 2.0
    while y + size * 1.1 < height:
        line = ""
        while font.getlength(longer := line + rng.choice(INGREDIENTS) + rng.choice((" ", ", "))) <= width - 6:
            line = longer
        draw.text((3, y), line, fill=ink, font=font)
        y += size * 1.25


def draw_nutrition_table(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    """A heading and rows of nutrients with one or two columns of amounts."""
    heading = rng.choice(sorted(NUTRIENTS))
    fill = rng.choice(((255, 255, 255), (255, 255, 255), pick_colour(rng, 210, 255), pick_colour(rng, 0, 60)))
    ink = ink_on(rng, fill)
    draw.rectangle([0, 0, width - 1, height - 1], fill=fill)

    heading_height = height * rng.uniform(0.12, 0.2)
    heading_font = fit_font(pick_font(rng, heading_height * 0.75, bold=True), heading, width - 8)
    draw.text((4, 2), heading, fill=ink, font=heading_font)
    draw.line([(0, heading_height), (width, heading_height)], fill=ink, width=rng.choice((1, 2, 3)))

    names = NUTRIENTS[heading][: rng.randint(6, 10)]
    row_height = (height - heading_height - 2) / len(names)
    columns = rng.choice((1, 1, 2)) if width > 90 else 1
    longest = max(names, key=len) + "0000000" * columns
    font = fit_font(pick_font(rng, row_height * 0.85), longest, width - 8)
    striped, ruled = rng.random() < 0.3, rng.random() < 0.75
    for row, name in enumerate(names):
        y = heading_height + row * row_height
        if striped and row % 2:
            draw.rectangle([2, y, width - 3, y + row_height], fill=mix(fill, ink, 0.12))
        draw.text((4, y), name, fill=ink, font=font)
        for column in range(columns):
            amount = f"{rng.uniform(0, 90):.1f}g" if row else f"{rng.randint(90, 2200)} kJ"
            draw.text((width - 4 - column * width * 0.22, y), amount, fill=ink, font=font, anchor="ra")
        if ruled:
            draw.line([(0, y + row_height), (width, y + row_height)], fill=ink, width=1)
    if columns == 2 and ruled:
        draw.line([(width * 0.76, heading_height), (width * 0.76, height)], fill=ink, width=1)
    if rng.random() < 0.8:
        draw.rectangle([0, 0, width - 1, height - 1], outline=ink, width=rng.choice((1, 2)))


DRAW: dict[str, Callable[[ImageDraw.ImageDraw, int, int, random.Random], None]] = {
    "barcode": draw_barcode,
    "logo": draw_logo,
    "panel": draw_panel,
    "qr-code": draw_qr_code,
    "text-block": draw_text_block,
    "nutrition-table": draw_nutrition_table,
}


def drawn(category: str, width: int, height: int, rng: random.Random) -> Image.Image:
    """One object (RGBA) on an image of its own, so that nothing of it can stick out of its box."""
    image = Image.new("RGB", (width, height))
    DRAW[category](ImageDraw.Draw(image), width, height, rng)
    if category != "logo":
        return image.convert("RGBA")
    mask = Image.new("L", (width, height))
    ImageDraw.Draw(mask).ellipse([0, 0, width - 1, height - 1], fill=255)
    image.putalpha(mask)
    return image
