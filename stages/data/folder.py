"""The files of a dataset's folder: its images by name, and the split that a path names."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import filterfalse, takewhile
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from stages.core.errors import UserError
from stages.core.given_files import require_own
from stages.core.params.schema import SplitParams
from stages.data.sources import SPLIT_WORDS, named_files
from stages.data.texts import composed, read_text

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".avif")
"""Suffixes of images; those of a format that stages.data.images does not open are refused by name."""
MAX_BYTES = 2**30
"""Largest file that is read."""
HIDDEN = re.compile(r"\.|__MACOSX").match


class Folder:
    """All files of a folder, except those with a name, or in a folder, that begins with a dot or `__MACOSX`.

    Links to folders are not followed. Paths are relative, in NFC, with slashes on every machine.
    Raises UserError for two files with equal paths in NFC.
    """

    def __init__(self, root: Path, splits: SplitParams) -> None:
        self.root = root
        self.on_disk: dict[str, Path] = {}
        for here, folders, names in os.walk(root):
            folders[:] = filterfalse(HIDDEN, folders)
            for path in (Path(here, name) for name in filterfalse(HIDDEN, names)):
                name = composed(path.relative_to(root).as_posix())
                if self.on_disk.setdefault(name, path) != path:
                    raise UserError(f"{root} has two files {name!r}, which differ only in how Unicode composes them")
        self.files = sorted(self.on_disk)
        self.images = self.with_suffix(*IMAGES)
        named = named_files(root, splits).items()
        self.split_named = {composed(path.relative_to(root).as_posix()): split for path, split in named}
        """The split of each file that `splits` of the dataset names."""
        self.named_splits = {*self.split_named.values()}
        """The splits that it names a file of."""
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for pure in map(PurePosixPath, self.files):
            self._by_name[pure.name].append(str(pure))
        for pure in map(PurePosixPath, self.images):
            self._by_name[pure.stem].append(str(pure))
        self.found_for: dict[str, PurePosixPath] = {}
        """The longest name that each image was found for, of those that were looked for."""
        self._by_plain_name = {plain_name(path): path for path in self.images}
        self.unread = Counter[str]()
        """Counts of the fields of its files that a reader does not read."""

    def with_suffix(self, *suffixes: str) -> list[str]:
        return [path for path in self.files if PurePosixPath(path).suffix.lower() in suffixes]

    def with_content(self, suffix: str, pattern: bytes) -> list[str]:
        """The files of this suffix with the pattern in their first 64 KiB."""
        return [path for path in self.with_suffix(suffix) if re.search(pattern, self._head(path))]

    def _head(self, path: str) -> bytes:
        try:
            with self.path(path).open("rb") as file:
                return file.read(65_536)
        except (OSError, UserError):
            return b""

    def path(self, path: str) -> Path:
        """A file on the disk. Raises UserError if it is too large, or outside the folder."""
        require_own(found := self.on_disk[path], self.root)
        if (size := found.stat().st_size) > MAX_BYTES:
            raise UserError(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}")
        return found

    def text(self, path: str) -> str:
        """Raises UserError for a file that is no text, too large, or outside the folder."""
        return read_text(self.path(path))

    def similar(self, name: str) -> str:
        """`, only B/Ly.JPG` for an image with a name that differs in case, suffix or percent-encoding alone."""
        found = self._by_plain_name.get(plain_name(name))
        return f", only {found}" if found else ""

    def image(self, name: str, *, near: str) -> tuple[str, bytes]:
        """Path and content of the image of a name, with or without suffix and folders, in a file `near` it.

        Of several, the one with most of these folders, which may be of another root; then the one beside that file, or
        else the only one of its split. Raises UserError if there is none, or still more than one, or if it was found
        for a name in other folders, where neither name ends with the other's.
        """
        wanted, beside = PurePosixPath(composed(name).replace("\\", "/")), PurePosixPath(near).parent
        found = self._by_name.get(wanted.name, [])

        def folders_shared(path: str) -> int:
            pairs = zip(reversed(PurePosixPath(path).parent.parts), reversed(wanted.parent.parts), strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        most = max(map(folders_shared, found), default=0)
        found = [path for path in found if folders_shared(path) == most]
        if len(found) > 1:
            exact = [path for path in found if PurePosixPath(path).parent in (beside / wanted.parent, wanted.parent)]
            found = exact or [path for path in found if self.split_of(path) == self.split_of(near)] or found
        if len(found) != 1:
            which = f"{len(found)} images have this name: {', '.join(found[:3])}" if found else "there is none"
            raise UserError(f"image {name[:200]!r}: {which}{'' if found else self.similar(wanted.name)}")
        other = self.found_for.setdefault(found[0], wanted)
        shorter, longer = sorted((wanted, other), key=lambda path: len(path.parts))
        if shorter.parent.parts != longer.parent.parts[len(longer.parts) - len(shorter.parts) :]:
            raise UserError(f"image {name[:200]!r}: there is only {found[0]}, which was found for {str(other)[:200]!r}")
        self.found_for[found[0]] = longer
        try:
            return found[0], self.path(found[0]).read_bytes()
        except OSError as error:
            raise UserError(f"the image {found[0]} cannot be read: {error}") from None

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
        others = (_split_in_folder, _split_in_name) if of_samples else (_split_in_name, _split_in_folder, _within_name)
        for clue in (_split_that_is_folder, *others):
            clues = {path: clue(PurePosixPath(path)) for path, split in splits.items() if split is None}
            if not of_samples or clue is _split_that_is_folder or all(clues.values()):
                splits |= {path: "unused" if split in self.named_splits else split for path, split in clues.items()}
        found: dict[str | None, list[str]] = defaultdict(list)
        for path in paths:
            found[splits[path]].append(path)
        return found


def plain_name(path: str) -> str:
    """Equal for names that differ in case, in suffix or in percent-encoding alone."""
    return PurePosixPath(unquote(composed(path))).stem.casefold()


def _split_that_is_folder(path: PurePosixPath) -> str | None:
    """The split that the nearest folder is named after, digits apart: train2017/a/7.jpg is of train."""
    words = (part.lower().strip("0123456789_-. ") for part in reversed(path.parent.parts))
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def _split_in_folder(path: PurePosixPath) -> str | None:
    return next(filter(None, map(_split_at_end, reversed(path.parent.parts))), None)


def _split_in_name(path: PurePosixPath) -> str | None:
    return _split_at_end(path.stem)


def _within_name(path: PurePosixPath) -> str | None:
    return _split_at_end(path.stem, within=True)


def _split_at_end(name: str, *, within: bool = False) -> str | None:
    """The split that a name ends with (fruit_train), or else begins with (train_images), or else has `within`."""
    words = re.findall(r"[^\W\d_]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower())
    ordered = words[-1:] + words[:1] + words[::-1] * within
    return next((SPLIT_WORDS[word] for word in ordered if word in SPLIT_WORDS), None)
