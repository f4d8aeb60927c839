"""Compares a workspace with everything that was recorded of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError
from stages.core.lineage import Lineage
from tools.verify.check_cache import Restorable, check_lock, check_outputs, check_rest_of_cache
from tools.verify.check_lineage import check_certificates, check_lineages, check_records
from tools.verify.check_sources import check_sources
from tools.verify.dvc_files import require_dvc_idle
from tools.verify.findings import Finding, Findings
from tools.verify.snapshot import WorkspaceSnapshot


@dataclass(frozen=True, kw_only=True)
class Verification:
    findings: tuple[Finding, ...]
    """In the order of the pipeline: later outputs are made from earlier ones."""
    checked: Mapping[str, int]
    """How many things of each kind were checked."""
    size_bytes: int
    absent: int
    """Outputs of dvc.lock that are neither in the workspace nor in the cache."""
    has_cache: bool
    restorable: Restorable


def verify(workspace_dir: Path) -> Verification:
    """Read everything and compare it.

    Needs no git, no cache, and not all of the pipeline: what is missing is no damage, unless something else was made
    from it. Raises UserError where dvc.yaml or dvc.lock cannot be read, or while DVC runs here.
    """
    require_dvc_idle(workspace_dir)
    snapshot = WorkspaceSnapshot(workspace_dir)
    findings = Findings(snapshot)
    restorable, absent = check_outputs(snapshot, findings)
    check_lock(snapshot, findings)
    check_sources(snapshot, findings)
    check_rest_of_cache(snapshot, findings)
    check_lineages(snapshot, findings)
    check_certificates(snapshot, findings)
    check_records(snapshot, findings)
    if found := findings.in_order():
        require_dvc_idle(workspace_dir)  # it may have started meanwhile
    roots = {lineage.root().digest for lineage in snapshot.lineages.values() if isinstance(lineage, Lineage)}
    return Verification(
        findings=found,
        checked={
            "file": len(snapshot.digests),
            "output": len(snapshot.outputs) - absent,
            "cached object": len(snapshot.objects),
            "model folder": len(snapshot.lineages),
            "root model": len(roots),
            "certificate": len(snapshot.certificates),
            "record": len(snapshot.records),
        },
        size_bytes=snapshot.size_bytes,
        absent=absent,
        has_cache=bool(snapshot.objects),
        restorable=restorable,
    )


def restore(restorable: Restorable) -> None:
    """Put objects back into DVC's cache, read-only as DVC has them. Raises UserError where one cannot be written."""
    for place, source in restorable.items():
        partial = place.with_name(f".{place.name}.partial")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            if isinstance(source, bytes):
                partial.write_bytes(source)
            else:
                shutil.copyfile(source, partial)
            partial.chmod(0o444)
            partial.replace(place)
        except OSError as error:
            raise UserError(
                f"{place} cannot be put back: {error.strerror}; where the disk is full or the cache read-only, make "
                f"room for it or have it writable, and type the same command again"
            ) from None
