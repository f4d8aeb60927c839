"""Near-duplicates between splits: images that look alike, and texts that share most of their words.

An image is described by 256 bits, whether each of its 16 x 16 lowest frequencies is stronger than half of them
(perceptual hash: Zauner, 2010), and so is the largest disk around its centre, in several positions: mirrored and turned
copies have the same disk. A text is described by the smallest 64 hashes of its runs of three words (a bottom-k sketch:
Broder, 1997). Both find re-encoded, resized and lightly edited copies. Inputs with too little content are not compared:
a blank image or a plain gradient, which lacks most of the frequencies; a text of fewer than MIN_RUNS runs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from stages.core.errors import UserError, join_truncated, pluralize
from stages.data.conversation import Conversation
from stages.data.texts import same_text

Description = NDArray[np.uint64]
"""IMAGE_WORDS words of bits for an image; up to SKETCH hashes, ascending, for a text; none if it is not compared."""
P = TypeVar("P")

BITS_WORDS = 4
MAX_BITS = 64
"""Bits of 256 in which the descriptions of two copies of an image may differ. Different photographs differ in 128 +-
9, and at least in 86 over 120,000 pairs; docs/data.md has the shares of the copies that are found."""
MAX_DISK_BITS = 56
"""The limit for disks, in any position. Those of different images differ in at least 70 bits over 122,500 pairs."""
ANGLES = (0, 6, -6, 12, -12)
"""Turns of a disk, in degrees: a copy that is turned by up to 15 is near enough to one of them."""
IMAGE_WORDS = BITS_WORDS * (1 + 8 * len(ANGLES))
SIGNS = np.ones(16), (-1.0) ** np.arange(16)
"""Signs of the frequencies of an image, and of its mirror image."""
DISK = np.hypot(*(np.mgrid[:64, :64] - 31.5)) <= 31.5
"""(64, 64)"""
FREQUENCIES = np.cos(np.pi / 64 * (np.arange(64) + 0.5) * np.arange(16)[:, None])
"""(16, 64) The lowest of the discrete cosine transform (DCT-II) of 64 values, not scaled."""
MIN_SHARE = 0.8
"""Share of their runs that two copies of a text have in common."""
MIN_RUNS, SKETCH = 20, 64
TOO_COMMON = 200
"""A run of more texts than this is a phrase of the corpus, and no sign of a copy."""


def describe_image(image: Image.Image) -> Description:
    """The bits of the image, and those of its disk: as it is, then mirrored and turned. Without a disk, if that is too
    plain to be compared, all bits are those of the image."""
    grey = image.convert("L")
    whole = _strengths(np.asarray(grey.resize((64, 64), Image.Resampling.BOX), dtype=np.float64))
    if np.count_nonzero(whole) < whole.size // 2:
        return np.empty(0, dtype=np.uint64)
    centre = ImageOps.fit(grey, (128, 128), Image.Resampling.BOX)
    words = [_bits(whole)]
    for angle in ANGLES:
        turned = centre.rotate(angle, Image.Resampling.BILINEAR).resize((64, 64), Image.Resampling.BOX)
        pixels = np.asarray(turned, dtype=np.float64)
        disk = _strengths(np.where(DISK, pixels - pixels[DISK].mean(), 0))
        if np.count_nonzero(disk) < disk.size // 2:
            return np.tile(words[0], IMAGE_WORDS // BITS_WORDS)
        # Mirrored, every second frequency changes its sign; a quarter turn is a mirror image and a transposition.
        for each, rows, columns in itertools.product((disk, disk.T), SIGNS, SIGNS):
            words.append(_bits(each * np.outer(rows, columns)))
    return np.concatenate(words)


def _strengths(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """(16, 16) of (64, 64); what is 0 is 0 on every machine."""
    return (FREQUENCIES @ pixels @ FREQUENCIES.T).round()


def _bits(strengths: NDArray[np.float64]) -> Description:
    return np.packbits(strengths > np.median(strengths)).view(np.uint64)


def _differences(others: NDArray[np.uint64], own: Description) -> NDArray[np.int64]:
    """(N,) Bits in which an image differs from each of others, (N, IMAGE_WORDS); those of disks on the same scale."""
    images = np.bitwise_count(others[:, :BITS_WORDS] ^ own[:BITS_WORDS]).sum(axis=1, dtype=np.int64)
    positions = own[BITS_WORDS:].reshape(-1, BITS_WORDS)
    upright = others[:, None, BITS_WORDS : 2 * BITS_WORDS]
    disks = np.bitwise_count(upright ^ positions).sum(axis=2, dtype=np.int64).min(axis=1, initial=256)
    return np.minimum(images, disks + MAX_BITS - MAX_DISK_BITS)


def describe_text(*texts: str) -> Description:
    words = same_text(" ".join(texts)).split()
    runs = {" ".join(words[place : place + 3]) for place in range(len(words) - 2)}
    if len(runs) < MIN_RUNS:
        return np.empty(0, dtype=np.uint64)
    hashes = (hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs)
    return np.sort(np.frombuffer(b"".join(hashes), dtype=np.uint64))[:SKETCH]


def near_duplicates(splits: Mapping[str, Sequence[tuple[P, Description]]]) -> Iterator[tuple[str, P, str, P]]:
    """Each sample that resembles one of an earlier split: its split and place, and those of the first such sample."""
    earlier: list[tuple[str, P, Description]] = []
    holders: dict[int, list[int]] = defaultdict(list)
    """Positions in `earlier` of the texts that have a run, by its hash."""
    for split, described in splits.items():
        images = [each for each in earlier if len(each[2]) == IMAGE_WORDS]
        bits = np.array([each for _, _, each in images], dtype=np.uint64).reshape(-1, IMAGE_WORDS)
        for place, own in described:
            found = None
            if len(own) == IMAGE_WORDS:
                differing = _differences(bits, own)
                found = images[int(differing.argmin())] if len(bits) and differing.min() <= MAX_BITS else None
            else:
                shared = Counter(other for run in own.tolist() for other in holders.get(run, ())[:TOO_COMMON])
                likely = (earlier[other] for other, count in sorted(shared.items()) if count > len(own) // 2)
                found = next((text for text in likely if _share(own, text[2]) >= MIN_SHARE), None)
            if found is not None:
                yield split, place, found[0], found[1]
        for place, own in described:
            if len(own) != IMAGE_WORDS:
                for run in own.tolist():
                    holders[run].append(len(earlier))
            earlier.append((split, place, own))


def _share(one: Description, other: Description) -> float:
    """Estimated Jaccard similarity of the runs of two texts: of the smallest hashes of both, those that both have."""
    smallest = np.union1d(one, other)[:SKETCH]
    return float(np.isin(smallest, np.intersect1d(one, other)).mean())


def require_untrained(guard: str, rows: Sequence[Conversation], trained: Sequence[Conversation]) -> list[str]:
    """A line for each row of a guard that resembles a training sample. Raises UserError if one has the same text."""

    def texts(some: Sequence[Conversation]) -> list[tuple[str, str]]:
        parts = ([part.get("text", "") for turn in each.messages for part in turn["content"]] for each in some)
        return [(each.sample_id, " ".join(text)) for each, text in zip(some, parts, strict=True)]

    splits = {"train": texts(trained), guard: texts(rows)}
    known = {same_text(text): sample for sample, text in splits["train"]}
    if same := [f"{row} is {known[same_text(text)]}" for row, text in splits[guard] if same_text(text) in known]:
        found = f"{pluralize(len(same), 'row')} of guards.{guard} would be trained on: {join_truncated(same)}"
        raise UserError(f"{found}; remove each from the guard or from the training data")
    described = {name: [(sample, describe_text(text)) for sample, text in some] for name, some in splits.items()}
    return [f"guards.{guard}: {row} resembles train {sample}" for _, row, _, sample in near_duplicates(described)]
