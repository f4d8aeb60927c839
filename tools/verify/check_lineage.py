"""Checks what stages recorded of each other: lineages down to their roots, certificates, records of provenance.

Something that refers to a damaged path need not match it, and is not reported.
"""

from __future__ import annotations

import os
from pathlib import Path

from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, Lineage, short
from stages.kit.mixture.certificate import read_build_certificate
from stages.kit.models.certificate import read_certificate
from tools.verify.findings import Findings
from tools.verify.snapshot import WorkspaceSnapshot, one_line


def check_lineages(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    """Each model folder has the content that its lineage says, and so do the folders that it was made from."""
    sound = {}
    for folder, lineage in snapshot.lineages.items():
        shown = snapshot.shown(folder)
        now = snapshot.content(shown)
        if not isinstance(lineage, Lineage):
            findings.add(shown, lineage)
        elif now is None:
            findings.add(shown, "has files that cannot be read")
        elif now != lineage.digest:
            findings.add(shown, f"its lineage has content {short(lineage.digest)}, but it holds {short(now)}")
        elif not findings.concern(shown):
            sound[folder] = lineage
    # Parents first: whatever was made from a damaged one is left alone.
    for folder, lineage in sorted(sound.items(), key=lambda item: _generation(item[1])):
        _check_parents(snapshot, findings, folder, lineage)


def _generation(lineage: Lineage) -> int:
    """The number of folders from the lineage to its root."""
    return 1 + max((_generation(parent.lineage) for parent in lineage.parents.values()), default=0)


def _check_parents(snapshot: WorkspaceSnapshot, findings: Findings, folder: Path, lineage: Lineage) -> None:
    shown = snapshot.shown(folder)
    if not lineage.parents and (lineage.kind != "base" or not lineage.source):
        findings.add(shown, "its lineage ends without saying where it comes from")
    for role, parent in lineage.parents.items():
        parent_dir = Path(os.path.normpath(folder / parent.path))
        parent_shown = snapshot.shown(parent_dir)
        now = snapshot.lineage(parent_dir)
        if not (parent_dir / LINEAGE_FILE).is_file():
            findings.missing(parent_shown, role, of=shown)
        elif now is not None and now != parent.lineage and not findings.concern(parent_shown):
            other = f"holds {short(now.digest)}" if now.digest != parent.lineage.digest else "has another lineage"
            was = f"its {role} was {parent_shown} with content {short(parent.lineage.digest)}"
            findings.add(shown, f"{was}, which now {other}")


def check_certificates(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    """Each certifies the folder beside it, without a problem; each merged or built folder has one."""
    certified_dirs = set()
    for path in snapshot.certificates:
        shown = snapshot.shown(path)
        folder = path.with_name("merged") if path.name == "merge.json" else path.with_suffix("")
        certified_dirs.add(folder)
        try:
            if path.name == "merge.json":
                merge = read_certificate(path, path.parent.name)
                certified, problems = merge.merged_digest, merge.problems()
            else:
                build = read_build_certificate(path)
                certified, problems = build.built_digest, build.problems()
        except UserError as error:
            findings.add(shown, one_line(error))
            continue
        if problems:
            findings.add(shown, f"certifies a failure: {'; '.join(problems)}")
        lineage = snapshot.lineage(folder)
        if lineage is not None and lineage.digest != certified and not findings.concern(snapshot.shown(folder)):
            now = f"{snapshot.shown(folder)} holds {short(lineage.digest)}"
            findings.add(shown, f"certifies content {short(certified)}, but {now}")
    for folder, found in snapshot.lineages.items():
        if isinstance(found, Lineage) and found.kind in ("merged", "built") and folder not in certified_dirs:
            path = folder.with_name("merge.json" if found.kind == "merged" else f"{folder.name}.json")
            findings.missing(snapshot.shown(path), "certificate", of=snapshot.shown(folder))


def check_records(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    """Each matches the outputs of its stage, and its inputs are those that the stages before it recorded.

    Inputs that were made again since, so that DVC itself takes the stage for out of date, are no damage.
    """
    for file, found in snapshot.records.items():
        if isinstance(found, str):
            findings.add(snapshot.shown(file), found)
            continue
        for output, digest in found.outputs.items():
            now = snapshot.content(output)
            if now is not None and now != digest and not findings.concern(output):
                problem = f"records {output} with content {short(digest)}, which now holds {short(now)}"
                findings.add(snapshot.shown(file), problem)
    records = {
        stage.name: (stage.provenance, record)
        for stage in snapshot.stages
        if stage.provenance is not None and (record := snapshot.record(stage)) is not None
    }
    made = {path: (stage, digest) for stage, (_, record) in records.items() for path, digest in record.outputs.items()}
    for entry in snapshot.inputs:
        if entry.stage in records and entry.path in made:
            (path, record), (maker, left) = records[entry.stage], made[entry.path]
            read = record.inputs.get(entry.path, left)
            if read != left and entry.matches(snapshot.md5s(entry.path)) and not findings.concern(entry.path):
                problem = f"records that {entry.path} had content {short(read)} when it was read"
                findings.add(path, f"{problem}, and {maker} left {short(left)}: it was damaged then")
