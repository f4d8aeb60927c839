"""The pictures of a line or row, as records keep them: from bytes in a table, or from files beside JSON Lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from stages.core.documents import shown
from stages.core.errors import UserError
from stages.core.given_files import require_own
from stages.kit.data.images import parse_image
from stages.tasks.chat.samples.records import Picture

MAX_BYTES = 2**30
"""Of one file."""


def read_pictures(
    given: Sequence[Any], spots: Sequence[tuple[int, int]], folder: Path | None, max_pixels: int
) -> tuple[list[Picture], list[str]]:
    """The pictures, and everything that is wrong with those that are left out.

    given: as the data have them. spots: where each is shown, as Picture has it; none where that is not known.
    folder: of the file that names pictures by paths relative to it; None for a table, which has their bytes.
    """
    found, problems = [], []
    for index, one in enumerate(given):
        name, encoded = _in_table(one) if folder is None else _in_folder(one, folder)
        if isinstance(encoded, str):
            problems.append(f"picture {index + 1} {encoded}")
            continue
        row = {"image_id": name or f"picture {index + 1}", "image": {"bytes": encoded}}
        fields, wrong = parse_image(row, max_pixels)
        problems += [f"picture {index + 1}: {problem}" for problem in wrong]
        if not wrong and spots:
            message, offset = spots[index]
            found.append(Picture(**fields, message=message, offset=offset))
    return found, problems


def _in_table(one: Any) -> tuple[str, bytes | str]:
    """Name and bytes of a picture, or what is wrong with it."""
    found = one if isinstance(one, dict) else {"bytes": one}
    encoded, path = found.get("bytes"), found.get("path")
    if not isinstance(encoded, bytes) or not encoded:
        return "", f"is {shown(one)}, expected its bytes"
    return path if isinstance(path, str) else "", encoded


def _in_folder(one: Any, folder: Path) -> tuple[str, bytes | str]:
    if not isinstance(one, str) or not one:
        return "", f"is {shown(one)}, expected the path of a file"
    pure = PurePosixPath(one)
    if pure.is_absolute() or ".." in pure.parts:
        return one, f"is {shown(one)}, which leads out of the dataset's folder"
    path = folder / pure
    try:
        require_own(path, folder)
        if (size := path.stat().st_size) > MAX_BYTES:
            return one, f"is {shown(one)}, which has {size:,} bytes, more than {MAX_BYTES:,}"
        return one, path.read_bytes()
    except (UserError, OSError, ValueError):  # ValueError: a name that no file can have
        return one, f"is {shown(one)}, which is no file of the dataset's folder that can be read"
