"""What there is of a recipe's base and data before its stages have run. Nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, read_lineage
from stages.core.params.schema import BuildParams, DatasetParams, Params
from stages.kit.data.prepared import STATS_FILE, Part, read_origin
from stages.kit.models.geometries import PUBLISHED, geometry_config_path


@dataclass(frozen=True, kw_only=True)
class AvailableBase:
    name: str
    source: str
    """As the profile names it."""
    config_dir: Path
    """Holds config.json, the model's geometry."""
    processor_dir: Path | None
    """Holds its tokenizer too; None where that would have to be fetched first."""
    build: BuildParams | None = None
    """What is built from models of this geometry, where the recipe starts from that."""


def root_base(params: Params, recipe: str) -> tuple[str, BuildParams | None]:
    """The base at the end of a recipe's chain of recipes, and the build on the way where there is one."""
    root = params.root(recipe)
    kind, _, name = root.partition("/")
    build = params.build(name) if kind == "builds" else None
    return (build.base if build else root).removeprefix("bases/"), build


def trainable_recipes(params: Params) -> list[str]:
    """Those whose base and data the profile has."""
    bases, datasets = params.active.bases, params.active.datasets
    return [
        name
        for name, recipe in params.recipes.items()
        if root_base(params, name)[0] in bases and recipe.data in datasets
    ]


def available_base(params: Params, recipe: str) -> AvailableBase:
    """Raises UserError where the profile has no such base, or where nobody here knows its geometry."""
    name, build = root_base(params, recipe)
    source = params.base_source(name)
    built = Path("data/bases") / name
    if _built_from(built, source):
        return AvailableBase(name=name, source=source, config_dir=built, processor_dir=built, build=build)
    kind, _, where = source.partition(":")
    if kind == "folder":
        return AvailableBase(name=name, source=source, config_dir=Path(where), processor_dir=Path(where), build=build)
    repo_id = where.partition("@")[0]
    geometry = where if kind == "random" else PUBLISHED.get(repo_id)
    if geometry is None:
        raise UserError(
            f"base {name} of profile {params.profile} is {repo_id}, whose geometry is not known before it is fetched; "
            f"fetch it with: dvc exp run -S profile={params.profile} base@{name}"
        )
    config_dir = geometry_config_path(geometry).parent
    return AvailableBase(name=name, source=source, config_dir=config_dir, processor_dir=None, build=build)


def available_data(params: Params, name: str) -> Path | None:
    """The folder of a prepared dataset; None where there is none, or where it is another profile's."""
    dataset = params.dataset(name)
    folder = Path("data/prepared") / name
    if not (folder / STATS_FILE).exists():
        return None
    found = read_origin(folder, stage=params.prepared_by(name))
    ours = same_source(found.source, dataset.source) and same_parts(params, dataset, found.parts)
    return folder if ours else None


def same_parts(params: Params, dataset: DatasetParams, found: Mapping[str, Part]) -> bool:
    """Whether a mix was made of what the profile has of its parts, and of so much of each."""
    return {name: part.asked for name, part in found.items()} == (dataset.mix or {}) and all(
        same_source(part.source, params.dataset(name).source) for name, part in found.items()
    )


def same_source(found: str, asked: str) -> bool:
    """Whether a source as a stage resolved it is the one that a profile names.

    Of a commit a profile may name the beginning. Where it names a branch, the hub alone knows: that counts as the same.
    """
    if not asked.startswith("hub:"):
        return found == asked
    repo, _, revision = asked.partition("@")
    found_repo, _, commit = found.partition("@")
    return found_repo == repo and (commit.startswith(revision) or not re.fullmatch("[0-9a-f]{7,40}", revision))


def _built_from(folder: Path, source: str) -> bool:
    if not (folder / LINEAGE_FILE).is_file():
        return False
    found = read_lineage(folder).source
    kind = source.partition(":")[0]
    revision = f"@{found['revision']}" if "revision" in found else ""
    return kind in found and same_source(f"{kind}:{found[kind]}{revision}", source)
