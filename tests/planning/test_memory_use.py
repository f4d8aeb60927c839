"""Memory of a stage: readings on this CPU and on made-up GPUs, limits of control groups, errors for want of memory."""

import errno
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.core.params.schema import DeviceParams
from stages.planning import memory_use
from stages.planning.memory_use import (
    GpuUse,
    MemoryLog,
    StageMemory,
    free_and_total_bytes,
    recognised_out_of_memory,
)
from tests import ROOT

MIB, GIB = 2**20, 2**30
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def allocate(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Three GPUs in place of torch's account; another process uses 7 GiB of the second. To allocate on one of them."""
    allocated, others = [0, 0, 0], [0, 7 * GIB, 0]
    for name, reading in {
        "device_count": lambda: 3,
        "memory_allocated": lambda gpu: allocated[gpu],
        "max_memory_allocated": lambda gpu: allocated[gpu],
        "mem_get_info": lambda gpu: (24 * GIB - others[gpu] - allocated[gpu], 24 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, reading)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return allocated.__setitem__


def memory_of_a_process() -> tuple[StageMemory, int, int]:
    """With the bytes that it used before and for the model."""
    left_behind = torch.ones(32 * MIB // 4)
    log = MemoryLog(())
    model = torch.ones(128 * MIB // 4)
    log.loaded()
    work = torch.ones(256 * MIB // 4)
    del work
    return log.finish("train", "r1"), left_behind.nbytes, model.nbytes


def test_readings_on_a_cpu_separate_before_model_and_work() -> None:
    # Other tests leave memory in this process. It imports this module, which therefore imports no transformers.
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        memory, left_bytes, model_bytes = fresh.apply(memory_of_a_process)
    assert memory.gpus == 0
    assert memory.used_before_bytes > left_bytes
    # With many cores the kernel's count can be some of each core's pages behind.
    assert memory.used_loaded_bytes - memory.used_before_bytes == pytest.approx(model_bytes, rel=0.3)
    assert memory.peak_bytes > memory.used_loaded_bytes + 180 * MIB
    assert memory.free_loaded_bytes > 0


@pytest.mark.parametrize(
    ("placement", "rank", "num_gpus", "free_gib", "used_gib"),
    [("single", None, 1, 24, 1), ("ddp", "1", 1, 17, 2), ("sharded", "2", 1, 24, 3), ("balanced", None, 3, 65, 6)],
)
def test_a_process_reads_the_gpus_that_it_uses(
    allocate: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    rank: str | None,
    num_gpus: int,
    free_gib: int,
    used_gib: int,
) -> None:
    from stages.models.load import gpus_in_use

    if rank:
        monkeypatch.setenv("LOCAL_RANK", rank)
    log = MemoryLog(gpus_in_use(DeviceParams(kind="cuda", count=3), placement))
    for gpu in range(3):
        allocate(gpu, (gpu + 1) * GIB)
    log.loaded()
    memory = log.finish("train", "r1")
    assert (memory.gpus, memory.used_before_bytes) == (num_gpus, 0)
    assert memory.free_before_bytes == free_gib * GIB
    assert memory.used_loaded_bytes == memory.peak_bytes == used_gib * GIB
    assert memory.free_loaded_bytes == (free_gib - used_gib) * GIB


def test_a_gpus_utilization_power_and_energy_are_sampled_while_a_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, one idle."""
    seconds = count(step=2.0)
    monkeypatch.setattr(memory_use, "SAMPLE_S", 0.001)
    monkeypatch.setattr(memory_use, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(torch.cuda, "utilization", [90, 10].__getitem__)
    monkeypatch.setattr(torch.cuda, "power_draw", [300_000, 60_000].__getitem__)
    with GpuUse(range(2)) as use:
        while use._seconds < 20:
            time.sleep(0.001)
    found = use.totals()
    assert (found["gpu_utilization"], found["gpu_watts"]) == (0.5, 360)
    assert found["gpu_kwh"] == pytest.approx(360 * use._seconds / 3.6e6, abs=1e-6)


def test_nothing_is_said_of_a_cpu_nor_where_nvml_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(memory_use, "SAMPLE_S", 0.001)
    monkeypatch.setattr(torch.cuda, "utilization", unknown)
    for gpus in (range(0), range(1)):
        with GpuUse(gpus) as use:
            time.sleep(0.01)
        assert use.totals() == {}


def test_the_resident_peak_excludes_the_parent_process() -> None:
    """getrusage's peak does not: fork and exec hand it on."""
    taken = bytearray(b"x" * (256 * MIB))
    code = "from stages.planning.memory_use import resident_bytes; print(*resident_bytes())"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    now, peak = map(int, child.stdout.split())
    assert 0 < now <= peak < 128 * MIB < len(taken)


def write_group(folder: Path, names: tuple[str, str, str], limit: object, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cache}\n")


def write_memberships(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(0, 999), st.integers(0, 99)), min_size=1, max_size=4))
def test_the_tightest_of_nested_groups_counts(
    tmp_path_factory: pytest.TempPathFactory, groups: list[tuple[int, int, int]]
) -> None:
    """Each (limit, used, file cache within) in MiB, from the outermost in."""
    root = tmp_path_factory.mktemp("root")
    write_memberships(root, "1:name=systemd:/elsewhere", "0::/" + "/".join(map(str, range(len(groups)))))
    folder = root / "sys/fs/cgroup"
    for depth, (limit, used, cache) in enumerate(groups):
        folder /= str(depth)
        write_group(folder, V2, limit * MIB, used * MIB, cache * MIB)
    free, total = free_and_total_bytes(root)
    assert total == MIB * min(limit for limit, _, _ in groups)
    assert free == MIB * min(max(limit - (used - cache), 0) for limit, used, cache in groups)


@pytest.mark.parametrize(
    ("line", "group", "names"),
    [
        ("0::/", "sys/fs/cgroup", V2),
        # In a container its own group is the top, under whatever path it has on the host.
        ("0::/../../system.slice/docker-aa.scope", "sys/fs/cgroup", V2),
        ("9:cpu,memory:/docker/aa", "sys/fs/cgroup/memory", V1),
        ("9:memory:/docker/aa", "sys/fs/cgroup/memory/docker/aa", V1),
    ],
)
def test_a_containers_limit_is_found(tmp_path: Path, line: str, group: str, names: tuple[str, str, str]) -> None:
    write_memberships(tmp_path, "11:cpuset:/not/memory", line)
    write_group(tmp_path / group, names, 512 * MIB, 200 * MIB, 50 * MIB)
    assert free_and_total_bytes(tmp_path) == (362 * MIB, 512 * MIB)


@pytest.mark.parametrize(
    ("line", "names", "unlimited"), [("0::/a", V2, "max"), ("4:memory:/a", V1, 2**63 - 4096), (None, V2, 0)]
)
def test_without_a_limit_the_machine_counts(
    tmp_path: Path, line: str | None, names: tuple[str, str, str], unlimited: object
) -> None:
    if line is not None:
        write_memberships(tmp_path, line)
        write_group(tmp_path / "sys/fs/cgroup" / ("a" if names == V2 else "memory/a"), names, unlimited, 5 * MIB)
    assert free_and_total_bytes(tmp_path)[1] == psutil.virtual_memory().total


def loading_error(message: str) -> None:
    """transformers collects the errors of conversions, and raises one that leaves them out."""
    from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

    info = LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(),
        mismatched_keys=set(),
        skipped_pp_keys=set(),
        error_msgs=[],
        conversion_errors={"lm_head.weight": f"Bnb4bitQuantize: {message}"},
    )
    log_state_dict_report(torch.nn.Linear(1, 1), "folder", False, info)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("NCCL Error 1: unhandled cuda error: Cuda failure 2 'out of memory'"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_an_error_for_want_of_memory_has_an_exit_code_of_its_own(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match=r"^out of memory: [^\n]+$") as caught, recognised_out_of_memory():
        raise error
    assert caught.value.exit_code == OUT_OF_MEMORY
    assert caught.value.__cause__ is error


def test_errors_of_torch_on_a_cpu_and_of_quantization_are_recognised() -> None:
    with pytest.raises(OutOfMemory, match="can't allocate memory"), recognised_out_of_memory():
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(OutOfMemory), recognised_out_of_memory():
        loading_error("CUDA out of memory. Tried to allocate 1.02 GiB")
    with pytest.raises(RuntimeError, match="automatic conversion"), recognised_out_of_memory():
        loading_error("blocksize must be a multiple of 64")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("out of memory"),
        UserError("sample 3 has 4096 tokens"),
    ],
)
def test_any_other_error_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, recognised_out_of_memory():
        raise error
    assert caught.value is error
