"""Compares the data that stages read, and that no stage makes, with dvc.lock. DVC keeps no copy of it; git may."""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from tools.verify.check_cache import differences
from tools.verify.dvc_files import LockedPath
from tools.verify.findings import Findings
from tools.verify.snapshot import WorkspaceSnapshot


def check_sources(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    changed: dict[str, list[LockedPath]] = {}
    for source in snapshot.sources:
        if not source.matches(snapshot.md5s(source.path)):
            changed.setdefault(source.path, []).append(source)
    for path, sources in changed.items():
        readers = [source.stage for source in sources]
        problem, read_again = f"is not what {', '.join(readers)} read", f"dvc repro {' '.join(readers)}"
        committed = _committed(snapshot.workspace_dir, path)
        if not all(source.matches(committed) for source in sources):
            fix = f"{read_again}  # or put back what it was, where it was not changed on purpose"
            findings.add(path, problem, fix=fix)
            continue
        # git has exactly what was read: files that it does not have do not belong there.
        fix = f"git restore --source=HEAD --staged --worktree -- {shlex.quote(path)}"
        if snapshot.md5s(path).keys() - committed.keys():
            fix += f" && git clean -fdx -- {shlex.quote(path)}"
        fix += f"  # or, where it was changed on purpose: {read_again}"
        findings.add(path, problem, *differences(snapshot, path, committed, of="git"), fix=fix)


def _committed(workspace_dir: Path, path: str) -> dict[str, str]:
    """MD5 by name of the files at a path in git's last commit, as git would write them here; empty without any."""
    try:
        asked = subprocess.run(
            ["git", "archive", "--format=tar", "HEAD", "--", path], cwd=workspace_dir, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = {}
    with tarfile.open(fileobj=io.BytesIO(asked.stdout)) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                name = PurePosixPath(member.name).relative_to(path).as_posix()
                found["" if name == "." else name] = hashlib.md5(file.read(), usedforsecurity=False).hexdigest()
    return found
