"""GPU leases: the decision on made-up states, the locks between real processes, the reading through the real pynvml."""

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.core.errors import UserError
from stages.kit.launcher.gpus import POLL_S, SETTLE_S, Gpu, GpuProcess, GpuState, leased_gpus
from tests import ROOT
from tests.kit.launcher.fake_nvml import (
    DRIVER_MISMATCH,
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    FakeNvml,
    build_fake_nvml,
)

MIB = 2**20
GIB = 2**30
NOBODY = 2**30  # no pid is that large

UUIDS = ("GPU-aaaa0000-01", "GPU-aaaa1111-02", "GPU-bbbb0000-03")


def state(index: int, **known: Any) -> GpuState:
    gpu = Gpu(index=index, uuid=UUIDS[index], name="NVIDIA H200")
    return replace(GpuState(gpu=gpu, used_bytes=4 * MIB, total_bytes=140 * GIB), **known)


def occupied(index: int) -> GpuState:
    return state(index, used_bytes=12 * GIB, compute=(GpuProcess(pid=NOBODY, used_bytes=11 * GIB),))


def never(*_: object) -> Any:
    pytest.fail("this was not to be called")


Lease = Callable[..., AbstractContextManager[tuple[Gpu, ...]]]


@pytest.fixture
def lease(tmp_path: Path) -> Lease:
    """`leased_gpus` in one folder, on the given GPUs; where it would wait or say something the test must say how."""

    def lease(count: int, *states: GpuState, **given: Any) -> AbstractContextManager[tuple[Gpu, ...]]:
        defaults: dict[str, Any] = {"visible": None, "say": never, "sleep": never, "read_gpus": lambda: states}
        return leased_gpus(count, locks_dir=tmp_path / "gpus", **{"holder": "train r1", **defaults, **given})

    return lease


def indices(gpus: tuple[Gpu, ...]) -> list[int]:
    return [gpu.index for gpu in gpus]


def test_a_stage_without_gpus_asks_nobody(lease: Lease, tmp_path: Path) -> None:
    with lease(0, read_gpus=never) as gpus:
        assert gpus == ()
    assert not (tmp_path / "gpus").exists()


def test_the_first_empty_gpus_are_leased(lease: Lease) -> None:
    with lease(1, occupied(0), state(1), state(2)) as gpus:
        assert gpus == (Gpu(index=1, uuid=UUIDS[1], name="NVIDIA H200"),)


def test_another_stage_gets_other_gpus_and_those_given_back_are_free_again(lease: Lease) -> None:
    with lease(1, state(0), state(1)) as first:
        with lease(1, state(0), state(1)) as second:
            assert (indices(first), indices(second)) == ([0], [1])
        with lease(1, state(0), state(1)) as third:
            assert indices(third) == [1]
    with lease(2, state(0), state(1)) as both:
        assert indices(both) == [0, 1]


def test_a_stage_that_fails_gives_its_gpus_back(lease: Lease) -> None:
    with pytest.raises(ZeroDivisionError), lease(1, state(0)):
        raise ZeroDivisionError
    with lease(1, state(0)) as gpus:
        assert indices(gpus) == [0]


DESKTOP_PROGRAM = GpuProcess(pid=7, used_bytes=300 * MIB)


@pytest.mark.parametrize(
    ("known", "empty"),
    [
        ({}, True),
        ({"compute": (GpuProcess(pid=7, used_bytes=4 * MIB),)}, False),
        ({"used_bytes": 600 * MIB}, False),  # of a process in another container, which is not listed
        ({"used_bytes": 600 * MIB, "graphics": (DESKTOP_PROGRAM,)}, True),
        ({"used_bytes": 600 * MIB, "graphics": (DESKTOP_PROGRAM,), "compute": (DESKTOP_PROGRAM,)}, True),
        ({"used_bytes": 600 * MIB, "draws": True}, True),
        ({"used_bytes": 5 * GIB, "graphics": (DESKTOP_PROGRAM,), "draws": True}, False),
        ({"used_bytes": 600 * MIB, "draws": True, "compute": (DESKTOP_PROGRAM,)}, False),
        ({"used_bytes": None, "total_bytes": None}, True),
        ({"used_bytes": None, "compute": (GpuProcess(pid=7, used_bytes=None),)}, False),
    ],
)
def test_a_gpu_is_empty_where_at_most_a_small_desktop_uses_it(known: dict[str, Any], empty: bool) -> None:
    assert state(0, **known).is_empty == empty


@pytest.mark.parametrize(
    ("visible", "leased"),
    [
        (None, [0, 1]),
        ("2", [2]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1,1,2", [1, 2]),
        ("1,-1,2", [1]),
        ("GPU-bbbb0000-03", [2]),
        ("GPU-b,0", [2, 0]),
    ],
)
def test_gpus_come_from_those_visible_and_in_their_order(lease: Lease, visible: str | None, leased: list[int]) -> None:
    with lease(len(leased), state(0), state(1), state(2), visible=visible) as gpus:
        assert indices(gpus) == leased


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("3", "names '3', which is no GPU here; expected .* GPU 2 .NVIDIA H200. GPU-bbbb0000-03"),
        ("gpu0", "names 'gpu0', which is no GPU"),
        ("G", "names 'G', which is no GPU"),
        ("GPU-c", "names 'GPU-c', which is no GPU"),
        ("GPU-aaaa", "names 'GPU-aaaa', which is 2 GPUs here"),
        ("MIG-1234", "names MIG-1234, a part of a GPU, and a stage leases whole ones.* nvidia-smi -L"),
        ("", "this machine has 3 GPUs, of which 0 can be used"),
        ("-1", "of which 0 can be used"),
        ("-1,0", "of which 0 can be used"),
    ],
)
def test_what_cuda_visible_devices_does_not_give_is_refused(lease: Lease, visible: str, message: str) -> None:
    with pytest.raises(UserError, match=message), lease(1, state(0), state(1), state(2), visible=visible):
        pass


def test_too_few_gpus_are_refused_whoever_holds_them(lease: Lease) -> None:
    with (
        lease(1, state(0)),
        pytest.raises(
            UserError, match=r"train r1 wants 2 GPUs; this machine has 1 GPU\.\nSet a profile that wants fewer"
        ),
        lease(2, state(0)),
    ):
        pass


def test_gpus_that_no_stage_can_have_are_named_with_the_reason(lease: Lease) -> None:
    lost = GpuState(gpu=Gpu(index=2, uuid="", name="not answering"), obstacle="GPU is lost")
    with (
        pytest.raises(UserError) as refusal,
        lease(2, state(0), state(1, obstacle="split by MIG"), lost, visible="0,1"),
    ):
        pass
    assert refusal.value.message.splitlines() == [
        "train r1 wants 2 GPUs; this machine has 3 GPUs, of which 1 can be used.",
        "  GPU 1 (NVIDIA H200): split by MIG",
        "  GPU 2 (not answering): GPU is lost",
        "Set a profile that wants fewer in params.yaml, or change CUDA_VISIBLE_DEVICES.",
    ]


def test_a_machine_without_gpus_is_told_what_is_wanted(lease: Lease) -> None:
    with pytest.raises(UserError, match="train r1 wants 2 GPUs, and this machine has none"), lease(2, visible="0"):
        pass


class FakeTime:
    """A clock that only sleeping moves. At its n-th sleep the n-th of the `events` happens."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self.now = 0.0
        self.events = list(events)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.events:
            self.events.pop(0)()


def nothing() -> None:
    pass


def test_who_is_waited_for_is_said_once_and_again_when_that_changes(lease: Lease) -> None:
    said: list[str] = []
    others, another = ExitStack(), ExitStack()
    others.enter_context(lease(1, state(0), holder="train r2"))

    def change_hands() -> None:
        others.close()
        another.enter_context(lease(1, state(0), holder="merge r3"))

    time = FakeTime(nothing, nothing, change_hands, nothing, another.close)
    with lease(1, state(0), say=said.append, clock=time.clock, sleep=time.sleep) as gpus:
        assert indices(gpus) == [0]
    assert [line.split(",")[0] for line in said] == ["waiting for 1 GPU"] * 2
    assert f"0 free: GPU 0 is leased to train r2 (pid {os.getpid()}, since 20" in said[0]
    assert "GPU 0 is leased to merge r3 (pid" in said[1]


def test_a_stage_is_waited_for_however_long_and_whatever_it_runs(lease: Lease) -> None:
    other = ExitStack()
    other.enter_context(lease(1, state(0)))
    at_work = [True]

    def end() -> None:
        at_work[0] = False
        other.close()

    time = FakeTime(*[nothing] * (10 * int(SETTLE_S)), end)
    seen = {"read_gpus": lambda: [occupied(0) if at_work[0] else state(0)], "say": nothing_said}
    with lease(1, clock=time.clock, sleep=time.sleep, **seen) as gpus:
        assert indices(gpus) == [0]
    assert not time.events


def nothing_said(line: str) -> None:
    """Where a test does not care what is said."""


def test_a_process_that_just_ended_may_give_its_memory_back(lease: Lease) -> None:
    seen = [occupied(0)]
    time = FakeTime(nothing, nothing, lambda: seen.__setitem__(0, state(0)))
    with lease(1, read_gpus=lambda: seen, clock=time.clock, sleep=time.sleep) as gpus:
        assert indices(gpus) == [0]


def test_every_occupied_gpu_has_its_own_time_to_settle(lease: Lease) -> None:
    """GPU 0 is foreign for good; GPU 1 is let go much later by a stage, and is still giving back."""
    other = ExitStack()
    other.enter_context(lease(1, occupied(0), state(1), holder="train r2"))
    seen = [occupied(0), occupied(1)]
    waiting = [nothing] * (2 * int(SETTLE_S))
    time = FakeTime(*waiting, other.close, nothing, lambda: seen.__setitem__(1, state(1)))
    with lease(1, read_gpus=lambda: seen, clock=time.clock, sleep=time.sleep, say=nothing_said) as gpus:
        assert indices(gpus) == [1]


def test_foreign_processes_are_refused_with_all_that_is_known_of_them(lease: Lease) -> None:
    busy = state(
        1,
        used_bytes=30 * GIB,
        compute=(GpuProcess(pid=os.getpid(), used_bytes=29 * GIB), GpuProcess(pid=NOBODY, used_bytes=None)),
        graphics=(GpuProcess(pid=NOBODY, used_bytes=None),),
    )
    unseen = state(2, used_bytes=5 * GIB)
    time = FakeTime()
    with pytest.raises(UserError) as refusal, lease(2, state(0), busy, unseen, clock=time.clock, sleep=time.sleep):
        pass
    assert SETTLE_S <= time.now <= SETTLE_S + POLL_S
    headline, *lines = refusal.value.message.splitlines()
    mine = lines.pop(1)
    assert headline == (
        "train r1 wants 2 GPUs; 1 free, 0 leased to other stages, 2 in use by processes that hold no lease:"
    )
    assert lines == [
        "  GPU 1 (NVIDIA H200): 30.0 GiB of 140.0 GiB in use",
        f"    pid {NOBODY}, command unknown: memory unknown",
        "  GPU 2 (NVIDIA H200): 5.0 GiB of 140.0 GiB in use",
        "    no process to be seen: it may run in another container",
        "End these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES.",
    ]
    assert mine.startswith(f"    pid {os.getpid()}, ")
    assert mine.endswith(": 29.0 GiB")
    if sys.platform == "linux":
        assert f" of {getpass.getuser()}: " in mine
        assert Path(psutil.Process().cmdline()[0]).name in mine


def test_a_wait_that_leases_cannot_end_is_refused(lease: Lease) -> None:
    time = FakeTime()
    with (
        lease(1, state(0)),
        pytest.raises(UserError, match="0 free, 1 leased to other stages, 1 in use"),
        lease(2, state(0), occupied(1), clock=time.clock, sleep=time.sleep, say=nothing_said),
    ):
        pass


STAGE = """
import signal, subprocess, sys, time
from pathlib import Path
from stages.kit.launcher.gpus import Gpu, GpuState, leased_gpus

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored from birth where the tests run in the background
name, count, num_gpus, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
states = [GpuState(gpu=Gpu(index=index, uuid=f"GPU-{index}", name="H200")) for index in range(num_gpus)]

def note(text):
    with open("notes", "a") as notes:
        notes.write(f"{name} {text}\\n")

def lease():
    return leased_gpus(
        count,
        locks_dir=Path("gpus"),
        holder=name,
        visible=None,
        say=lambda line: note(f"says {line}"),
        read_gpus=lambda: states,
        sleep=lambda _: time.sleep(0 if what == "turns" else 0.01),
    )

if what == "turns":
    for _ in range(100):  # the ways in which these could clash are short: without a rest, and often
        with lease() as gpus:
            note("has " + " ".join(gpu.uuid for gpu in gpus))
            note("returns")
else:
    with lease() as gpus:
        if what == "worker":
            note(f"pid {subprocess.Popen(['sleep', '600'], close_fds=False).pid}")
        note("has " + " ".join(gpu.uuid for gpu in gpus))
        sys.stdin.readline()
        note("returns")
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that leases `count` of `num_gpus` and keeps them until it is told to return them."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *, count: int, num_gpus: int, what: str = "hold") -> subprocess.Popen[str]:
        stage = subprocess.Popen(
            [sys.executable, "-c", STAGE, name, str(count), str(num_gpus), what],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(stage)
        return stage

    yield start
    for stage in started:
        stage.kill()
        stage.communicate()


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_note(folder: Path, beginning: str) -> str:
    for _ in range(3000):
        for note in notes(folder):
            if note.startswith(beginning):
                return note
        time.sleep(0.01)
    pytest.fail(f"{beginning!r} never came to be: {notes(folder)}")


def let_return(stage: subprocess.Popen[str]) -> None:
    _, errors = stage.communicate("\n")
    assert stage.returncode == 0, errors


def events(folder: Path) -> list[str]:
    return [note for note in notes(folder) if " says " not in note]


def num_leases_without_overlap(folder: Path) -> int:
    """Replays the notes; fails where a GPU was given to a stage while another had it."""
    held: dict[str, set[str]] = {}
    num_leases = 0
    for note in events(folder):
        name, what, *uuids = note.split()
        if what == "returns":
            del held[name]
        else:
            assert not set(uuids) & set().union(*held.values()), notes(folder)
            held[name] = set(uuids)
            num_leases += 1
    assert not held
    return num_leases


def test_two_stages_run_side_by_side_on_two_gpus(start: Start, tmp_path: Path) -> None:
    first, second = (start(name, count=1, num_gpus=2) for name in ("a", "b"))
    both = {wait_for_note(tmp_path, "a has").split()[-1], wait_for_note(tmp_path, "b has").split()[-1]}
    assert both == {"GPU-0", "GPU-1"}
    let_return(first)
    let_return(second)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_two_stages_that_want_all_gpus_take_turns(start: Start, tmp_path: Path, num_gpus: int) -> None:
    first = start("a", count=num_gpus, num_gpus=num_gpus)
    wait_for_note(tmp_path, "a has")
    second = start("b", count=num_gpus, num_gpus=num_gpus)
    said = wait_for_note(tmp_path, "b says")
    assert f"GPU 0 is leased to a (pid {first.pid}, " in said
    let_return(first)
    wait_for_note(tmp_path, "b has")
    let_return(second)
    assert [note.split()[:2] for note in events(tmp_path)] == [
        ["a", "has"],
        ["a", "returns"],
        ["b", "has"],
        ["b", "returns"],
    ]


def test_many_turns_neither_overlap_nor_deadlock(start: Start, tmp_path: Path) -> None:
    stages = [start(name, count=count, num_gpus=2, what="turns") for name, count in (("a", 2), ("b", 2), ("c", 1))]
    for stage in stages:
        let_return(stage)
    assert num_leases_without_overlap(tmp_path) == 3 * 100


def test_a_third_stage_waits_and_says_who_holds(start: Start, tmp_path: Path) -> None:
    holders = [start(name, count=1, num_gpus=2) for name in ("a", "b")]
    for name in ("a", "b"):
        wait_for_note(tmp_path, f"{name} has")
    third = start("c", count=1, num_gpus=2)
    said = wait_for_note(tmp_path, "c says")
    assert all(f"is leased to {name} (pid {stage.pid}, " in said for name, stage in zip("ab", holders, strict=True))
    let_return(holders[1])
    freed = wait_for_note(tmp_path, "b has").split()[-1]
    assert wait_for_note(tmp_path, "c has") == f"c has {freed}"
    for stage in (third, holders[0]):
        let_return(stage)


def test_a_killed_holder_frees_its_gpus_though_its_worker_lives_on(start: Start, tmp_path: Path) -> None:
    first = start("a", count=2, num_gpus=2, what="worker")
    wait_for_note(tmp_path, "a has")
    worker = psutil.Process(int(wait_for_note(tmp_path, "a pid").split()[-1]))
    try:
        second = start("b", count=2, num_gpus=2)
        wait_for_note(tmp_path, "b says")
        first.kill()
        wait_for_note(tmp_path, "b has")
        assert worker.is_running()
        let_return(second)
    finally:
        worker.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    first = start("a", count=1, num_gpus=1)
    wait_for_note(tmp_path, "a has")
    second = start("b", count=1, num_gpus=1)
    wait_for_note(tmp_path, "b says")
    second.send_signal(number)
    assert second.wait() == -number
    let_return(first)
    assert not any(note.startswith("b has") for note in notes(tmp_path))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


def python(driver: FakeNvml, code: str) -> str:
    """What the code prints, on the driver's machine."""
    return subprocess.run(
        [sys.executable, "-c", f"from stages.kit.launcher.gpus import *\n{code}"],
        env={**os.environ, **driver.environment, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


BUSY = state(
    1,
    used_bytes=30 * GIB,
    draws=True,
    compute=(GpuProcess(pid=11, used_bytes=29 * GIB), GpuProcess(pid=12, used_bytes=None)),
    graphics=(GpuProcess(pid=13, used_bytes=5 * MIB),),
)


def test_what_nvml_says_is_read(driver: FakeNvml) -> None:
    split = GpuState(gpu=state(2).gpu, obstacle="split by MIG; made whole by: nvidia-smi -i 2 -mig 0")
    driver.set_gpus(state(0), BUSY, split)
    assert python(driver, "print(read_gpus())") == repr((state(0), BUSY, split))


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND])
def test_what_a_gpu_does_not_support_speaks_against_nobody(driver: FakeNvml, code: int) -> None:
    queries = ("MigMode", "DisplayActive", "MemoryInfo_v2", "ComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3")
    driver.set_gpus(state(0), BUSY, failing={f"nvmlDeviceGet{query}": code for query in queries})
    assert python(driver, "print(read_gpus())") == repr(
        tuple(GpuState(gpu=known.gpu, draws=True) for known in (state(0), BUSY))
    )


def test_a_lost_gpu_does_not_hide_the_others(driver: FakeNvml) -> None:
    lost = GpuState(gpu=Gpu(index=0, uuid="", name="not answering"), obstacle="GPU is lost")
    driver.set_gpus(lost, state(1))
    assert python(driver, "print(read_gpus())") == repr((lost, state(1)))


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED])
def test_without_a_driver_there_are_no_gpus(driver: FakeNvml, code: int) -> None:
    driver.set_gpus(state(0), failing={"nvmlInitWithFlags": code})
    assert python(driver, "print(read_gpus())") == "()"


def test_a_driver_that_does_not_work_is_the_users_to_mend(driver: FakeNvml) -> None:
    driver.set_gpus(state(0), failing={"nvmlInitWithFlags": DRIVER_MISMATCH})
    message = python(driver, "try: read_gpus()\nexcept UserError as error: print(error)")
    assert "RM has detected an NVML/RM version mismatch" in message
    assert message.endswith("nvidia-smi")


def test_an_empty_gpu_is_leased_through_nvml(driver: FakeNvml, tmp_path: Path) -> None:
    driver.set_gpus(occupied(0), state(1))
    lease = f"leased_gpus(1, locks_dir=Path({str(tmp_path)!r}), holder='train r1', visible='0,1', say=print)"
    assert python(driver, f"with {lease} as gpus: print(gpus)") == repr((state(1).gpu,))


def test_the_launcher_does_not_load_what_only_leases_need() -> None:
    code = "import sys, stages.kit.launcher.gpus; print({'pynvml', 'torch'} & set(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert loaded.stdout == "set()\n"
