"""Is what the stages recorded of each other's work true? Lineages to their roots, certificates, records of provenance.

Where something is damaged by itself, whatever refers to it need not agree with it, and is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, Lineage, short
from stages.kit.mixture.certificate import read_build_certificate
from stages.kit.models.certificate import read_certificate
from tools.verify.damage import Damages
from tools.verify.holdings import Holdings, one_line


def check_lineages(holdings: Holdings, damages: Damages) -> None:
    """Each model folder holds what its lineage says, and so do those that it was made from."""
    for folder, lineage in holdings.lineages.items():
        shown = holdings.shown(folder)
        if not isinstance(lineage, Lineage):
            damages.blame(shown, lineage)
            continue
        now = holdings.content(shown)
        if now is None:
            damages.blame(shown, "has files that cannot be read")
        elif now != lineage.digest:
            damages.blame(shown, f"its lineage has content {short(lineage.digest)}, but it holds {short(now)}")
    sound = [folder for folder in holdings.lineages if not damages.touch(holdings.shown(folder))]
    for folder in sorted(sound, key=lambda folder: _generation(holdings.lineage(folder))):
        _check_parents(holdings, damages, folder)


def _generation(lineage: Lineage | None) -> int:
    """How far it is from its root: what is wrong with a parent is found before what was made of it is looked at."""
    parents = lineage.parents.values() if lineage is not None else ()
    return 1 + max((_generation(parent.lineage) for parent in parents), default=0)


def _check_parents(holdings: Holdings, damages: Damages, folder: Path) -> None:
    shown, lineage = holdings.shown(folder), holdings.lineage(folder)
    assert lineage is not None, folder
    if not lineage.parents and (lineage.kind != "base" or not lineage.source):
        damages.blame(shown, "its lineage ends without saying where it comes from")
    for role, parent in lineage.parents.items():
        parent_dir = Path(os.path.normpath(folder / parent.path))
        parent_shown = holdings.shown(parent_dir)
        now = holdings.lineage(parent_dir)
        if not (parent_dir / LINEAGE_FILE).is_file():
            damages.miss(parent_shown, role, of=shown)
        elif now is not None and now != parent.lineage and not damages.touch(parent_shown):
            other = f"holds {short(now.digest)}" if now.digest != parent.lineage.digest else "has another lineage"
            was = f"its {role} was {parent_shown} with content {short(parent.lineage.digest)}"
            damages.blame(shown, f"{was}, which now {other}")


def check_certificates(holdings: Holdings, damages: Damages) -> None:
    """Each certifies, without a problem, what the folder beside it holds; no merged or built folder is without."""
    for path in holdings.certificates:
        shown, (folder, read) = holdings.shown(path), _certificate(path)
        try:
            certified, problems = read(path)
        except UserError as error:
            damages.blame(shown, one_line(error))
            continue
        if problems:
            damages.blame(shown, f"certifies a failure: {'; '.join(problems)}")
        lineage = holdings.lineage(folder)
        if lineage is not None and lineage.digest != certified and not damages.touch(holdings.shown(folder)):
            now = f"{holdings.shown(folder)} holds {short(lineage.digest)}"
            damages.blame(shown, f"certifies content {short(certified)}, but {now}")
    certified_dirs = {_certificate(path)[0] for path in holdings.certificates}
    for folder in holdings.lineages:
        lineage = holdings.lineage(folder)
        if lineage is not None and lineage.kind in ("merged", "built") and folder not in certified_dirs:
            path = folder.with_name("merge.json" if lineage.kind == "merged" else f"{folder.name}.json")
            damages.miss(holdings.shown(path), "certificate", of=holdings.shown(folder))


def _certificate(path: Path) -> tuple[Path, Callable[[Path], tuple[str, list[str]]]]:
    """(what it is about, how to read which content it certifies and with what problems)."""
    return (path.with_name("merged"), _of_merge) if path.name == "merge.json" else (path.with_suffix(""), _of_build)


def _of_merge(path: Path) -> tuple[str, list[str]]:
    certificate = read_certificate(path, path.parent.name)
    return certificate.merged_digest, certificate.problems()


def _of_build(path: Path) -> tuple[str, list[str]]:
    certificate = read_build_certificate(path)
    return certificate.built_digest, certificate.problems()


def check_records(holdings: Holdings, damages: Damages) -> None:
    """Each tells of outputs that are as it says, and of inputs that were as the record of their stage says.

    Inputs that were made again since, so that DVC itself takes the stage for out of date, are no damage.
    """
    for file, found in holdings.records.items():
        shown = holdings.shown(file)
        if isinstance(found, str):
            damages.blame(shown, found)
            continue
        for output, digest in found.outputs.items():
            now = holdings.content(output)
            if now is not None and now != digest and not damages.touch(output):
                damages.blame(shown, f"tells of {output} with content {short(digest)}, which now holds {short(now)}")
    told = {
        record.stage: (stage.provenance, record)
        for stage in holdings.store.stages
        if stage.provenance is not None and (record := holdings.record(stage)) is not None
    }
    made = {path: (stage, digest) for stage, (_, record) in told.items() for path, digest in record.outputs.items()}
    for entry in holdings.store.inputs:
        if entry.stage in told and entry.path in made:
            (shown, record), (maker, left) = told[entry.stage], made[entry.path]
            read = record.inputs.get(entry.path, left)
            if read != left and entry.agrees_with(holdings.listing(entry.path)) and not damages.touch(entry.path):
                what = f"tells that {entry.path} had content {short(read)} when it was read"
                damages.blame(shown, f"{what}, and {maker} left {short(left)}: it was damaged then")
