"""What this process has resident, and what is left for it: a CPU's allocator keeps no account as a GPU's does."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

# Where control groups are mounted, and what each version calls its limit, its use, and within that the file cache that
# gives way first (cgroups(7); Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of Linux).
_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def resident_bytes() -> tuple[int, int]:
    """(now, at most so far): of this process, without the processes that it started."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in lines:  # getrusage's begins with that of the process which started this one
            now, most = (1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))
            return now, most
    now = psutil.Process().memory_info().rss
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return now, max(now, most if sys.platform == "darwin" else 1024 * most)


def free_and_total_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Of the machine, or of the control group around this process that leaves least, as a container does.

    free: what can be had without swapping; file cache gives way.
    """
    machine = psutil.virtual_memory()
    free, total = zip((machine.available, machine.total), *_groups(root), strict=True)
    return min(free), min(total)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(free, limit) of each control group with a limit that this process is in."""
    memberships = root / "proc/self/cgroup"
    if not memberships.exists():  # no Linux
        return
    for line in memberships.read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, limit_name, used_name, cache_name = _V1 if controllers else _V2
        top = root / mounted
        # In a container the group is mounted as the top, under whatever path it has outside.
        group = top / inside.lstrip("/")
        for folder in (group, *group.parents):
            limit = folder / limit_name
            if folder.is_relative_to(top) and limit.exists() and (limit_bytes := limit.read_text().strip()) != "max":
                cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / used_name).read_text()) - int(cache.get(cache_name, 0))
                yield max(int(limit_bytes) - used, 0), int(limit_bytes)
