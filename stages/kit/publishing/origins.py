"""Where a published model comes from: its bases and its data, with the licence of each as far as it is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.core.lineage import Lineage, short
from stages.kit.data.prepared import read_origin


@dataclass(frozen=True, kw_only=True)
class Source:
    """A base or a dataset."""

    name: str
    kind: str
    """base or data."""
    source: str
    """`hub:OWNER/NAME@COMMIT`, `folder:PATH`, `generated`, `generated:KIND` or `random:GEOMETRY`."""
    licence: str | None
    """As params.yaml has it; None where it has none."""

    @property
    def place(self) -> str:
        """The source without its revision: what params.yaml gives a licence to."""
        return self.source.rpartition("@")[0] or self.source

    @property
    def hub(self) -> tuple[str, str] | None:
        """(repository, revision) on the hub; None for another source."""
        kind, _, where = self.source.partition(":")
        name, _, revision = where.partition("@")
        return (name, revision) if kind == "hub" else None

    @property
    def words(self) -> str:
        """The source for people."""
        return f"{self.hub[0]} at {short(self.hub[1])} on the hub" if self.hub else self.source


def sources_of(model: Lineage, prepared_dir: Path, licences: Mapping[str, str]) -> tuple[Source, ...]:
    """Every base at an end of the model's lineage, and every dataset that its last training read.

    licences: by source without revision, as params.yaml has them.
    """
    found = [("base", root.name, _source_text(root)) for root in _roots(model)]
    found += [("data", name, source) for name, source in _data(prepared_dir)]
    made = [Source(name=name, kind=kind, source=source, licence=None) for kind, name, source in dict.fromkeys(found)]
    return tuple(
        Source(name=each.name, kind=each.kind, source=each.source, licence=licences.get(each.place)) for each in made
    )


def lineage_tree(model: Lineage) -> Iterator[Lineage]:
    """A lineage and all that it was made from, itself first."""
    yield model
    for parent in model.parents.values():
        yield from lineage_tree(parent.lineage)


def lineage_lines(model: Lineage, *, role: str = "", depth: int = 0, seen: set[str] | None = None) -> Iterator[str]:
    """A model and what it was made from, a line each, indented by how far back that is; what a model that was named
    before was made from is not said again."""
    seen = set() if seen is None else seen
    source = "".join(f", {key} {value}" for key, value in model.source.items())
    again = model.digest in seen and bool(model.parents)
    seen.add(model.digest)
    name = f"{model.kind} {model.name}, content {short(model.digest)}{source}{', as above' if again else ''}"
    yield f"{'  ' * depth}{role and f'{role}: '}{name}"
    for each, parent in ({} if again else model.parents).items():
        yield from lineage_lines(parent.lineage, role=each, depth=depth + 1, seen=seen)


def _roots(model: Lineage) -> Iterator[Lineage]:
    return (each for each in lineage_tree(model) if not each.parents)


def _source_text(root: Lineage) -> str:
    if "hub" in root.source:
        return f"hub:{root.source['hub']}@{root.source['revision']}"
    return next(f"{kind}:{root.source[kind]}" for kind in ("folder", "random") if kind in root.source)


def _data(prepared_dir: Path) -> Iterator[tuple[str, str]]:
    """(name, source) of a dataset, or of those that it is a mix of."""
    origin = read_origin(prepared_dir, stage=f"prepare@{prepared_dir.name}")
    parts = {name: part.source for name, part in origin.parts.items() if part.asked != 0}
    yield from (parts or {prepared_dir.name: origin.source}).items()
