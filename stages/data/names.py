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
    same = [each for each in known if _plain(each) == _plain(name)]
    return f" (did you mean {same[0]!r}?)" if same else nearest(name, known)


def _plain(name: str) -> str:
    return PurePosixPath(unquote(composed(name))).with_suffix("").as_posix().casefold() if name.strip("/.") else name
