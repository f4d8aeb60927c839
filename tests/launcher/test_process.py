"""The process engine, through the real launcher and on stages that follow orders."""

import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from stages.core.environment import pinned_instructions
from stages.core.errors import OUT_OF_MEMORY
from stages.core.signals import handling
from stages.launcher import process
from stages.launcher.engines import ENGINES
from stages.launcher.process import ProcessEngine, oom_kills, wait_for
from tests.launcher.small_checkout import CALLER, Command, commit, notes, request_of, run, small_checkout, wait_until

STAGE = """
import os, signal, subprocess, sys, time

def note(text):
    with open("notes", "a") as notes:
        print(text, file=notes)

what = sys.argv[1]
if what == "exit":
    note("once")
    sys.exit(int(sys.argv[2]))
if what == "signal":
    os.kill(os.getpid(), int(sys.argv[2]))
if what == "report":
    note(os.getcwd())
    note(sys.executable)
    note(os.environ.get("GITHUB_TOKEN"))
    note(os.environ.get("ATEN_CPU_CAPABILITY"))
    note(sys.argv[2:])
if what == "wait":
    if "saving" in sys.argv:
        def save(number, frame):
            note(f"signal {number}")
            sys.exit(75)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, save)
    if "worker" in sys.argv:
        note(f"pid {subprocess.Popen(['sleep', '600']).pid}")
    note(f"pid {os.getpid()}")
    note("ready")
    time.sleep(600)
"""
WAITING_CALLER = "import subprocess, sys; subprocess.run(sys.argv[1:])"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of a parent")

Start = Callable[..., Command]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A checkout with STAGE as its train stage, in a folder with a space in its name. It has no .venv."""
    workspace = small_checkout(tmp_path / "a workspace", train=STAGE)
    (workspace / ".venv").unlink()
    return workspace


@pytest.fixture
def start(workspace: Path, tmp_path: Path) -> Iterator[Start]:
    """Calls docker/run from another folder, with this test's own Python; kills what is left at the end."""
    started = []

    def start(*args: str, **environment: str) -> Command:
        started.append(Command(workspace, workspace / "docker/run", *args, env=CALLER | environment, cwd=tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.process.kill()
        command.process.wait()
    for pid in noted_pids(workspace):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def noted_pids(workspace: Path) -> list[int]:
    return [int(note.removeprefix("pid ")) for note in notes(workspace) if note.startswith("pid ")]


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def started_and_ready(start: Start, workspace: Path, *args: str, **environment: str) -> Command:
    launcher = start("train", "wait", *args, **environment)
    wait_until(lambda: "ready" in notes(workspace), lambda: launcher.output)
    return launcher


def test_exit_code_is_the_stages_and_a_failure_is_not_repeated(start: Start, workspace: Path) -> None:
    assert start("train", "exit", "3").ended() == 3
    assert start("train", "signal", "9").ended() == 128 + 9
    assert notes(workspace).count("once") == 1


@pytest.mark.parametrize("instructions", ["avx2", "native"])
def test_stage_has_its_own_options_workspace_and_instructions_and_no_secret(
    start: Start, workspace: Path, instructions: str
) -> None:
    (settings := workspace / "params.yaml").write_text(
        re.sub(r"memory: \{", f"memory: {{instructions: {instructions}, ", settings.read_text())
    )
    assert start("train", "report", "--help", "-x", GITHUB_TOKEN="secret").ended() == 0
    held = {"native": {}, "avx2": pinned_instructions({})}[instructions].get("ATEN_CPU_CAPABILITY")
    here = [str(workspace), str(Path(sys.prefix) / "bin/python")]
    assert notes(workspace) == [*here, "None", str(held), "['--help', '-x']"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signal_reaches_the_stage_once_and_it_ends_its_own_way(
    start: Start, workspace: Path, number: signal.Signals
) -> None:
    launcher = started_and_ready(start, workspace, "saving")
    launcher.process.send_signal(number)
    assert launcher.ended() == 75
    assert notes(workspace)[-1] == f"signal {int(number)}"


@pytest.mark.parametrize(
    ("number", "what"), [(signal.SIGTERM, "worker"), pytest.param(signal.SIGKILL, "saving", marks=ON_LINUX)]
)
def test_ended_launcher_leaves_no_process(start: Start, workspace: Path, number: signal.Signals, what: str) -> None:
    launcher = started_and_ready(start, workspace, what)
    launcher.process.send_signal(number)
    assert launcher.ended() == (128 + number if what == "worker" else -number)
    wait_until(lambda: all(map(is_gone, noted_pids(workspace))))
    assert (notes(workspace)[-1] == f"signal {int(signal.SIGTERM)}") == (what == "saving")


def test_a_signal_that_interrupts_no_wait_is_handled_at_once() -> None:
    """It comes to another thread here; the same happens to one that comes just before the wait begins."""
    main, child = threading.get_ident(), subprocess.Popen(["sleep", "600"])

    def signal_this_thread() -> None:
        while sys._current_frames()[main].f_code.co_name not in ("_try_wait", "_wait"):
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    with handling(lambda *_: child.terminate()):
        threading.Thread(target=signal_this_thread).start()
        assert wait_for(child) == 128 + signal.SIGTERM


@ON_LINUX
@pytest.mark.parametrize(("environment", "ends"), [({"DVC_STAGE": "train@r1"}, True), ({}, False)])
def test_stage_ends_with_dvc_but_not_with_its_shell(
    workspace: Path, start: Start, environment: dict[str, str], ends: bool
) -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", WAITING_CALLER, workspace / "docker/run", "train", "wait"],
        env={**CALLER, **environment},
    )
    wait_until(lambda: "ready" in notes(workspace))
    (stage,) = noted_pids(workspace)
    launcher = psutil.Process(psutil.Process(stage).ppid())
    if not ends:
        launcher.suspend()  # a signal that it gets then stays pending
        wait_until(lambda: launcher.status() == psutil.STATUS_STOPPED)
    caller.kill()
    caller.wait()
    if ends:
        wait_until(lambda: is_gone(launcher.pid) and is_gone(stage))
    else:
        assert f"ShdPnd:\t{0:016x}\n" in Path(f"/proc/{launcher.pid}/status").read_text()
        launcher.kill()


def test_finished_checkpoints_are_removed_once_dvc_has_stored_the_training(
    start: Start, workspace: Path, tmp_path: Path
) -> None:
    """Checkpoints of that recipe alone, in the repository that DVC names."""
    checkpoints = tmp_path / "repository/.bakeoff/checkpoints"
    names = {"r1-llm-only/finished", "r1-llm-only/unfinished", "r2-vision-only/finished"}
    for name in names:
        (checkpoints / name / "step-000001").mkdir(parents=True)
        (checkpoints / name / "lock").touch()
        if name.endswith("/finished"):
            (checkpoints / name / "finished").touch()
    of_dvc = {"DVC_STAGE": "x@r1-llm-only"}
    for stage, how, left in (
        ("merge", {}, names),
        ("train", of_dvc, names),
        ("merge", of_dvc, names - {"r1-llm-only/finished"}),
    ):
        (workspace / f"stages/{stage}.py").write_text("")
        assert start(stage, "r1-llm-only", DVC_ROOT=str(tmp_path / "repository"), **how).ended() == 0
        assert {str(path.relative_to(checkpoints)) for path in checkpoints.glob("*/*")} == left


def test_stage_runs_once_at_a_time(start: Start, workspace: Path) -> None:
    (workspace / "dvc.yaml").write_text("stages: {train@wait: {cmd: docker/run train, outs: [data/x]}}")
    first = started_and_ready(start, workspace)
    second = start("train", "wait")
    assert second.ended() == 1
    assert "train@wait is already running in this workspace" in second.output
    assert notes(workspace).count("ready") == 1
    first.process.terminate()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"BAKEOFF_ENGINE": "lxc"}, f"'lxc'; the engines are {', '.join(ENGINES)}. "),
        ({"VIRTUAL_ENV": ""}, "make setup"),
    ],
)
def test_unknown_engine_and_incomplete_environment_are_refused(
    start: Start, workspace: Path, environment: dict[str, str], message: str
) -> None:
    for folder in ("bin", ".bakeoff"):
        (workspace / ".venv" / folder).mkdir(parents=True)
    (workspace / ".venv/bin/python").symlink_to(sys.executable)
    (workspace / ".venv/.bakeoff/incomplete").touch()
    launcher = start("train", "exit", "0", **environment)
    assert launcher.ended() == 1
    assert message in launcher.output


@pytest.mark.parametrize("copy", ["clone", "worktree"])
def test_clone_and_git_worktree_use_the_environment_of_their_checkout(
    start: Start, workspace: Path, tmp_path: Path, copy: str
) -> None:
    """`dvc exp run --temp` runs in a clone without .venv; DVC_ROOT names the workspace it was started in."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "file").touch()
    commit(checkout)
    (checkout / ".venv").symlink_to(sys.prefix)
    if copy == "worktree":
        run(checkout, "git", "worktree", "add", "--quiet", str(tmp_path / "worktree"))
        shutil.copy(tmp_path / "worktree/.git", workspace / ".git")
    root = {"DVC_ROOT": str(checkout)} if copy == "clone" else {}
    assert start("train", "report", VIRTUAL_ENV="", **root).ended() == 0
    assert notes(workspace)[:2] == [str(workspace), str(checkout / ".venv/bin/python")]


def test_stage_that_was_asked_to_end_is_not_restarted(start: Start, workspace: Path) -> None:
    """Even if it runs out of memory while it ends."""
    (workspace / "stages/train.py").write_text(STAGE.replace("75", "79"))
    (workspace / "data/runs/r1-llm-only").rename(workspace / "data/runs/wait")
    launcher = started_and_ready(start, workspace, "saving")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.ended() == 128 + signal.SIGINT
    assert notes(workspace).count("ready") == 1


def test_each_attempt_is_a_fresh_process(start: Start, workspace: Path) -> None:
    """The first one runs out of memory. What stages make of their attempts: tests/test_interrupted.py."""
    orders = 'note(os.getpid())\nnote(sys.argv[1:])\nsys.exit(0 if "--attempt" in sys.argv else 79)\n'
    (workspace / "stages/evaluate.py").write_text(STAGE.partition("what =")[0] + orders)
    launcher = start("evaluate", "base-vlm")
    assert launcher.ended() == 0
    assert "evaluate base-vlm ran out of memory" in launcher.output
    assert "batch_size 128 -> 64" in launcher.output
    assert "Traceback" not in launcher.output
    one, first, other, second = notes(workspace)
    assert (first, second) == ("['base-vlm']", "['base-vlm', '--attempt', '1']")
    assert one != other


@pytest.mark.parametrize(("count", "code"), [("oom_kill 8", OUT_OF_MEMORY), ("oom_kill 7", 128 + 9)])
def test_killed_stage_ran_out_of_memory_if_the_kernel_counted_it(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str, code: int
) -> None:
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 3\noom_kill 7\n")
    monkeypatch.setattr(process, "MACHINE_COUNTERS", (counter,))
    stage = f"import os\nwith open({str(counter)!r}, 'w') as file: file.write({count!r})\nos.kill(os.getpid(), 9)"
    (workspace / "stages/train.py").write_text(stage)
    assert ProcessEngine().run(request_of(workspace, "train", caller=CALLER)).code == code


def test_kernels_counters_are_read(tmp_path: Path) -> None:
    v2, v1 = tmp_path / "memory.events", tmp_path / "memory.oom_control"
    assert oom_kills((v2, v1)) == 0
    v1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills((v2, v1)) == 2
    v2.write_text("low 0\nhigh 0\nmax 31\noom 5\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills((v2, v1)) == 3
