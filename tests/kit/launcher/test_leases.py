"""GPU leases: the decision on made-up GPUs, the locks between real processes."""

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stages.core.errors import UserError
from stages.kit.launcher import leases
from stages.kit.launcher.gpus import Gpu
from stages.kit.launcher.leases import POLL_S, SETTLE_S, leased_gpus
from tests import ROOT

GIB = 2**30
NOBODY = 2**30  # no pid is that large


def gpu(index: int, **known: Any) -> Gpu:
    uuid = ("GPU-aaaa0000-01", "GPU-aaaa1111-02", "GPU-bbbb0000-03")[index]
    return Gpu(**{"index": index, "uuid": uuid, "name": "H200", "used_bytes": 0, "total_bytes": 140 * GIB, **known})


def occupied(index: int) -> Gpu:
    return gpu(index, used_bytes=12 * GIB, compute={NOBODY: 11 * GIB})


class Machine:
    """GPUs that change, and a clock that only sleeping moves: at its n-th sleep the n-th of the `events` happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpus: list[Gpu] = []
        self.events: list[Callable[[], object]] = []
        self.now = 0.0
        self.said: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.events:
            self.events.pop(0)()

    def lease(
        self, count: int, *gpus: Gpu, holder: str = "train r1", visible: str | None = None
    ) -> AbstractContextManager[tuple[Gpu, ...]]:
        self.gpus = list(gpus) or self.gpus
        return leased_gpus(count, locks_dir=self.folder / "gpus", holder=holder, visible=visible, say=self.said.append)

    def refused(self, count: int, *gpus: Gpu, **given: Any) -> str:
        """The refusal of a lease."""
        with pytest.raises(UserError) as refusal, self.lease(count, *gpus, **given):
            pass
        return refusal.value.message


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(leases, "read_gpus", lambda: machine.gpus)
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: machine.now, sleep=machine.sleep))
    return machine


def indices(gpus: tuple[Gpu, ...]) -> list[int]:
    return [gpu.index for gpu in gpus]


def test_a_stage_without_gpus_asks_nobody(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "read_gpus", None)
    with machine.lease(0) as gpus:
        assert gpus == ()
    assert not (machine.folder / "gpus").exists()


def test_each_stage_gets_other_empty_gpus_and_those_given_back_are_free_again(machine: Machine) -> None:
    with machine.lease(1, occupied(0), gpu(1), gpu(2)) as first:
        with machine.lease(1) as second:
            assert (first, indices(second)) == ((gpu(1),), [2])
        with pytest.raises(ZeroDivisionError), machine.lease(1) as third:
            assert indices(third) == [2]
            raise ZeroDivisionError  # a stage that fails gives its GPUs back too
    with machine.lease(2) as both:
        assert indices(both) == [1, 2]
    assert (machine.said, machine.now) == ([], 0)


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
def test_gpus_come_from_those_visible_and_in_their_order(
    machine: Machine, visible: str | None, leased: list[int]
) -> None:
    with machine.lease(len(leased), gpu(0), gpu(1), gpu(2), visible=visible) as gpus:
        assert indices(gpus) == leased


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("3", "names '3', which is no GPU here; expected indices or UUIDs of: GPU 0 (H200) GPU-aaaa0000-01, "),
        ("gpu0", "names 'gpu0', which is no GPU"),
        ("G", "names 'G', which is no GPU"),
        ("GPU-c", "names 'GPU-c', which is no GPU"),
        ("GPU-aaaa", "names 'GPU-aaaa', which is 2 GPUs here"),
        ("MIG-1234", "names MIG-1234, a part of a GPU, and a stage leases whole ones."),
        ("", "this machine has 3 GPUs, of which 0 can be used"),
        ("-1,0", "of which 0 can be used"),
    ],
)
def test_what_cuda_visible_devices_does_not_give_is_refused(machine: Machine, visible: str, message: str) -> None:
    assert message in machine.refused(1, gpu(0), gpu(1), gpu(2), visible=visible)


def test_gpus_that_a_batch_system_gave_are_taken_without_a_lease_where_nobody_computes_on_them(
    machine: Machine,
) -> None:
    def given(visible: str, *gpus: Gpu) -> AbstractContextManager[tuple[Gpu, ...]]:
        machine.gpus = list(gpus)
        return leased_gpus(1, locks_dir=None, holder="train r1", visible=visible, say=machine.said.append)

    with given("1", gpu(0), gpu(1)) as gpus, given("1", gpu(0), gpu(1)) as again:  # two nodes, each with its own GPU 1
        assert indices(gpus) == indices(again) == [1]
    with pytest.raises(UserError, match="by processes that hold no lease"), given("0", occupied(0), gpu(1)):
        pass
    assert not (machine.folder / "gpus").exists()


def test_gpus_that_no_stage_can_have_are_named_with_the_reason(machine: Machine) -> None:
    assert "train r1 wants 2 GPUs, and this machine has none" in machine.refused(2)
    lost = Gpu(index=2, uuid="", name="not answering", obstacle="GPU is lost")
    assert machine.refused(2, gpu(0), gpu(1, obstacle="split by MIG"), lost, visible="0,1").splitlines() == [
        "train r1 wants 2 GPUs; this machine has 3 GPUs, of which 1 can be used.",
        "  GPU 1 (H200): split by MIG",
        "  GPU 2 (not answering): GPU is lost",
        "Set a profile that wants fewer in params.yaml, or change CUDA_VISIBLE_DEVICES.",
    ]


def nothing() -> None:
    pass


def test_a_stage_is_waited_for_however_long_and_named_once_until_that_changes(machine: Machine) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(machine.lease(1, gpu(0), holder="train r2"))
    machine.gpus = [occupied(0)]  # by that stage

    def change_hands() -> None:
        first.close()
        machine.gpus = [gpu(0)]
        second.enter_context(machine.lease(1, holder="merge r3"))

    machine.events = [*[nothing] * (10 * int(SETTLE_S)), change_hands, nothing, second.close]
    with machine.lease(1) as gpus:
        assert indices(gpus) == [0]
    assert not machine.events
    one, other = machine.said
    assert one.startswith(f"waiting for 1 GPU, 0 free: GPU 0 is leased to train r2 (pid {os.getpid()}, since 20")
    assert other.startswith("waiting for 1 GPU, 0 free: GPU 0 is leased to merge r3 (pid")


def test_every_occupied_gpu_has_its_own_time_to_settle(machine: Machine) -> None:
    """GPU 0 is foreign for good; GPU 1 is let go much later by a stage, and is still giving back."""
    other = ExitStack()
    other.enter_context(machine.lease(1, occupied(0), gpu(1), holder="train r2"))
    machine.gpus = [occupied(0), occupied(1)]
    waiting = [nothing] * (2 * int(SETTLE_S))
    machine.events = [*waiting, other.close, nothing, lambda: machine.gpus.__setitem__(1, gpu(1))]
    with machine.lease(1) as gpus:
        assert indices(gpus) == [1]


def test_foreign_processes_are_refused_with_all_that_is_known_of_them(machine: Machine) -> None:
    compute = {os.getpid(): 29 * GIB, NOBODY: None}
    busy = gpu(1, used_bytes=30 * GIB, compute=compute, graphics={NOBODY: None})
    headline, first, *rest = machine.refused(2, gpu(0), busy, gpu(2, used_bytes=5 * GIB)).splitlines()
    assert SETTLE_S <= machine.now <= SETTLE_S + POLL_S
    assert headline == (
        "train r1 wants 2 GPUs; 1 free, 0 leased to other stages, 2 in use by processes that hold no lease:"
    )
    assert first == "  GPU 1 (H200): 30.0 GiB of 140 GiB in use"
    (mine,) = (line for line in rest if line.startswith(f"    pid {os.getpid()}, "))
    assert mine.endswith(f" of {getpass.getuser()}: 29.0 GiB")
    assert Path(psutil.Process().cmdline()[0]).name in mine
    rest.remove(mine)
    assert rest == [
        f"    pid {NOBODY}, command unknown: memory unknown",
        "  GPU 2 (H200): 5.00 GiB of 140 GiB in use",
        "    no process to be seen: it may run in another container",
        "End these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES.",
    ]


def test_a_wait_that_leases_cannot_end_is_refused(machine: Machine) -> None:
    with machine.lease(1, gpu(0)):
        assert "0 free, 1 leased to other stages, 1 in use" in machine.refused(2, gpu(0), occupied(1))


STAGE = """
import signal, subprocess, sys, time
from pathlib import Path
from stages.kit.launcher import leases
from stages.kit.launcher.gpus import Gpu

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored from birth where the tests run in the background
name, count, num_gpus, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
leases.read_gpus = lambda: [Gpu(index=index, uuid=f"GPU-{index}", name="H200") for index in range(num_gpus)]
leases.POLL_S = 0 if what == "turns" else 0.01

def note(text):
    with open("notes", "a") as notes:
        notes.write(f"{name} {text}\\n")

def lease():
    say = lambda line: note(f"says {line}")
    return leases.leased_gpus(count, locks_dir=Path("gpus"), holder=name, visible=None, say=say)

# The ways in which turns could clash are short: without a rest, and often.
for _ in range(100 if what == "turns" else 1):
    with lease() as gpus:
        if what == "worker":
            note(f"pid {subprocess.Popen(['sleep', '600'], close_fds=False).pid}")
        note("has " + " ".join(gpu.uuid for gpu in gpus))
        if what != "turns":
            sys.stdin.readline()
        note("returns")
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that leases `count` of `num_gpus` and keeps them until its input says so."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *, count: int, num_gpus: int, what: str = "hold") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", STAGE, name, str(count), str(num_gpus), what]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

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
    pytest.fail(f"{beginning!r} was never written: {notes(folder)}")


def let_return(stage: subprocess.Popen[str]) -> None:
    _, errors = stage.communicate("\n")
    assert stage.returncode == 0, errors


def num_leases_without_overlap(folder: Path) -> int:
    """Replays the notes; fails where a GPU was given to a stage while another had it."""
    held: dict[str, set[str]] = {}
    num_leases = 0
    for name, what, *uuids in (note.split() for note in notes(folder)):
        if what == "returns":
            del held[name]
        elif what == "has":
            assert not set(uuids) & set().union(*held.values()), notes(folder)
            held[name] = set(uuids)
            num_leases += 1
    assert not held
    return num_leases


def test_two_stages_run_side_by_side_and_a_third_waits_and_says_who_holds(start: Start, tmp_path: Path) -> None:
    holders = [start(name, count=1, num_gpus=2) for name in ("a", "b")]
    both = {wait_for_note(tmp_path, f"{name} has").split()[-1] for name in ("a", "b")}
    assert both == {"GPU-0", "GPU-1"}
    third = start("c", count=1, num_gpus=2)
    said = wait_for_note(tmp_path, "c says")
    assert all(f"is leased to {name} (pid {stage.pid}, " in said for name, stage in zip("ab", holders, strict=True))
    let_return(holders[1])
    freed = wait_for_note(tmp_path, "b has").split()[-1]
    assert wait_for_note(tmp_path, "c has") == f"c has {freed}"
    for stage in (third, holders[0]):
        let_return(stage)
    assert num_leases_without_overlap(tmp_path) == 3


def test_many_turns_neither_overlap_nor_deadlock(start: Start, tmp_path: Path) -> None:
    stages = [start(name, count=count, num_gpus=2, what="turns") for name, count in (("a", 2), ("b", 2), ("c", 1))]
    for stage in stages:
        let_return(stage)
    assert num_leases_without_overlap(tmp_path) == 3 * 100


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
