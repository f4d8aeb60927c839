"""Near-duplicates between splits: images that look alike, and texts that share most of their words.

An image is described by 256 bits, whether each of its 16 x 16 lowest frequencies is stronger than half of them
(perceptual hash: Zauner, 2010); a text by the smallest 64 hashes of its runs of three words (a bottom-k sketch: Broder,
1997). Both find re-encoded, resized and lightly edited copies. Inputs with too little content are skipped, as
they resemble others without being copies: a blank image or a plain gradient, which lacks most of the frequencies; a
text of fewer than MIN_RUNS runs.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stages.data.texts import same_text

Description = NDArray[np.uint64]
"""Four words of bits for an image; up to SKETCH hashes, ascending, for a text; none for what is not compared."""
P = TypeVar("P")

BITS_WORDS = 4
MAX_BITS = 64
"""Bits of 256 in which the descriptions of two copies of an image may differ. Different photographs differ in 128 +-
9, and at least in 86 over 120,000 pairs; docs/data.md has the shares of the copies that are found."""
FREQUENCIES = np.cos(np.pi / 64 * (np.arange(64) + 0.5) * np.arange(16)[:, None])
"""(16, 64) The lowest of the discrete cosine transform (DCT-II) of 64 values, not scaled."""
MIN_SHARE = 0.8
"""Share of their runs that two copies of a text have in common."""
MIN_RUNS, SKETCH = 20, 64
TOO_COMMON = 200
"""A run of more texts than this is a phrase of the corpus, and no sign of a copy."""


def describe_image(image: Image.Image) -> Description:
    small = np.asarray(image.convert("L").resize((64, 64), Image.Resampling.BOX), dtype=np.float64)
    strengths = (FREQUENCIES @ small @ FREQUENCIES.T).round()  # (16, 16); what is 0 is 0 on every machine
    if np.count_nonzero(strengths) < strengths.size // 2:
        return np.empty(0, dtype=np.uint64)
    return np.packbits(strengths > np.median(strengths)).view(np.uint64)


def describe_text(*texts: str) -> Description:
    words = same_text(" ".join(texts)).split()
    runs = {" ".join(words[place : place + 3]) for place in range(len(words) - 2)}
    if len(runs) < MIN_RUNS:
        return np.empty(0, dtype=np.uint64)
    hashes = (hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs)
    return np.sort(np.frombuffer(b"".join(hashes), dtype=np.uint64))[:SKETCH]


def near_duplicates(splits: Mapping[str, Sequence[tuple[P, Description]]]) -> Iterator[tuple[str, P, str, P]]:
    """Each sample that resembles one of an earlier split: its split and place, and those of the first such sample."""
    images: list[tuple[str, P, Description]] = []
    texts: list[tuple[str, P, Description]] = []
    holders: dict[int, list[int]] = defaultdict(list)
    for split, described in splits.items():
        bits = np.array([each for _, _, each in images], dtype=np.uint64).reshape(-1, BITS_WORDS)
        for place, own in described:
            found = None
            if len(own) == BITS_WORDS:
                differing = np.bitwise_count(bits ^ own).sum(axis=1)
                found = images[int(differing.argmin())] if len(bits) and differing.min() <= MAX_BITS else None
            elif len(own):
                shared = Counter(other for run in own.tolist() for other in holders.get(run, ())[:TOO_COMMON])
                likely = (texts[other] for other, count in sorted(shared.items()) if count > len(own) // 2)
                found = next((text for text in likely if _share(own, text[2]) >= MIN_SHARE), None)
            if found is not None:
                yield split, place, found[0], found[1]
        for place, own in described:
            if len(own) == BITS_WORDS:
                images.append((split, place, own))
            elif len(own):
                texts.append((split, place, own))
                for run in own.tolist():
                    holders[run].append(len(texts) - 1)


def _share(one: Description, other: Description) -> float:
    """Estimated Jaccard similarity of the runs of two texts: of the smallest hashes of both, those that both have."""
    smallest = np.union1d(one, other)[:SKETCH]
    return float(np.isin(smallest, np.intersect1d(one, other)).mean())
