"""Where a published model comes from: its bases and its data, with the licence of each as far as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stages.core.lineage import Lineage, short
from stages.core.params.schema import Params
from stages.kit.data.prepared import read_origin


@dataclass(frozen=True, kw_only=True)
class Source:
    """A base or a dataset."""

    name: str
    kind: str
    """base or data."""
    source: str
    """`hub:OWNER/NAME@COMMIT` or `folder:PATH`."""
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


def sources_of(model: Lineage, trained_on: Iterable[str], prepared_dir: Path, params: Params) -> tuple[Source, ...]:
    """Every base at an end of the model's lineage, and every dataset that it, or what it was made from, was trained on.

    trained_on: names of datasets. prepared_dir: of the one that the model was evaluated on; its sources are as it
    resolved them, those of others as params.yaml has them.
    """
    found = {("base", root.name): _source_text(root) for root in _roots(model)}
    for name in trained_on:
        own = name == prepared_dir.name
        for part, source in (_resolved(prepared_dir, trained=True) if own else _declared(params, name)).items():
            found[("data", part)] = source if own else found.get(("data", part), source)
    return tuple(_source(kind, name, source, params) for (kind, name), source in found.items())


def evaluated_on(prepared_dir: Path, params: Params) -> tuple[Source, ...]:
    """The dataset, or those that it is a mix of: it validates on all of them."""
    return tuple(_source("data", *each, params) for each in _resolved(prepared_dir, trained=False).items())


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
    return f"folder:{root.source['folder']}"


def _source(kind: str, name: str, source: str, params: Params) -> Source:
    found = Source(name=name, kind=kind, source=source, licence=None)
    return replace(found, licence=params.license_of(found.place))


def _resolved(prepared_dir: Path, *, trained: bool) -> dict[str, str]:
    """The source of a dataset by its name, or of those that it is a mix of. trained: only those that it trains on."""
    origin = read_origin(prepared_dir)
    parts = {name: part.source for name, part in origin.parts.items() if part.asked != 0 or not trained}
    return parts or {prepared_dir.name: origin.source}


def _declared(params: Params, name: str) -> dict[str, str]:
    """The same as params.yaml has it, of what it trains on."""
    dataset = params.dataset(name)
    parts = {part: params.dataset(part).source for part, asked in (dataset.mix or {}).items() if asked != 0}
    return parts or {name: dataset.source}
