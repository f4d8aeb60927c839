"""The files of a dataset's folder: its pictures by name, and the split that a path speaks of."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from stages.core.errors import UserError
from stages.core.given_files import require_own
from stages.kit.data.sources import VALIDATION, Place
from stages.kit.data.texts import UnreadableText, read_text

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Suffixes of the formats that stages.kit.data.images opens."""
MAX_BYTES = 2**30
"""Of one file."""
HELD_OUT = 0.2
"""The share of the pictures that is validated on where a folder has no split for it."""

RawSample = tuple[Place, dict[str, Any] | list[str]]
"""A row for `parse_row`, or every problem that keeps it from being one; and where it was read."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """A folder as it was understood."""

    samples: dict[str, Iterator[RawSample]]
    """`train`, and `val` where the folder has one."""
    validation: str | None
    """Describes the validation split; None if the folder has files for it that need no further words."""
    unused: Sequence[str] = ()
    """Annotation files that belong to no split."""


class Folder:
    """All files of a folder, but those whose names, or whose folders' names, begin with a dot or `__MACOSX`.

    Links to folders are not followed. Paths are relative, written as on every machine.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(self._walk())
        self._read: set[str] = set()
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for path in self.with_suffix(*PICTURES):
            pure = PurePosixPath(path)
            self._by_name[pure.name].append(path)
            if pure.stem != pure.name:
                self._by_name[pure.stem].append(path)

    def _walk(self) -> Iterator[str]:
        for here, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not _hidden(name)]
            for name in names:
                if not _hidden(name):
                    yield Path(here, name).relative_to(self.root).as_posix()

    def with_suffix(self, *suffixes: str) -> list[str]:
        return [path for path in self.files if PurePosixPath(path).suffix.lower() in suffixes]

    def text(self, path: str) -> str:
        """Raises UnreadableText for a file that is no text, too large, or not the folder's own."""
        self._require(path)
        try:
            return read_text(self.root / path)
        except UserError as error:
            raise UnreadableText(error.message) from None

    def head(self, path: str, num_bytes: int = 65_536) -> bytes:
        """The beginning of a file; nothing where it cannot be read."""
        try:
            self._require(path)
            with (self.root / path).open("rb") as file:
                return file.read(num_bytes)
        except (OSError, UnreadableText):
            return b""

    def row(self, path: str, **found: Any) -> dict[str, Any] | list[str]:
        """The raw row of a picture, or why it cannot be read."""
        self._read.add(path)
        try:
            self._require(path)
            encoded = (self.root / path).read_bytes()
        except (OSError, UnreadableText) as error:
            return [f"the picture {path} cannot be read: {error}"]
        return {"image_id": PurePosixPath(path).stem, "image": {"bytes": encoded}, **found}

    def unread(self) -> list[str]:
        """The pictures that no row was made of so far."""
        return [path for path in self.with_suffix(*PICTURES) if path not in self._read]

    def picture(self, name: str, *, near: str) -> str:
        """The one picture of a name, with or without suffix and folders, that an annotation file `near` it speaks of.

        Of several, the one beside that file, then the one whose folders have the same names, `images` for `labels`,
        then the only one of its split. Raises UnreadableText where there is none, or still more than one.
        """
        wanted = PurePosixPath(name.replace("\\", "/"))
        parts = tuple(part for part in wanted.parts if part != ".")
        found = self._by_name.get(wanted.name, []) if parts else []
        length = len(parts) - 1
        found = [path for path in found if PurePosixPath(path).parts[:-1][-length:] == parts[:-1] or not length]
        if len(found) > 1:
            beside = PurePosixPath(near).parent
            exact = [path for path in found if PurePosixPath(path).parent in (beside / wanted.parent, wanted.parent)]
            found = exact or [path for path in found if split_of(path) == split_of(near)] or found
        if len(found) != 1:
            which = f"{len(found)} pictures are called so: {', '.join(found[:3])}" if found else "there is none"
            raise UnreadableText(f"picture {name[:200]!r}: {which}")
        return found[0]

    def _require(self, path: str) -> None:
        try:
            require_own(self.root / path, self.root)
        except UserError as error:
            raise UnreadableText(error.message) from None
        if (size := (self.root / path).stat().st_size) > MAX_BYTES:
            raise UnreadableText(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}")


def _hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


def split_of(path: str) -> str | None:
    """`train`, or one of VALIDATION: the word that the file's name, else the folder nearest to it, has of them.

    Words are runs of letters: instances_train2017.json is of train, and so is train/labels/7.txt.
    """
    words = {"train": "train", "training": "train", "valid": "val", "validation": "val", "testing": "test"}
    words |= {name: name for name in VALIDATION}
    pure = PurePosixPath(path)
    for part in (pure.stem, *reversed(pure.parent.parts)):
        if found := [words[word] for word in re.findall("[a-z]+", part.lower()) if word in words]:
            return found[0]
    return None


def chosen_splits(
    by_split: dict[str | None, list[str]], what: str, read: Callable[[list[str]], Iterator[RawSample]]
) -> Splits:
    """The things to train and to validate on, by their splits, each split read by `read`.

    what: the things, for messages. If no path names a split, all are to train on, and a share is held out.
    """
    validation = next((name for name in VALIDATION if by_split.get(name)), None)
    train = by_split.get("train") or ([] if validation else by_split.get(None, []))
    unused = [one for name, some in by_split.items() for one in some if some is not train and name != validation]
    if validation is None:
        return Splits(samples={"train": read(train)}, validation=held_out_images(), unused=unused)
    samples = {"train": read(train), "val": read(by_split[validation])}
    return Splits(samples=samples, validation=f"the {what} of {validation}", unused=unused)


def held_out_images() -> str:
    return f"{HELD_OUT:.0%} of the images, held out"


def grouped(paths: Iterable[str]) -> dict[str | None, list[str]]:
    """Paths by the split that each speaks of."""
    by_split: dict[str | None, list[str]] = defaultdict(list)
    for path in paths:
        by_split[split_of(path)].append(path)
    return by_split


def objects(bboxes: Sequence[Any], names: Sequence[Any]) -> dict[str, list[Any]]:
    return {"bbox": list(bboxes), "category_name": list(names)}
