"""Draws images for detection: plain objects to pre-train on, packages with nutrition tables to fine-tune on.

    python -m tools.tiny.scenes --out data/tiny/nutrition-tables

Writes packages as parquet files in the schema of openfoodfacts/nutrition-table-detection, the demo's data.

An image is a pure function of (kind, seed, index): every function draws what its `rng` says and nothing else. Text is
set in the DejaVu fonts that matplotlib carries and laid out by Pillow itself, so that no image depends on the system.

How hard the packages are was chosen for the tiny base. It boxes whatever it sees, and with few things beside a table
it met one first in two of five images (mean IoU of the first box 0.38). With more of them, and a banner above the
tables, it seldom does, and some 300 images still teach it what a table is.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import matplotlib as mpl
import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from stages.data.parquet import write_rows
from stages.tasks.detection.samples.boxes import TARGET, Box

Kind = Literal["objects", "front", "back"]
"""objects: one to three kinds of OBJECTS, and never a nutrition table. front, back: a package, a little rotated, with
one to three nutrition tables among other things."""
PixelBox = tuple[int, int, int, int]
"""x0, y0, x1, y1; x1 and y1 are the first pixels outside."""
Colour = tuple[int, int, int]
"""Red, green, blue, each 0..255."""

SEED, SPLITS = 7, {"train": 320, "val": 128}
"""The demo's data: its seed, and the images of each split."""
COLUMNS = pa.schema(
    [
        ("image_id", pa.string()),
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("objects", pa.struct([("bbox", pa.list_(pa.list_(pa.float64()))), ("category_name", pa.list_(pa.string()))])),
    ]
)

OBJECTS = ("barcode", "logo", "panel", "qr-code", "text-block")
SHAPES = ((256, 256), (224, 280), (280, 224), (240, 272), (272, 240))
"""Width and height of the images, in pixels."""
SIZES: dict[str, tuple[tuple[float, float], tuple[float, float] | None]] = {
    "barcode": ((0.2, 0.45), (0.12, 0.3)),
    "logo": ((0.15, 0.4), None),
    "panel": ((0.2, 0.7), (0.15, 0.6)),
    "qr-code": ((0.15, 0.3), None),
    "text-block": ((0.25, 0.6), (0.15, 0.4)),
    TARGET: ((0.32, 0.6), (0.3, 0.6)),
}
"""Range of an object's width as a share of the image's, and of its height; None: about as high as wide."""

FACES = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf")
_BRANDS = "Aurora Belmont Corvo Delizia Ekko Fjord Granja Halma Isola Juno Kasvi Lumen"
BRANDS = _BRANDS.split()
LOGO_TEXTS = ("Bio", "Eco", "A", "B", "No1", "OK", "Vegan")
_INGREDIENTS = """sugar water wheat flour milk cocoa butter salt sunflower oil palm soy lecithin natural flavour vitamin
acid citric starch corn glucose syrup egg may contain traces of nuts best before store in a cool dry place farine sucre
eau sel huile lait beurre levure"""
INGREDIENTS = _INGREDIENTS.split()
_TABLES = """
Nahrwerte: Brennwert,Fett,davon gesaettigt,Kohlenhydrate,davon Zucker,Ballaststoffe,Eiweiss,Salz,Calcium,Eisen
Nutrition Facts: Calories,Total Fat,Sat. Fat,Sodium,Total Carb.,Sugars,Dietary Fiber,Protein,Calcium,Iron
Nutrition Information: Energy,Fat,of which saturates,Carbohydrate,of which sugars,Fibre,Protein,Salt,Calcium,Iron
Valeurs nutritionnelles: Energie,Matieres grasses,dont satures,Glucides,dont sucres,Fibres,Proteines,Sel,Calcium,Fer
"""
NUTRIENTS = {heading: rows.split(",") for heading, rows in (line.split(": ") for line in _TABLES.strip().splitlines())}
"""Headings of nutrition tables, and the rows below them."""


@click.command(help=__doc__)
@click.option("--out", "out_dir", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(out_dir: Path) -> None:
    (out_dir / "data").mkdir(parents=True, exist_ok=True)
    for split, count in SPLITS.items():
        write_rows(generate_rows(split, count, SEED), out_dir / f"data/{split}-00000-of-00001.parquet", COLUMNS)


@dataclass(frozen=True)
class Scene:
    """An image and the objects marked in it, top to bottom then left to right."""

    image: Image.Image
    boxes: tuple[Box, ...]
    categories: tuple[str, ...]


def draw_scene(kind: Kind, seed: int, index: int, *, objects: int = 1) -> Scene:
    """Draws image `index` of the endless series (kind, seed). objects: categories in an `objects` scene, 1 to 3."""
    rng = random.Random(f"{kind}/{seed}/{index}")
    image, marked = _draw_objects(rng, objects) if kind == "objects" else _draw_package(rng, kind)
    marked.sort(key=lambda item: (item[1][1], item[1][0]))
    width, height = image.size
    boxes = tuple((x0 / width, y0 / height, x1 / width, y1 / height) for _, (x0, y0, x1, y1) in marked)
    return Scene(image, boxes, tuple(category for category, _ in marked))


def generate_rows(split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields `count` images of packages as rows of openfoodfacts/nutrition-table-detection, as far as they are read.

    The split is part of what the images are drawn from and of their barcodes, so train and val share none. Barcodes
    are EAN-13 of the range 20 to 29, which is given to no product.
    """
    series = int.from_bytes(hashlib.sha256(f"{split}/{seed}".encode()).digest()[:8], "big")
    for index in range(count):
        rng = random.Random(f"{split}/{seed}/{index}")
        kind: Kind = "front" if rng.random() < 0.35 else "back"
        scene = draw_scene(kind, series, index)
        jpeg = io.BytesIO()
        scene.image.save(jpeg, "JPEG", quality=rng.randint(75, 95))
        digits = f"{20 if split == 'train' else 21}{seed % 1000:03d}{index:07d}"
        total = sum(int(digit) * (3 if place % 2 else 1) for place, digit in enumerate(digits))
        image_id = f"{digits}{-total % 10}_{1 if kind == 'front' else 2}"
        bbox = [[y0, x0, y1, x1] for x0, y0, x1, y1 in scene.boxes]
        yield {
            "image_id": image_id,
            "image": {"bytes": jpeg.getvalue(), "path": f"{image_id}.jpg"},
            "objects": {"bbox": bbox, "category_name": list(scene.categories)},
        }


Marked = list[tuple[str, tuple[float, float, float, float]]]
"""Categories of objects, and their boxes in pixels."""


def _place(
    rng: random.Random, size: tuple[int, int], kind: str, taken: list[PixelBox], *, scale: float = 1.0, top: int = 2
) -> PixelBox | None:
    """A free rectangle for an object on a surface of `size`, or None where 25 tries find none.

    scale: of its usual size. top: the first row of pixels that it may cover.
    """
    width, height = size
    widths, heights = SIZES[kind]
    for _ in range(25):
        box_width = round(rng.uniform(*widths) * width * scale)
        box_height = round(rng.uniform(*heights) * height * scale if heights else box_width * rng.uniform(0.85, 1.15))
        if box_width > width - 4 or box_height > height - 2 - top:
            continue
        x, y = rng.randint(2, width - box_width - 2), rng.randint(top, height - box_height - 2)
        right, bottom = x + box_width, y + box_height
        # More than three pixels lie between them.
        if all(x > x1 + 3 or right < x0 - 3 or y > y1 + 3 or bottom < y0 - 3 for x0, y0, x1, y1 in taken):
            return x, y, right, bottom
    return None


def _put(surface: Image.Image, rng: random.Random, category: str, box: PixelBox) -> None:
    """Draws an object on an image of its own, so that nothing of it can stick out of its box, and pastes that."""
    size = width, height = box[2] - box[0], box[3] - box[1]
    part, mask = Image.new("RGB", size), Image.new("L", size, 255)
    DRAW[category](ImageDraw.Draw(part), width, height, rng)
    if category == "logo":
        mask = Image.new("L", size)
        ImageDraw.Draw(mask).ellipse([0, 0, width - 1, height - 1], fill=255)
    part.putalpha(mask)
    surface.paste(part, box[:2], part)


def _draw_objects(rng: random.Random, objects: int) -> tuple[Image.Image, Marked]:
    size = rng.choice(SHAPES)
    colour = pick_colour(rng, 20)
    image = gradient(rng, size, colour)
    clutter(image, rng, colour, rng.randint(2, 6))
    for _ in range(rng.randint(0, 2)):
        _write_brand(image, rng, ink_on(rng, colour), rng.uniform(0.05, 0.11) * size[1])
    while True:  # until all of them found room; the surface is drawn once
        wanted = rng.sample(OBJECTS, objects)
        if rng.random() < 0.2:
            wanted.append(rng.choice(wanted))  # two of a kind: an answer with two boxes
        taken: list[PixelBox] = []
        for category in wanted:
            if (box := _place(rng, size, category, taken)) is None:
                break
            taken.append(box)
        else:
            break
    for category, box in zip(wanted, taken, strict=True):
        _put(image, rng, category, box)
    return image, list(zip(wanted, taken, strict=True))


def _write_brand(surface: Image.Image, rng: random.Random, ink: Colour, size: float) -> None:
    brand = rng.choice(BRANDS).upper()
    font = fit_font(load_font(FACES[1], size), brand, surface.width * 0.9)
    place = rng.uniform(0, surface.width - font.getlength(brand)), rng.uniform(0, surface.height - font.size * 1.2)
    ImageDraw.Draw(surface).text(place, brand, fill=ink, font=font)


def _draw_package(rng: random.Random, kind: Literal["front", "back"]) -> tuple[Image.Image, Marked]:
    """A package lying on a surface, seen a little askew, in uneven light."""
    width, height = rng.choice(SHAPES)
    ground = pick_colour(rng, 20)
    image = gradient(rng, (width, height), ground)
    clutter(image, rng, ground, rng.randint(2, 5))

    size = round(width * rng.uniform(0.82, 1.05)), round(height * rng.uniform(0.82, 1.05))
    pack, tables = _draw_face(rng, kind, size)
    angle = rng.gauss(0, 4) if rng.random() < 0.85 else 0.0
    middle_x, middle_y = width * rng.uniform(0.47, 0.53), height * rng.uniform(0.47, 0.53)
    turned = pack.rotate(angle, resample=Image.Resampling.BICUBIC, expand=True)
    image.paste(turned, (round(middle_x - turned.width / 2), round(middle_y - turned.height / 2)), turned)
    marked: Marked = []
    cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    for x0, y0, x1, y1 in tables:  # the hull of each turned table, cut at the image's sides
        corners = [(x - size[0] / 2, y - size[1] / 2) for x in (x0, x1) for y in (y0, y1)]
        xs = [middle_x + x * cosine + y * sine for x, y in corners]
        ys = [middle_y - x * sine + y * cosine for x, y in corners]
        hull = max(0.0, min(xs)), max(0.0, min(ys)), min(width, max(xs)), min(height, max(ys))
        marked.append((TARGET, hull))

    if rng.random() < 0.4:
        _shine(image, rng)
    if rng.random() < 0.3:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.8)))
    return image, marked


def _draw_face(
    rng: random.Random, kind: Literal["front", "back"], size: tuple[int, int]
) -> tuple[Image.Image, list[PixelBox]]:
    """One face of a package (RGBA, round corners) and its tables' places. What finds no room is left out."""
    width, height = size
    colour = pick_colour(rng, 20)
    face = gradient(rng, size, colour).convert("RGBA")
    if kind == "front":
        clutter(face, rng, colour, rng.randint(3, 6))
        _write_brand(face, rng, ink_on(rng, colour), rng.uniform(0.12, 0.2) * height)
        num_tables, scale = 1, 0.8
        others = rng.choices(("logo", "panel", "barcode", "text-block"), weights=(4, 3, 1, 2), k=rng.randint(2, 4))
    else:
        clutter(face, rng, colour, rng.randint(0, 2))
        num_tables = rng.choices((1, 2, 3), weights=(82, 13, 5))[0]
        scale = (1.0, 0.75, 0.6)[num_tables - 1]
        others = ["text-block", *rng.choices(OBJECTS, k=rng.randint(3, 4))]

    taken: list[PixelBox] = []
    top = 2
    if rng.random() < 0.8:  # a banner along the upper side, and the tables below it
        left, upper = round(rng.uniform(0.02, 0.4) * width), round(rng.uniform(0.01, 0.05) * height)
        right, top = left + round(rng.uniform(0.4, 0.58) * width), upper + round(rng.uniform(0.1, 0.18) * height)
        taken.append((left, upper, right, top))
        _put(face, rng, "panel", taken[0])
        top += 4
    tables: list[PixelBox] = []
    for category in [TARGET] * num_tables + others:
        options: dict[str, Any] = {"scale": scale, "top": top} if category == TARGET else {}
        if box := _place(rng, size, category, taken, **options):
            _put(face, rng, category, box)
            taken.append(box)
            tables += [box] if category == TARGET else []
    corners = Image.new("L", size)
    ImageDraw.Draw(corners).rounded_rectangle([0, 0, width - 1, height - 1], radius=rng.randint(0, 14), fill=255)
    face.putalpha(corners)
    return face, tables


def _shine(image: Image.Image, rng: random.Random) -> None:
    """Glare: a soft white streak that half hides what lies below."""
    width, height = image.size
    light = Image.new("L", image.size)
    draw = ImageDraw.Draw(light)
    x, y, reach = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0.08, 0.25) * width
    if rng.random() < 0.5:
        draw.ellipse([x - reach, y - reach * 0.6, x + reach, y + reach * 0.6], fill=rng.randint(90, 220))
    else:
        end = x + rng.uniform(-0.5, 0.5) * height, height + 10
        draw.line([(x, -10), end], fill=rng.randint(70, 180), width=int(reach * 0.6))
    image.paste((255, 255, 255), (0, 0), light.filter(ImageFilter.GaussianBlur(reach * 0.25)))


@functools.lru_cache(maxsize=256)
def load_font(face: str, size: float) -> ImageFont.FreeTypeFont:
    """A face of matplotlib's own font folder, at least 5 px, below which nothing is legible."""
    path = Path(mpl.get_data_path()) / "fonts" / "ttf" / face
    return ImageFont.truetype(str(path), max(5, int(size)), layout_engine=ImageFont.Layout.BASIC)


def fit_font(font: ImageFont.FreeTypeFont, text: str, width: float) -> ImageFont.FreeTypeFont:
    """`font`, or the same face smaller where `text` would be longer than `width` pixels."""
    share = width / max(1.0, font.getlength(text))
    return font if share >= 1 else load_font(Path(str(font.path)).name, font.size * share)


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


def gradient(rng: random.Random, size: tuple[int, int], start: Colour) -> Image.Image:
    """A surface that fades from `start` to a near colour, in a random direction."""
    end = mix(start, pick_colour(rng), 0.4)
    angle = rng.uniform(0, math.pi)
    rows, columns = np.mgrid[0 : size[1], 0 : size[0]]
    share = (columns * math.cos(angle) + rows * math.sin(angle)) / sum(size) + 0.5
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
    draw.rectangle([0, 0, width, height], fill="white")
    x = 3
    while x < width - 4:
        bar = rng.choice((1, 1, 2, 3))
        if rng.random() < 0.55:
            draw.rectangle([x, 3, min(x + bar - 1, width - 4), height - 4], fill="black")
        x += bar


def draw_qr_code(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    draw.rectangle([0, 0, width, height], fill="white")
    modules = 11
    step_x, step_y = (width - 4) / modules, (height - 4) / modules
    for row in range(modules):
        for column in range(modules):
            finder = (row < 3 or row > modules - 4) and (column < 3 or column > modules - 4)
            if finder or rng.random() < 0.5:
                x, y = 2 + column * step_x, 2 + row * step_y
                draw.rectangle([x, y, x + step_x - 1, y + step_y - 1], fill="black")


def draw_logo(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    fill = pick_colour(rng)
    draw.ellipse([0, 0, width - 1, height - 1], fill=fill, outline=ink_on(rng, fill), width=rng.randint(1, 4))
    text = rng.choice(LOGO_TEXTS)
    font = fit_font(load_font(FACES[1], height * 0.4), text, width * 0.8)
    draw.text((width / 2, height / 2), text, fill=ink_on(rng, fill), font=font, anchor="mm")


def draw_panel(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    fill = pick_colour(rng)
    outline = ink_on(rng, fill) if rng.random() < 0.5 else None
    draw.rectangle([0, 0, width - 1, height - 1], fill=fill, outline=outline, width=2)


def draw_text_block(draw: ImageDraw.ImageDraw, width: int, height: int, rng: random.Random) -> None:
    """Running text, such as a list of ingredients, that fills the width."""
    size = rng.uniform(7, 12)
    font = load_font(rng.choice(FACES), size)
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
    heading = rng.choice(list(NUTRIENTS))
    fill = rng.choice(((255, 255, 255), (255, 255, 255), pick_colour(rng, 210), pick_colour(rng, 0, 60)))
    ink = ink_on(rng, fill)
    frame = (0, 0, width - 1, height - 1)
    draw.rectangle(frame, fill=fill)

    heading_height = height * rng.uniform(0.12, 0.2)
    font = fit_font(load_font(FACES[1], heading_height * 0.75), heading, width - 8)
    draw.text((4, 2), heading, fill=ink, font=font)
    draw.line([(0, heading_height), (width, heading_height)], fill=ink, width=rng.choice((1, 2, 3)))

    names = NUTRIENTS[heading][: rng.randint(6, 10)]
    row_height = (height - heading_height - 2) / len(names)
    columns = rng.choice((1, 1, 2)) if width > 90 else 1
    longest = max(names, key=len) + "0000000" * columns
    font = fit_font(load_font(rng.choice(FACES), row_height * 0.85), longest, width - 8)
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
        draw.rectangle(frame, outline=ink, width=rng.choice((1, 2)))


DRAW: dict[str, Callable[[ImageDraw.ImageDraw, int, int, random.Random], None]] = {
    "barcode": draw_barcode,
    "logo": draw_logo,
    "panel": draw_panel,
    "qr-code": draw_qr_code,
    "text-block": draw_text_block,
    TARGET: draw_nutrition_table,
}


if __name__ == "__main__":
    main()
