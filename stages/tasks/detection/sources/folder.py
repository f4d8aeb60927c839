"""The files of a dataset's folder: its images by name, and the split that a path names."""

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
from stages.core.params.schema import SplitParams
from stages.data.sources import VALIDATION, Place, named_files
from stages.data.texts import UnreadableText, read_text
from stages.tasks.detection.sources.rows import Row

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Suffixes of images; those of a format that stages.data.images does not open are refused by name."""
MAX_BYTES = 2**30
"""Largest file that is read."""
SPLIT_WORDS = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
SPLIT_WORDS |= {name: name for name in ("train", *VALIDATION)}

RawSample = tuple[Place, Row | list[str]]
"""The place of a sample, and its row, or every problem that keeps it from being one."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The samples of a dataset's splits."""

    samples: dict[str, Iterator[RawSample]]
    """`train`, and `val` and `test` if the dataset has them."""
    validation: str | None = None
    """A description of the validation split, as in RawDataset."""
    unused: Sequence[str] = ()
    """Files that belong to no split."""


class Folder:
    """All files of a folder, except those whose names, or whose folders' names, begin with a dot or `__MACOSX`.

    Links to folders are not followed. Paths are relative, with slashes on every machine.
    """

    def __init__(self, root: Path, splits: SplitParams) -> None:
        self.root = root
        self.files = sorted(self._walk())
        self.named = named_files(root, splits)
        """The files that `splits` of the dataset names, by split."""
        self._split_of = {path.relative_to(root).as_posix(): name for name, some in self.named.items() for path in some}
        self.images = self.with_suffix(*IMAGES)
        self._read: set[str] = set()
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for path in self.images:
            for name in {PurePosixPath(path).name, PurePosixPath(path).stem}:
                self._by_name[name].append(path)

    def _walk(self) -> Iterator[str]:
        def hidden(name: str) -> bool:
            return name.startswith((".", "__MACOSX"))

        for here, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not hidden(name)]
            yield from (Path(here, name).relative_to(self.root).as_posix() for name in names if not hidden(name))

    def with_suffix(self, *suffixes: str) -> list[str]:
        return [path for path in self.files if PurePosixPath(path).suffix.lower() in suffixes]

    def with_content(self, suffix: str, pattern: bytes) -> list[str]:
        """The files of this suffix in whose first 64 KiB the pattern is found."""
        return [path for path in self.with_suffix(suffix) if re.search(pattern, self._head(path))]

    def text(self, path: str) -> str:
        """Raises UnreadableText for a file that is no text, too large, or outside the folder."""
        try:
            return read_text(self._own(path))
        except UserError as error:
            raise UnreadableText(error.message) from None

    def _head(self, path: str) -> bytes:
        try:
            with self._own(path).open("rb") as file:
                return file.read(65_536)
        except (OSError, UnreadableText):
            return b""

    def row(self, path: str, boxes: Sequence[tuple[str, Any, Any]], *rest: Any) -> Row | list[str]:
        """The row of an image, or the reason why it cannot be read. rest: further fields of Row, in their order."""
        self._read.add(path)
        try:
            encoded = self._own(path).read_bytes()
        except (OSError, UnreadableText) as error:
            return [f"the image {path} cannot be read: {error}"]
        return Row(PurePosixPath(path).stem, encoded, boxes, *rest)

    def unread(self) -> list[str]:
        """The images of which no row was made so far."""
        return [path for path in self.images if path not in self._read]

    def image(self, name: str, *, near: str) -> str:
        """The image of a name, with or without suffix and folders, in an annotation file `near` it.

        Of several, the one beside that file, or else the only one of its split. Raises UnreadableText if there is
        none, or still more than one.
        """
        wanted = PurePosixPath(name.replace("\\", "/"))
        parts = tuple(part for part in wanted.parts if part != ".")
        found = self._by_name.get(wanted.name, []) if parts else []
        length = len(parts) - 1
        found = [path for path in found if PurePosixPath(path).parts[:-1][-length:] == parts[:-1] or not length]
        if len(found) > 1:
            beside = PurePosixPath(near).parent
            exact = [path for path in found if PurePosixPath(path).parent in (beside / wanted.parent, wanted.parent)]
            found = exact or [path for path in found if self.split_of(path) == self.split_of(near)] or found
        if len(found) != 1:
            which = f"{len(found)} images have this name: {', '.join(found[:3])}" if found else "there is none"
            raise UnreadableText(f"image {name[:200]!r}: {which}")
        return found[0]

    def _own(self, path: str) -> Path:
        """The file. Raises UnreadableText if it is too large, or outside the folder."""
        found = self.root / path
        try:
            require_own(found, self.root)
        except UserError as error:
            raise UnreadableText(error.message) from None
        if (size := found.stat().st_size) > MAX_BYTES:
            raise UnreadableText(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}")
        return found

    def split_of(self, path: str) -> str | None:
        """The split that names the file; else `train`, or one of VALIDATION: the first such word in the file's name, or
        else in the folder nearest to it; "unused" if all files of that split are named.

        Words are runs of letters: instances_train2017.json is of train, and so is train/labels/7.txt.
        """
        if path in self._split_of:
            return self._split_of[path]
        pure = PurePosixPath(path)
        for part in (pure.stem, *reversed(pure.parent.parts)):
            if found := [SPLIT_WORDS[word] for word in re.findall("[a-z]+", part.lower()) if word in SPLIT_WORDS]:
                return "unused" if found[0] in self.named else found[0]
        return None

    def by_split(self, paths: Iterable[str]) -> dict[str | None, list[str]]:
        """Paths by the split that each names."""
        found: dict[str | None, list[str]] = defaultdict(list)
        for path in paths:
            found[self.split_of(path)].append(path)
        return found

    def splits(
        self, paths: dict[str | None, list[str]], what: str, read: Callable[[list[str]], Iterator[RawSample]]
    ) -> Splits:
        """The splits to train, to validate and to test on, each read by `read`.

        paths: by split. what: describes them, for messages. If no path names a split to validate on, a share of the
        images is held out.
        """
        tested = {"test": paths.get("test", [])} if "test" in self.named else {}
        validation = next((name for name in VALIDATION if paths.get(name) and name not in tested), None)
        train = paths.get("train") or ([] if validation else paths.get(None, []))
        chosen = {"train": train, **({"val": paths[validation]} if validation else {}), **tested}
        read_paths = {path for some in chosen.values() for path in some}
        return Splits(
            samples={split: read(some) for split, some in chosen.items()},
            validation=f"the {what} of {validation}" if validation else None,
            unused=[path for some in paths.values() for path in some if path not in read_paths],
        )
