"""GPUs as a fake driver reports them; leases on made-up GPUs, and their locks between real processes."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from stages.core.errors import UserError
from stages.launcher import gpus as module
from stages.launcher.gpus import POLL_S, SETTLE_S, Gpu, leased_gpus, read_gpus
from tests import ROOT
from tests.launcher.small_checkout import set_gpus

MIB, GIB = 2**20, 2**30
NOBODY = 2**30  # no pid is that large
UUIDS = ("GPU-aaaa0000-01", "GPU-aaaa1111-02", "GPU-bbbb0000-03")


def gpu(index: int, **known: Any) -> Gpu:
    return Gpu(**{"index": index, "uuid": UUIDS[index], "name": "H200", "total_bytes": 140 * GIB, **known})


def in_use(index: int) -> Gpu:
    return gpu(index, processes=(NOBODY,))


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the pynvml of this process. Without GPUs at first."""
    monkeypatch.setenv("FAKE_NVML", set_gpus(tmp_path)["FAKE_NVML"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", importlib.import_module("pynvml"))
    return tmp_path


def test_gpus_are_read_and_a_lost_one_does_not_hide_the_others(driver: Path) -> None:
    assert read_gpus() == ()
    busy = gpu(1, used_bytes=30 * GIB, processes=(11, 12))
    set_gpus(driver, Gpu(index=0, uuid="", name=""), busy)
    assert read_gpus() == (busy,)
    set_gpus(driver, replace(busy, minor=3), failing={"nvmlDeviceGetMinorNumber": pynvml.NVML_ERROR_NOT_SUPPORTED})
    assert [gpu.minor for gpu in read_gpus()] == [-1], "as in WSL, which has no device files"


def test_missing_driver_means_no_gpus_and_a_broken_one_is_refused(driver: Path) -> None:
    for code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        set_gpus(driver, gpu(0), failing={"nvmlInit": code})
        assert read_gpus() == ()
    set_gpus(driver, gpu(0), failing={"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    with pytest.raises(UserError, match=r"version mismatch.*nvidia-smi$"):
        read_gpus()


class Machine:
    """GPUs that change, and a clock that only sleeping moves: at its n-th sleep the n-th of the `events` happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpus: list[Gpu] = []
        self.events: list[Callable[[], object]] = []
        self.now = 0.0
        self.lines: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.events:
            self.events.pop(0)()

    def lease(
        self, count: int, *gpus: Gpu, holder: str = "train r1", visible: str | None = None
    ) -> AbstractContextManager[tuple[Gpu, ...]]:
        self.gpus = list(gpus) or self.gpus
        return leased_gpus(count, locks_dir=self.folder / "gpus", holder=holder, visible=visible)

    def refused(self, count: int, *gpus: Gpu, **given: Any) -> str:
        """The refusal of a lease."""
        with pytest.raises(UserError) as refusal, self.lease(count, *gpus, **given):
            pass
        return refusal.value.message


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(module, "read_gpus", lambda: machine.gpus)
    monkeypatch.setattr(module, "say", machine.lines.append)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: machine.now, sleep=machine.sleep))
    return machine


def indices(gpus: tuple[Gpu, ...]) -> list[int]:
    return [gpu.index for gpu in gpus]


def test_stages_get_different_free_gpus_and_return_them(machine: Machine) -> None:
    with machine.lease(0) as none:
        assert none == ()
    desktop = gpu(1, used_bytes=600 * MIB)
    with machine.lease(1, in_use(0), desktop, gpu(2)) as first:
        with machine.lease(1) as second:
            assert (first, indices(second)) == ((desktop,), [2])
        with pytest.raises(ZeroDivisionError), machine.lease(1) as third:
            assert indices(third) == [2]
            raise ZeroDivisionError  # a stage that fails returns its GPUs too
    with machine.lease(2) as both:
        assert indices(both) == [1, 2]
    assert (machine.lines, machine.now) == ([], 0)


@pytest.mark.parametrize(
    ("visible", "leased"),
    [
        *((None, [0, 1]), (" 2,0", [2, 0]), ("1,1,2", [1, 2]), ("1,-1,2", [1]), ("GPU-b,0", [2, 0])),
    ],
)
def test_visible_gpus_are_leased_in_their_order(machine: Machine, visible: str | None, leased: list[int]) -> None:
    with machine.lease(len(leased), gpu(0), gpu(1), gpu(2), visible=visible) as gpus:
        assert indices(gpus) == leased


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("3", "names '3', which is 0 GPUs here; expected indices or UUIDs of: GPU 0 (H200) GPU-aaaa0000-01, "),
        ("GPU-aaaa", "names 'GPU-aaaa', which is 2 GPUs here"),
        *(("gpu0", "names 'gpu0'"), ("-1,0", "0 of them in CUDA_VISIBLE_DEVICES=-1,0")),
    ],
)
def test_wrong_visible_devices_are_refused(machine: Machine, visible: str, message: str) -> None:
    assert message in machine.refused(1, gpu(0), gpu(1), gpu(2), visible=visible)


def test_gpu_may_settle_when_its_lease_has_ended(machine: Machine) -> None:
    """GPU 0 is foreign for good; GPU 1 is returned much later by a stage; its memory is still being freed."""
    other = ExitStack()
    other.enter_context(machine.lease(1, in_use(0), gpu(1), holder="train r2"))
    machine.gpus = [in_use(0), in_use(1)]
    waiting = [lambda: None] * (2 * int(SETTLE_S))
    machine.events = [*waiting, other.close, lambda: None, lambda: machine.gpus.__setitem__(1, gpu(1))]
    with machine.lease(1) as gpus:
        assert indices(gpus) == [1]


def test_foreign_processes_are_named(machine: Machine) -> None:
    busy = gpu(1, used_bytes=30 * GIB, processes=(os.getpid(), NOBODY))
    with machine.lease(1, gpu(0)):  # which ends too late
        message = machine.refused(2, gpu(0), busy, gpu(2, used_bytes=5 * GIB))
    assert SETTLE_S <= machine.now <= SETTLE_S + POLL_S
    for part in (
        "train r1 wants 2 GPUs; 0 free, 1 leased to other stages, 2 in use",
        f"GPU 1 (H200): 30.0 GiB of 140 GiB in use by pid {os.getpid()} ({psutil.Process().cmdline()[0]}",
        f", pid {NOBODY}\n",
        "GPU 2 (H200): 5.00 GiB of 140 GiB in use by a process that is not listed",
    ):
        assert part in message


HOLDER = f"""
import subprocess, sys, time
from pathlib import Path
from stages.launcher import gpus as module

GPUS = [module.Gpu(index=index, uuid=uuid, name="H200") for index, uuid in enumerate({UUIDS[:2]!r})]
module.read_gpus = lambda: GPUS
module.POLL_S = 0

def lease(count):
    return module.leased_gpus(count, locks_dir=Path("gpus"), holder="a holder", visible=None)

"""


def holder(folder: Path, code: str) -> subprocess.Popen[str]:
    """A process that leases GPUs of a machine with two."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER + code], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE
    )


def test_many_turns_neither_overlap_nor_deadlock(tmp_path: Path) -> None:
    # The moments in which turns could clash are short: without a rest, and often.
    turns = """
for _ in range(100):
    with lease({}) as gpus:
        for gpu in gpus:
            Path(gpu.uuid).touch(exist_ok=False)
        for gpu in gpus:
            Path(gpu.uuid).unlink()
"""
    holders = [holder(tmp_path, turns.format(count)) for count in (2, 2, 1)]
    assert [each.wait() for each in holders] == [0, 0, 0]


def test_killed_holder_frees_its_gpus_though_its_worker_lives_on(machine: Machine, tmp_path: Path) -> None:
    holds = """
with lease(2):
    print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, close_fds=False).pid, flush=True)
    time.sleep(600)
"""
    with holder(tmp_path, holds) as killed:
        assert killed.stdout is not None
        worker = psutil.Process(int(killed.stdout.readline()))
        machine.events = [killed.kill, killed.wait]
        try:
            with machine.lease(2, gpu(0), gpu(1)) as gpus:
                assert indices(gpus) == [0, 1]
                assert worker.is_running()
        finally:
            worker.kill()
    assert "GPU 0 is leased to a holder (pid" in machine.lines[0]
