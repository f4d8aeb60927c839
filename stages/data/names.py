"""Names of files, compared as a person reads them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath
from urllib.parse import unquote

from stages.core.records import nearest


def composed(name: str) -> str:
    """The name in NFC. Archives unpacked on macOS have `é` as two characters, which look like the one."""
    return unicodedata.normalize("NFC", name)


def similar_name(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'Ly.JPG'?)` for a name that none of `names` has, or nothing: first one that differs in case, in
    suffix or in percent-encoding alone, then the nearest by spelling."""
    known = list(names)
    same = [each for each in known if plain_name(each) == plain_name(name)]
    return f" (did you mean {same[0]!r}?)" if same else nearest(name, known)


def plain_name(name: str) -> str:
    """Equal for names that differ in case, in suffix or in percent-encoding alone."""
    return PurePosixPath(unquote(composed(name))).with_suffix("").as_posix().casefold() if name.strip("/.") else name
