"""What the kernel killed for want of memory: it tells nobody but its counters."""

from pathlib import Path

OF_THE_MACHINE = (Path("/proc/vmstat"),)

OF_THIS_CONTAINER = (
    Path("/sys/fs/cgroup/memory.events"),  # cgroup v2
    Path("/sys/fs/cgroup/memory/memory.oom_control"),  # v1
)


def oom_kills(counters: tuple[Path, ...]) -> int:
    """How many processes the kernel's OOM killer has killed so far, by the first of the files that counts them.

    All of them have a line `oom_kill N`; 0 where none does, as on another system than Linux.
    """
    for path in counters:
        if path.exists():
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
