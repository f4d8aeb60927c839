"""The base and the data of a recipe before its stages have run. Nothing is fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, read_lineage
from stages.core.params.schema import BuildParams, Params
from stages.kit.data.prepared import STATS_FILE, read_origin
from stages.kit.models.folders import PUBLISHED, geometry_config_path


@dataclass(frozen=True, kw_only=True)
class AvailableBase:
    source: str
    """As the profile names it."""
    config_dir: Path
    """Holds config.json, the model's geometry."""
    processor_dir: Path | None
    """Holds its tokenizer too; None where that would have to be fetched first."""
    build: BuildParams | None
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
    """Raises UserError where the profile has no such base, or where its geometry is not known."""
    name, build = root_base(params, recipe)
    source = params.base_source(name)
    kind, _, where = source.partition(":")
    built = Path("data/bases") / name
    if kind == "folder" or _built_from(built, source):
        folder = built if _built_from(built, source) else Path(where)
        return AvailableBase(source=source, config_dir=folder, processor_dir=folder, build=build)
    repo_id = where.partition("@")[0]
    geometry = where if kind == "random" else PUBLISHED.get(repo_id)
    if geometry is None:
        raise UserError(
            f"base {name} of profile {params.profile} is {repo_id}, whose geometry is not known before it is fetched; "
            f"fetch it with: dvc exp run -S profile={params.profile} base@{name}"
        )
    config_dir = geometry_config_path(geometry).parent
    return AvailableBase(source=source, config_dir=config_dir, processor_dir=None, build=build)


def available_data(params: Params, name: str) -> Path | None:
    """The folder of a prepared dataset; None where there is none, or where it is another profile's.

    A mix is the profile's where it was made of so much of each of the parts that the profile has.
    """
    dataset = params.dataset(name)
    folder = Path("data/prepared") / name
    if not (folder / STATS_FILE).exists():
        return None
    found = read_origin(folder)
    ours = same_source(found.source, dataset.source)
    ours &= {part: taken.asked for part, taken in found.parts.items()} == (dataset.mix or {})
    ours = ours and all(same_source(taken.source, params.dataset(part).source) for part, taken in found.parts.items())
    return folder if ours else None


def same_source(found: str, asked: str) -> bool:
    """Whether a source as a stage resolved it is the one that a profile names.

    A profile may name the beginning of a commit, or a branch, which counts as the same: the hub alone knows.
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
