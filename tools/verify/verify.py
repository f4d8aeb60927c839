"""All that was recorded of a workspace, compared with what is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import UserError, counted
from stages.core.lineage import Lineage
from tools.verify.at_work import require_dvc_at_rest
from tools.verify.damage import Damage, Damages
from tools.verify.holdings import Holdings
from tools.verify.kept_by_dvc import Restorable, check_lock, check_outputs, check_rest_of_cache
from tools.verify.kept_by_git import check_sources
from tools.verify.kept_by_us import check_certificates, check_lineages, check_records
from tools.verify.store import read_store


@dataclass(frozen=True, kw_only=True)
class Verification:
    damages: tuple[Damage, ...]
    """In the order of the pipeline: what lies further down is made from what lies above it."""
    checked: Mapping[str, int]
    """How many there are of what was looked at."""
    size_bytes: int
    absent: int
    """Outputs that dvc.lock has, and that are neither here nor in the cache."""
    has_cache: bool
    restorable: Restorable

    def tally(self) -> str:
        """What was looked at, on one line."""
        return ", ".join(counted(count, what) for what, count in self.checked.items() if count)


def verify(
    workspace_dir: Path,
    *,
    begin: Callable[[int], None] = lambda _: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Verification:
    """Read everything and compare it.

    Needs no git, no cache, and not all of the pipeline: what is not there is not damaged, unless something is there
    that was made of it. begin, advance: are told how many bytes there are to read, and that so many more were.
    Raises UserError where dvc.yaml or dvc.lock cannot be read, or while DVC is at work here.
    """
    require_dvc_at_rest(workspace_dir)
    store = read_store(workspace_dir)
    holdings = Holdings(workspace_dir, store, begin=begin, advance=advance)
    damages = Damages(holdings)
    restorable, absent = check_outputs(holdings, damages)
    check_lock(holdings, damages)
    check_sources(holdings, damages)
    check_rest_of_cache(holdings, damages)
    check_lineages(holdings, damages)
    check_certificates(holdings, damages)
    check_records(holdings, damages)
    if found := damages.in_order():
        require_dvc_at_rest(workspace_dir)  # it may have begun meanwhile
    lineages = [lineage for lineage in holdings.lineages.values() if isinstance(lineage, Lineage)]
    roots = {lineage.root().digest for lineage in lineages}
    return Verification(
        damages=found,
        checked={
            "file": len(holdings.digests),
            "output": len(store.outputs) - absent,
            "cached object": len(store.objects),
            "model folder": len(holdings.lineages),
            "root model": len(roots),
            "certificate": len(holdings.certificates),
            "record": len(holdings.records),
        },
        size_bytes=holdings.size_bytes,
        absent=absent,
        has_cache=store.has_cache,
        restorable=restorable,
    )


def restore(restorable: Restorable) -> None:
    """Put objects back into DVC's cache, each whole, and read-only as DVC has them.

    Raises UserError where one cannot be written.
    """
    for place, source in restorable.items():
        aside = place.with_name(f".{place.name}.partial")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            aside.unlink(missing_ok=True)
            if isinstance(source, bytes):
                aside.write_bytes(source)
            else:
                shutil.copyfile(source, aside)
            aside.chmod(0o444)
            aside.replace(place)
        except OSError as error:
            raise UserError(
                f"{place} cannot be put back: {error.strerror}; where the disk is full or the cache read-only, make "
                f"room for it or have it writable, and type the same command again"
            ) from None
