"""The marks of a memory log, on a CPU for real and on GPUs that are made up."""

import json
import logging
import multiprocessing
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.memory_use import memory_log
from stages.kit.memory_use.memory_log import MemoryLog
from stages.kit.memory_use.stage_memory import StageMemory, stage_memory_path, write_stage_memory
from tests.made_up_records import made_up_reading

MIB, GIB = 2**20, 2**30
CPU = DeviceParams(kind="cpu")


class Gpus:
    """Three of them, one of which somebody else uses, in place of torch's account."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allocated = [0, 0, 0]
        self.peak = [0, 0, 0]
        patch.setattr(torch.cuda, "device_count", lambda: 3)
        patch.setattr(torch.cuda, "memory_allocated", lambda gpu: self.allocated[gpu])
        patch.setattr(torch.cuda, "memory_reserved", lambda gpu: 2 * self.allocated[gpu])
        patch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: self.peak[gpu])
        patch.setattr(torch.cuda, "max_memory_reserved", lambda gpu: 2 * self.peak[gpu])
        others = [0, 7 * GIB, 0]
        patch.setattr(
            torch.cuda, "mem_get_info", lambda gpu: (24 * GIB - others[gpu] - 2 * self.allocated[gpu], 24 * GIB)
        )

    def take(self, gpu: int, size_bytes: int) -> None:
        self.allocated[gpu] += size_bytes
        self.peak[gpu] = max(self.peak[gpu], self.allocated[gpu])


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return Gpus(monkeypatch)


def logged_on_this_cpu() -> tuple[StageMemory, int, int]:
    """A process's memory, and what was left behind in it and loaded into it, in bytes."""
    left_behind = torch.ones(32 * MIB // 4)
    log = MemoryLog(CPU)
    model = torch.ones(128 * MIB // 4)
    log.loaded()
    work = torch.ones(256 * MIB // 4)
    del work
    return log.finish("train", "r1"), left_behind.nbytes, model.nbytes


def test_a_log_tells_what_was_there_before_from_what_loading_and_the_work_took() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as fresh:  # what other tests leave here comes and goes
        memory, left_bytes, model_bytes = fresh.apply(logged_on_this_cpu)
    assert (memory.kind, memory.gpus) == ("cpu_resident", 0)
    before, after, end = memory.before_load, memory.after_load, memory.end
    assert before.held_bytes > left_bytes
    # Where there are many cores, the kernel's count may be some of each core's pages behind.
    assert after.held_bytes - before.held_bytes == pytest.approx(model_bytes, rel=0.3)
    assert end.peak_bytes > after.held_bytes + 180 * MIB
    assert before.peak_bytes <= after.peak_bytes <= end.peak_bytes
    assert 0 < after.free_bytes <= after.total_bytes == before.total_bytes


def test_of_models_loaded_one_after_the_other_the_fullest_moment_counts(
    gpus: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = MemoryLog(DeviceParams(kind="cuda"))
    for size in (2 * GIB, 5 * GIB, 3 * GIB):
        gpus.take(0, size)
        log.loaded()
        gpus.take(0, -size)
    memory = log.finish("build", "moe")
    assert (memory.after_load.held_bytes, memory.after_load.free_bytes) == (5 * GIB, 14 * GIB)
    assert memory.end.held_bytes == 0
    assert [record.message for record in caplog.records] == [
        "memory before loading: 0.00 GiB in tensors on the GPU, 0.00 reserved; 24.00 of 24.00 GiB free",
        "memory after loading: 2.00 GiB in tensors on the GPU, 4.00 reserved; 20.00 of 24.00 GiB left for the work",
        "memory after loading: 5.00 GiB in tensors on the GPU, 10.00 reserved; 14.00 of 24.00 GiB left for the work",
        "memory at its peak: 5.00 GiB in tensors on the GPU, 10.00 reserved",
    ]


@pytest.mark.parametrize(
    ("placement", "rank", "num_gpus", "free_gib", "held_gib"),
    [("single", None, 1, 24, 1), ("ddp", "1", 1, 17, 2), ("sharded", "2", 1, 24, 3), ("balanced", None, 3, 65, 6)],
)
def test_a_process_measures_the_gpus_that_it_uses_and_sees_what_others_left_there(
    gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    rank: str | None,
    num_gpus: int,
    free_gib: int,
    held_gib: int,
) -> None:
    if rank:
        monkeypatch.setenv("LOCAL_RANK", rank)
    log = MemoryLog(DeviceParams(kind="cuda", count=3), placement)
    for gpu in range(3):
        gpus.take(gpu, (gpu + 1) * GIB)
    log.loaded()
    memory = log.finish("train", "r1")
    assert (memory.kind, memory.gpus) == ("cuda_allocated", num_gpus)
    assert memory.before_load.held_bytes == 0
    assert memory.before_load.free_bytes == free_gib * GIB
    assert memory.before_load.total_bytes == num_gpus * 24 * GIB
    assert memory.after_load.held_bytes == memory.end.peak_bytes == held_gib * GIB
    assert memory.after_load.free_bytes == (free_gib - 2 * held_gib) * GIB


def test_too_few_gpus_are_refused_before_one_is_asked() -> None:
    with pytest.raises(UserError, match=r"wants 99 CUDA device\(s\), but"):
        MemoryLog(DeviceParams(kind="cuda", count=99))


def test_it_is_kept_below_the_report_of_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = MemoryLog(CPU)
    log.loaded()
    memory = log.finish("merge", "r1")
    write_stage_memory(memory, task="amr")
    path = stage_memory_path(tmp_path / "data", "amr", name="r1", stage="merge")
    assert json.loads(path.read_text()) == asdict(memory)


def test_the_peak_is_never_less_than_what_was_held_at_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([made_up_reading(5, 5), made_up_reading(9, 8), made_up_reading(7, 8)])
    monkeypatch.setattr(memory_log, "held_on_cpu", lambda: next(moments))
    log = MemoryLog(CPU)
    log.loaded()
    end = log.finish("train", "r1").end
    assert (end.held_bytes, end.peak_bytes, end.peak_reserved_bytes) == (7, 9, 9)
