"""What a process has resident, and what is left for it, by the control groups of both kernels' versions."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.kit.memory_use.resident import free_and_total_bytes, resident_bytes
from tests import ROOT

MIB = 2**20
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def write_group(folder: Path, names: tuple[str, str, str], limit: object, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cache}\n")


def write_memberships(root: Path, *lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    return root


def test_memory_that_was_touched_is_resident_and_the_peak_stays_when_it_is_gone() -> None:
    before, _ = resident_bytes()
    taken = bytearray(b"x" * (64 * MIB))
    during, _ = resident_bytes()
    del taken
    after, most = resident_bytes()
    assert during - before > 48 * MIB
    # The kernel adds each core's last pages to its figures late (mm/memory.c, RSS_STAT).
    assert after < during <= most + MIB


def test_the_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    """getrusage's is: fork and exec hand it on."""
    taken = bytearray(b"x" * (256 * MIB))
    code = "from stages.kit.memory_use.resident import resident_bytes; print(*resident_bytes())"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    now, most = map(int, child.stdout.split())
    assert 0 < now <= most < 128 * MIB < len(taken)


def test_a_machine_without_control_groups_counts_itself(tmp_path: Path) -> None:
    free, total = free_and_total_bytes(tmp_path)
    assert 0 < free <= total == psutil.virtual_memory().total


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(0, 999), st.integers(0, 99)), min_size=1, max_size=4))
def test_the_tightest_of_nested_groups_counts(groups: list[tuple[int, int, int]]) -> None:
    """Each (limit, used, file cache among it) in MiB, from the outermost in."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        inside = "/".join(f"level-{depth}" for depth in range(len(groups)))
        write_memberships(root, "1:name=systemd:/elsewhere", f"0::/{inside}")
        folder = root / "sys/fs/cgroup"
        for depth, (limit, used, cache) in enumerate(groups):
            folder /= f"level-{depth}"
            write_group(folder, V2, limit * MIB, used * MIB, cache * MIB)
        free, total = free_and_total_bytes(root)
    assert total == MIB * min(limit for limit, _, _ in groups)
    assert free == MIB * min(max(limit - (used - cache), 0) for limit, used, cache in groups)


@pytest.mark.parametrize(
    ("line", "group", "names"),
    [
        ("0::/", "sys/fs/cgroup", V2),
        # As a container sees it: its own group is the top, under whatever path it has on the host.
        ("0::/../../system.slice/docker-aa.scope", "sys/fs/cgroup", V2),
        ("9:cpu,memory:/docker/aa", "sys/fs/cgroup/memory", V1),
        ("9:memory:/docker/aa", "sys/fs/cgroup/memory/docker/aa", V1),
    ],
)
def test_a_containers_limit_is_found(tmp_path: Path, line: str, group: str, names: tuple[str, str, str]) -> None:
    write_memberships(tmp_path, "11:cpuset:/nothing/to/say", line)
    write_group(tmp_path / group, names, 512 * MIB, 200 * MIB, 50 * MIB)
    assert free_and_total_bytes(tmp_path) == (362 * MIB, 512 * MIB)


@pytest.mark.parametrize(("line", "names", "unlimited"), [("0::/a", V2, "max"), ("4:memory:/a", V1, 2**63 - 4096)])
def test_a_group_without_a_limit_counts_for_nothing(
    tmp_path: Path, line: str, names: tuple[str, str, str], unlimited: object
) -> None:
    write_memberships(tmp_path, line)
    write_group(tmp_path / "sys/fs/cgroup" / ("a" if names == V2 else "memory/a"), names, unlimited, 5 * MIB)
    assert free_and_total_bytes(tmp_path)[1] == psutil.virtual_memory().total
