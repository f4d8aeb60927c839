"""The splits of a folder of images, sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from stages.core.errors import UserError, join_truncated, listed
from stages.data.folder import Folder
from stages.data.sources import READ_ON, VALIDATION, Place
from stages.tasks.detection.sources.rows import NamedBox, Row

RawSample = tuple[Place, Row | list[str]]
"""The place of a sample, and its row, or every problem that keeps it from being one."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The samples of a dataset's splits."""

    samples: dict[str, Iterator[RawSample]]
    """`train`, and `val` and `test` if the dataset has them."""
    validation: str | None = None
    """That of RawDataset."""
    unused_files: Callable[[], Sequence[str]] = tuple
    """That of RawDataset."""


def folder_splits(
    folder: Folder,
    paths: dict[str | None, list[str]],
    what: str,
    read: Callable[[str], Iterable[RawSample]],
) -> Splits:
    """The splits to train, to validate and to test on, each path read by `read`.

    paths: by split. what: describes them, for messages. If no path names a split to validate on, a share of the images
    is held out. Raises UserError if all paths are of other splits than `train`.
    """
    tested = {"test": paths.get("test", [])} if "test" in folder.named_splits else {}
    validation = next((name for name in VALIDATION if paths.get(name) and name not in tested), None)
    train = paths.get("train") or ([] if validation else paths.get(None, []))
    if not train:
        given = [f"{split or 'no split'}: {join_truncated(some, 3)}" for split, some in paths.items() if some]
        raise UserError(
            f"{folder.root} has no {what} to train on; by names of folders and files there are:\n{listed(given)}\n"
            f"Name those of each split: `splits` of the dataset in params.yaml, as {{train: PATTERN}}; {READ_ON}"
        )
    chosen = {"train": train, **({"val": paths[validation]} if validation else {}), **tested}
    others = {*folder.images, *chain(*paths.values())}.difference(*chosen.values())
    return Splits(
        samples={split: samples(some, read) for split, some in chosen.items()},
        validation=f"the {what} of {validation}" if validation else None,
        unused_files=lambda: [*others - folder.found_for.keys()],
    )


def samples(paths: Iterable[str], read: Callable[[str], Iterable[RawSample]]) -> Iterator[RawSample]:
    """The samples of these files; a file that cannot be read, or an image of two samples, is a problem."""
    taken: dict[str, Place] = {}
    for path in paths:
        try:
            for place, row in read(path):
                file = row.file if isinstance(row, Row) else ""
                other = taken.setdefault(file, place) if file else place
                twice = f"the image {file} is that of {other} too; leave one annotation file of it in the folder"
                yield place, row if other == place else [twice]
        except UserError as error:
            yield Place(path), [error.message]


def row_of(
    folder: Folder, name: str, near: str, boxes: Sequence[NamedBox], problems: Sequence[str] = (), **more: Any
) -> Row | list[str]:
    """The row of an image in the file `near` it, or its problems if it is not found. more: further fields of Row."""
    try:
        path, encoded = folder.image(name, near=near)
    except UserError as error:
        return [*problems, error.message]
    return Row(PurePosixPath(path).stem, encoded, boxes, problems, file=path, **more)
