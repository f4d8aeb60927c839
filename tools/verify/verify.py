"""Compares a workspace with everything that was recorded of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from stages.core.errors import UserError
from tools.verify.check_cache import check_lock, check_outputs, check_rest_of_cache, check_sources
from tools.verify.check_lineage import check_certificates, check_lineages, check_records
from tools.verify.dvc_files import require_dvc_idle
from tools.verify.findings import Findings
from tools.verify.snapshot import WorkspaceSnapshot

CHECKS = (
    *(check_outputs, check_lock, check_sources, check_rest_of_cache),
    *(check_lineages, check_certificates, check_records),
)


def verify(workspace_dir: Path) -> Findings:
    """Read everything and compare it.

    Needs no git, no cache, and not all of the pipeline: what is missing is no damage, unless something else was made
    from it. Raises UserError where dvc.yaml or dvc.lock cannot be read, or while DVC runs here.
    """
    require_dvc_idle(workspace_dir)
    findings = Findings(WorkspaceSnapshot(workspace_dir))
    for check in CHECKS:
        check(findings.snapshot, findings)
    if findings.in_order():
        require_dvc_idle(workspace_dir)  # it may have started meanwhile
    return findings


def restore(findings: Findings) -> None:
    """Put objects back into DVC's cache, read-only as DVC has them. Raises UserError where one cannot be written."""
    for place, source in findings.restorable.items():
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
