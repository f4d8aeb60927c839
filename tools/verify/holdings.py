"""What lies in a workspace: which files there are of each output, and what each of them holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, Lineage, combined_digest, digested_files, read_lineage
from stages.core.provenance import PROVENANCE_DIR, Provenance, read_provenance
from stages.kit.launcher.pipeline import DeclaredStage
from tools.verify.hashing import Algorithm, FileDigests, hash_files
from tools.verify.store import Recorded, Store, read_listing

T = TypeVar("T")


class Holdings:
    """Read once, at the start; who asks later is told what was there then."""

    def __init__(
        self, workspace_dir: Path, store: Store, *, begin: Callable[[int], None], advance: Callable[[int], None]
    ) -> None:
        """begin, advance: are told how many bytes there are to read, and that so many more were."""
        self.workspace_dir = workspace_dir
        self.store = store
        self.size_bytes = 0
        self._listed: dict[str, dict[str, Path]] = {}
        self._expected: dict[str, dict[str, str] | None] = {}
        self.lineages = {path.parent: _read(read_lineage, path.parent) for path in self._visible(f"**/{LINEAGE_FILE}")}
        """By folder; what is wrong with it where it cannot be read."""
        self.records = {
            path: _read(read_provenance, path) for path in self._visible(f"{Path(PROVENANCE_DIR).name}/**/*.json")
        }
        """Likewise, by file."""
        self._model_files = {folder: digested_files(folder) for folder in self.lineages}
        self.certificates = [*self._visible("runs/*/merge.json"), *self._visible("builds/*.json")]

        def begin_with(size_bytes: int) -> None:
            self.size_bytes = size_bytes
            begin(size_bytes)

        self.digests: dict[Path, FileDigests] = hash_files(self._wanted(), begin=begin_with, advance=advance)
        data_dir = workspace_dir / "data"
        self.copies = {
            found.md5: path for path, found in self.digests.items() if found.md5 and path.is_relative_to(data_dir)
        }
        """Files of the workspace by their MD5."""

    def files(self, path: str) -> dict[str, Path]:
        """What lies at a path, by name below it, slashes between its parts; the name of a file itself is ""."""
        if path not in self._listed:
            place = self.workspace_dir / path
            if place.is_dir():
                self._listed[path] = {file.relative_to(place).as_posix(): file for file in self.store.listed(place)}
            else:
                self._listed[path] = {"": place} if os.path.lexists(place) else {}
        return self._listed[path]

    def listing(self, path: str) -> dict[str, str]:
        """MD5 by name of what lies at a path, "" for a file that cannot be read; empty where nothing is."""
        return {name: self.digests[file].md5 for name, file in self.files(path).items()}

    def expected(self, output: Recorded) -> dict[str, str] | None:
        """MD5 by name of what dvc.lock has of an output; None where nobody knows that any more."""
        if not output.is_folder:
            return {"": output.md5}
        if output.md5 not in self._expected:
            self._expected[output.md5] = self._read_listing(output)
        return self._expected[output.md5]

    def _read_listing(self, output: Recorded) -> dict[str, str] | None:
        if output.md5 in self.store.objects:
            try:
                return read_listing(self.store.objects[output.md5])
            except (OSError, ValueError, KeyError, TypeError):
                pass
        here = self.listing(output.path)
        return here if here and output.agrees_with(here) else None

    def content(self, path: str) -> str | None:
        """The digest of what lies at a path, as lineages and records have it; None where that cannot be read."""
        place = self.workspace_dir / path
        if place not in self.lineages:
            files = {name: self.digests[file].sha256 for name, file in self.files(path).items()}
            return files.get("") or (combined_digest(files) if files and all(files.values()) else None)
        files = {file.relative_to(place).as_posix(): self.digests[file].sha256 for file in self._model_files[place]}
        return combined_digest(files) if all(files.values()) else None

    def record(self, stage: DeclaredStage) -> Provenance | None:
        """What the launcher wrote down of the stage; None where that is not here, or cannot be read."""
        found = self.records.get(self.workspace_dir / (stage.provenance or ""))
        return found if isinstance(found, Provenance) else None

    def lineage(self, folder: Path) -> Lineage | None:
        found = self.lineages.get(folder)
        return found if isinstance(found, Lineage) else None

    def shown(self, path: Path) -> str:
        """For people: relative to the workspace where it lies in it."""
        return path.relative_to(self.workspace_dir).as_posix() if path.is_relative_to(self.workspace_dir) else str(path)

    def _visible(self, pattern: str) -> list[Path]:
        """Files below data/, without what a killed stage was writing."""
        data_dir = self.workspace_dir / "data"
        found = (path for path in data_dir.glob(pattern) if path.is_file())
        return sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(data_dir).parts))

    def _wanted(self) -> dict[Path, set[Algorithm]]:
        wanted: dict[Path, set[Algorithm]] = {}

        def want(algorithm: Algorithm, *paths: Path) -> None:
            for path in paths:
                wanted.setdefault(path, set()).add(algorithm)

        want("md5", *self.store.objects.values())
        for recorded in (*self.store.outputs, *self.store.sources):
            want("md5", *self.files(recorded.path).values())
        for files in self._model_files.values():
            want("sha256", *files)
        for record in self.records.values():
            for path in record.outputs if isinstance(record, Provenance) else ():
                if self.workspace_dir / path not in self.lineages:
                    want("sha256", *self.files(path).values())
        return wanted


def one_line(error: UserError) -> str:
    """What is wrong, without the command that mends it."""
    return " ".join(error.message.split("; rebuild it with")[0].split()).rstrip("; ")


def _read(read: Callable[[Path], T], path: Path) -> T | str:
    try:
        return read(path)
    except UserError as error:
        return one_line(error)
