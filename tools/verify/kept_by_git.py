"""Is the data that stages read, and that none makes, still what they read? DVC keeps no copy of it; git may."""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from tools.verify.damage import Damages
from tools.verify.holdings import Holdings
from tools.verify.kept_by_dvc import differing
from tools.verify.store import Recorded


def check_sources(holdings: Holdings, damages: Damages) -> None:
    """Against what dvc.lock has of each, by the stages that read it."""
    changed: dict[str, list[Recorded]] = {}
    for source in holdings.store.sources:
        if not source.agrees_with(holdings.listing(source.path)):
            changed.setdefault(source.path, []).append(source)
    for path, sources in changed.items():
        readers = [source.stage for source in sources]
        found, anew = f"is not what {', '.join(readers)} read", f"dvc repro {' '.join(readers)}"
        committed = _committed(holdings.workspace_dir, path)
        if not all(source.agrees_with(committed) for source in sources):
            damages.add(path, [found], f"{anew}  # or put back what it was, where it was not changed on purpose")
            continue
        # Now it is certain that whatever else lies there does not belong there.
        quoted = shlex.quote(path)
        mend = f"git restore --source=HEAD --staged --worktree -- {quoted}"
        if holdings.listing(path).keys() - committed.keys():
            mend += f" && git clean -fdx -- {quoted}"
        unlike = differing(holdings, path, committed, of="git")
        damages.add(path, [found, *unlike], f"{mend}  # or, where it was changed on purpose: {anew}")


def _committed(workspace_dir: Path, path: str) -> dict[str, str]:
    """MD5 by name of what git's last commit has at a path, as git would write it here; nothing where it has nothing."""
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
