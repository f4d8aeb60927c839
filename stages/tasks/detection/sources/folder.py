"""The files of a dataset's folder: its images by name, and the split that a path names."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from stages.core.errors import UserError, join_truncated, listed
from stages.core.given_files import require_own
from stages.core.params.schema import SplitParams
from stages.data.names import composed, plain_name
from stages.data.sources import READ_ON, VALIDATION, Place, named_files
from stages.data.texts import UnreadableText, read_text
from stages.tasks.detection.sources.rows import Row

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".avif")
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
    fields: Counter[str] = field(default_factory=Counter)
    """The unread_fields of RawDataset."""


def _split_at_end(name: str) -> str | None:
    """The split that a name ends with (fruit_train), or else begins with (train_images)."""
    words = re.findall(r"[^\W\d_]+", name.lower())
    return next((SPLIT_WORDS[word] for word in (words[-1:] + words[:1]) if word in SPLIT_WORDS), None)


def _split_that_is_folder(path: PurePosixPath) -> str | None:
    """The split that the nearest folder is named after, digits apart: train2017/a/7.jpg is of train."""
    words = (part.lower().strip("0123456789_-. ") for part in reversed(path.parent.parts))
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def _split_in_folder(path: PurePosixPath) -> str | None:
    return next(filter(None, map(_split_at_end, reversed(path.parent.parts))), None)


def _split_in_name(path: PurePosixPath) -> str | None:
    return _split_at_end(path.stem)


class Folder:
    """All files of a folder, except those with a name, or in a folder, that begins with a dot or `__MACOSX`.

    Links to folders are not followed. Paths are relative, in NFC, with slashes on every machine.
    Raises UserError for two files with equal paths in NFC.
    """

    def __init__(self, root: Path, splits: SplitParams) -> None:
        self.root = root
        self._on_disk: dict[str, str] = {}
        for path in self._walk():
            if self._on_disk.setdefault(composed(path), path) != path:
                raise UserError(f"{root} has two files {path!r}, which differ only in how Unicode composes their names")
        self.files = sorted(self._on_disk)
        self.named = named_files(root, splits)
        """The files that `splits` of the dataset names, by split."""
        self.split_named = {
            composed(path.relative_to(root).as_posix()): split for split, some in self.named.items() for path in some
        }
        """The split of each of these files."""
        self.images = self.with_suffix(*IMAGES)
        self.fields: Counter[str] = Counter()
        self._read: set[str] = set()
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for path in self.images:
            for name in {PurePosixPath(path).name, PurePosixPath(path).stem}:
                self._by_name[name].append(path)
        self._by_plain_name = {plain_name(PurePosixPath(path).name): path for path in self.images}

    def _walk(self) -> Iterator[str]:
        def hidden(name: str) -> bool:
            return name.startswith((".", "__MACOSX"))

        for here, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not hidden(name)]
            yield from (Path(here, name).relative_to(self.root).as_posix() for name in names if not hidden(name))

    def with_suffix(self, *suffixes: str) -> list[str]:
        return [path for path in self.files if PurePosixPath(path).suffix.lower() in suffixes]

    def with_content(self, suffix: str, pattern: bytes) -> list[str]:
        """The files of this suffix with the pattern in their first 64 KiB."""
        return [path for path in self.with_suffix(suffix) if re.search(pattern, self._head(path))]

    def is_image(self, name: str) -> bool:
        """Whether there is an image of this name, with or without suffix."""
        return name in self._by_name

    def similar(self, name: str) -> str | None:
        """An image with a name that differs from this one in case, suffix or percent-encoding alone."""
        return self._by_plain_name.get(plain_name(name))

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

    def row(
        self,
        path: str,
        boxes: Sequence[tuple[str, Any, Any]],
        problems: Sequence[str] = (),
        size: tuple[float, ...] | None = None,
        **more: Any,
    ) -> Row | list[str]:
        """The row of an image, or the reason why it cannot be read. more: further fields of Row."""
        self._read.add(path)
        try:
            encoded = self._own(path).read_bytes()
        except (OSError, UnreadableText) as error:
            return [f"the image {path} cannot be read: {error}"]
        return Row(PurePosixPath(path).stem, encoded, boxes, problems, size, file=path, **more)

    def unread(self) -> list[str]:
        """The images of which no row was made so far."""
        return [path for path in self.images if path not in self._read]

    def image(self, name: str, *, near: str) -> str:
        """The image of a name, with or without suffix and folders, in an annotation file `near` it.

        Of several, the one with most of these folders, which may be of another root; then the one beside that file, or
        else the only one of its split. Raises UnreadableText if there is none, or still more than one.
        """
        wanted = PurePosixPath(composed(name).replace("\\", "/"))
        found = self._by_name.get(wanted.name, [])

        def folders_shared(path: str) -> int:
            pairs = zip(reversed(PurePosixPath(path).parts), reversed(wanted.parts), strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], list(pairs)[1:]))

        most = max(map(folders_shared, found), default=0)
        found = [path for path in found if folders_shared(path) == most]
        if len(found) > 1:
            beside = PurePosixPath(near).parent
            exact = [path for path in found if PurePosixPath(path).parent in (beside / wanted.parent, wanted.parent)]
            found = exact or [path for path in found if self.split_of(path) == self.split_of(near)] or found
        if len(found) != 1:
            similar = self.similar(wanted.name)
            which = f"there is none{f', only {similar}' if similar else ''}"
            which = f"{len(found)} images have this name: {', '.join(found[:3])}" if found else which
            raise UnreadableText(f"image {name[:200]!r}: {which}")
        return found[0]

    def on_disk(self, path: str) -> Path:
        return self.root / self._on_disk[path]

    def _own(self, path: str) -> Path:
        """The file. Raises UnreadableText if it is too large, or outside the folder."""
        found = self.on_disk(path)
        try:
            require_own(found, self.root)
        except UserError as error:
            raise UnreadableText(error.message) from None
        if (size := found.stat().st_size) > MAX_BYTES:
            raise UnreadableText(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}")
        return found

    def split_of(self, path: str) -> str | None:
        """The split of a file of several samples: the one that names it; else `train`, or one of VALIDATION, by a
        folder that is called so, or by words in its own or its folders' names; "unused" if files of that split are
        named, and it is none of them."""
        return self.by_split([path]).popitem()[0]

    def by_split(self, paths: Sequence[str], *, of_samples: bool = False) -> dict[str | None, list[str]]:
        """Paths by the split of each, as split_of.

        of_samples: the paths are of one sample each, named after what they show (train_5.jpg, a locomotive): only a
        folder that is called like a split counts, or words that all of the other folders, or names, have.
        """
        splits: dict[str, str | None] = {path: self.split_named.get(path) for path in paths}
        others = (_split_in_folder, _split_in_name) if of_samples else (_split_in_name, _split_in_folder)
        for clue in (_split_that_is_folder, *others):
            clues = {path: clue(PurePosixPath(path)) for path, split in splits.items() if split is None}
            if not of_samples or clue is _split_that_is_folder or all(clues.values()):
                splits |= {path: "unused" if split in self.named else split for path, split in clues.items()}
        found: dict[str | None, list[str]] = defaultdict(list)
        for path in paths:
            found[splits[path]].append(path)
        return found

    def splits(
        self, paths: dict[str | None, list[str]], what: str, read: Callable[[list[str]], Iterator[RawSample]]
    ) -> Splits:
        """The splits to train, to validate and to test on, each read by `read`.

        paths: by split. what: describes them, for messages. If no path names a split to validate on, a share of the
        images is held out. Raises UserError if all paths are of other splits than `train`.
        """
        tested = {"test": paths.get("test", [])} if "test" in self.named else {}
        validation = next((name for name in VALIDATION if paths.get(name) and name not in tested), None)
        train = paths.get("train") or ([] if validation else paths.get(None, []))
        if not train:
            given = [f"{split or 'no split'}: {join_truncated(some, 3)}" for split, some in paths.items() if some]
            raise UserError(
                f"{self.root} has no {what} to train on; by names of folders and files there are:\n{listed(given)}\n"
                f"Name those of each split: `splits` of the dataset in params.yaml, as {{train: PATTERN}}; {READ_ON}"
            )
        chosen = {"train": train, **({"val": paths[validation]} if validation else {}), **tested}
        read_paths = {path for some in chosen.values() for path in some}
        return Splits(
            samples={split: read(some) for split, some in chosen.items()},
            validation=f"the {what} of {validation}" if validation else None,
            unused=[path for some in paths.values() for path in some if path not in read_paths],
            fields=self.fields,
        )
