"""Stages that try what they may not, and stages that are ended from outside."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.core.signals import ENDING
from stages.launcher.pipeline import declared_stages
from tests import ROOT
from tests.launcher.small_checkout import Command, wait_until
from tests.smoke.conftest import COMMAND, ENGINE, SECRETS, containers, environment, train

pytestmark = pytest.mark.engine

ASLEEP = f"{600 + os.getpid() / 1e7:f}"
"""Seconds that no other process of the machine sleeps, not even of other tests like these."""

# Says when it runs; when it is asked to end it takes its time, as one that saves a checkpoint, and ends non-zero.
WAITING = f"""
import signal, subprocess, sys, time

def save(number, frame):
    time.sleep(0.5)
    print("saved on", signal.Signals(number).name, flush=True)
    sys.exit(75)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, save)
subprocess.Popen(["sleep", "{ASLEEP}"])
print("ready", flush=True)
time.sleep(600)
"""


HELPERS = """
import os, socket, stat, subprocess, sys

def fill(path, gib):
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, gib * 2**30)

"""


ATTEMPTS = [
    # To reach the network.
    ("socket.create_connection(('192.0.2.1', 80), timeout=5)", "Network is unreachable"),
    ("socket.getaddrinfo('example.org', 80)", "gaierror"),
    ("socket.create_connection(('172.17.0.1', 80), timeout=5)", "Network is unreachable"),
    # To change an input.
    ("open('data/bases/vlm/config.json', 'a')", "Read-only file system"),
    ("open('data/prepared/nutrition-tables/train.parquet', 'a')", "Read-only file system"),
    ("open('data/runs/r1-llm-only/plan.yaml', 'a')", "Read-only file system"),
    ("os.unlink('data/runs/r1-llm-only/plan.yaml')", "Device or resource busy"),
    ("os.rename('data/runs/r1-llm-only/plan.yaml', 'data/runs/r1-llm-only/trained')", "Device or resource busy"),
    ("open('params.yaml', 'a')", "Read-only file system"),
    ("open('stages/train.py', 'a')", "Read-only file system"),
    # To write anywhere else.
    ("open('notes', 'w')", "Read-only file system"),
    ("os.mkdir('data/runs/r4-joint')", "Read-only file system"),
    ("open('/etc/notes', 'w')", "Read-only file system"),
    ("open(sys.prefix + '/notes', 'w')", "Read-only file system"),
    ("open('/run/notes', 'w')", "Read-only file system"),
    # To see what it was not given.
    ("open('.git/config')", "No such file"),
    ("open('README.md')", "No such file"),
    ("os.environ['HF_TOKEN']", "KeyError"),
    ("os.environ['AWS_SECRET_ACCESS_KEY']", "KeyError"),
    # To gain a capability.
    ("os.chown('/tmp', 1, 1)", "Operation not permitted"),
    ("os.chroot('/tmp')", "Operation not permitted"),
    ("os.setuid(12345)", "Operation not permitted"),
    ("os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))", "Operation not permitted"),
    ("subprocess.run(['mount', '-t', 'tmpfs', 'none', '/tmp'], check=True)", "CalledProcessError"),
    ("subprocess.run(['unshare', '--user', 'true'], check=True)", "CalledProcessError"),
    # To change the machine, which root may do without one.
    ("open('/proc/sys/kernel/core_pattern', 'a')", "[Errno "),
    ("open('/sys/bus/cpu/drivers_probe', 'a')", "[Errno "),
]

# To leave something behind in memory, which is gone with the container. Apptainer limits neither, as an ordinary user
# it could not: /tmp is a folder on the disk of the results.
TOO_LARGE = [
    (f"fill('{folder}/x', 5)", "No space left on device") for folder in ("/dev/shm", "/tmp") if ENGINE != "apptainer"
]


def trying(attempts: Sequence[str]) -> str:
    """A stage that tries everything, and prints by attempt the error, or null where it succeeded."""
    return f"""{HELPERS}
import json

def outcome(attempt):
    try:
        exec(attempt)
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

print(json.dumps({{attempt: outcome(attempt) for attempt in {attempts!r}}}))
"""


@pytest.fixture(scope="module")
def outcomes(playground: Path) -> dict[str, str | None]:
    """The outcome of each attempt; all of them are made in one container."""
    result = train(playground, trying([attempt for attempt, _ in (*ATTEMPTS, *TOO_LARGE)]))
    assert result.returncode == 0, result.stderr
    said: dict[str, str | None] = json.loads(result.stdout)
    return said


@pytest.mark.parametrize(("attempt", "error"), [*ATTEMPTS, *TOO_LARGE])
def test_forbidden_attempt_fails(outcomes: dict[str, str | None], attempt: str, error: str) -> None:
    assert error in str(outcomes[attempt])


def test_stage_has_no_capability_and_cannot_get_one(playground: Path) -> None:
    result = train(playground, "print(open('/proc/self/status').read())")
    status = dict(line.split(":\t", 1) for line in result.stdout.splitlines() if ":\t" in line)
    assert {name: int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == dict.fromkeys(
        ("CapEff", "CapPrm", "CapBnd", "CapAmb"), 0
    )
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


FETCHING = """
import json, os, socket
print(json.dumps([[name for _, name in socket.if_nameindex()], os.environ.get("HF_TOKEN"), os.environ.get("HF_HOME")]))
if "HF_HOME" in os.environ:
    open(os.environ["HF_HOME"] + "/fetched", "w").close()
"""


@pytest.mark.parametrize("fetches", [True, False])
def test_only_a_stage_that_fetches_has_the_network_and_the_token(
    playground: Path, tmp_path: Path, fetches: bool
) -> None:
    """The others have neither; `base` and `prepare` do not while their source is a folder."""
    (playground / "stages/base.py").write_text(FETCHING)
    params_path = playground / "params.yaml"
    params = params_path.read_text()
    if fetches:
        params_path.write_text(params.replace("folder:data/tiny/qwen2-vl", "hub:somebody/something@main"))
    hub_dir = tmp_path / "hub"
    try:
        result = subprocess.run(
            ("docker/run", "base", "vlm"),
            cwd=playground,
            env=environment(HF_HOME=str(hub_dir)),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        params_path.write_text(params)
    interfaces, token, hub = json.loads(result.stdout)
    if fetches:
        assert set(interfaces) > {"lo"}
        assert (token, hub) == (SECRETS["HF_TOKEN"], str(hub_dir))
        assert (hub_dir / "fetched").stat().st_uid == os.getuid()
    else:
        assert (interfaces, token, hub) == (["lo"], None, None)


# Its first attempt takes memory without end, once its base has a file `go`.
GREEDY = """
import os, sys, time

print("ready", *sys.argv[1:], flush=True)
if "--attempt" not in sys.argv:
    while not os.path.exists("data/bases/vlm/go"):
        time.sleep(0.05)
    taken = [bytearray(b"x" * 2**24) for _ in range(2**12)]
"""


# Starts processes until it may not, and then takes memory without end.
BOMB = """
import os, time

count = 0
try:
    while os.fork():
        count += 1
    time.sleep(60)
except OSError as error:
    print(count, error, flush=True)
taken = [bytearray(b"x" * 2**24) for _ in range(2**12)]
"""


@pytest.mark.skipif(ENGINE == "apptainer", reason="limits are left to Slurm")
def test_fork_bomb_and_greed_end_at_the_limits_of_the_container(playground: Path) -> None:
    params = (playground / "params.yaml").read_text()
    try:
        (playground / "params.yaml").write_text(params + "containers: {processes: 100, memory_gb: 0.4}\n")
        result = train(playground, BOMB)
    finally:
        (playground / "params.yaml").write_text(params)
    count, *_ = re.findall(r"^(\d+) .*Resource temporarily unavailable", result.stdout, re.MULTILINE)
    assert 50 < int(count) < 100
    assert (result.returncode, "train r1-llm-only ran out of memory" in result.stderr) == (1, True), result.stderr


Start = Callable[..., Command]


@pytest.fixture
def start(playground: Path) -> Iterator[Start]:
    """Starts a waiting stage by some command, and waits until it runs."""
    started = []

    def start(*command: str, stage: str = WAITING, **options: Any) -> Command:
        (playground / "stages/train.py").write_text(stage)
        started.append(Command(playground, *command, **{"env": environment(), **options}))
        started[-1].until("ready")
        return started[-1]

    yield start
    for command in started:
        with suppress(ProcessLookupError):
            os.killpg(command.process.pid, signal.SIGKILL)
        command.process.wait()


def nothing_runs(workspace: Path) -> bool:
    """No container of the workspace, and no process that a stage started."""
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return containers(workspace) == [] and ["sleep", ASLEEP] not in commands


DVC = (str(Path(sys.prefix) / "bin/dvc"), "repro", "--single-item", "--force", "train@r1-llm-only")


@pytest.mark.parametrize(
    ("command", "number", "saved_on"),
    [
        *((COMMAND, number, number) for number in ENDING),
        (COMMAND, signal.SIGKILL, signal.SIGTERM),
        (DVC, signal.SIGTERM, signal.SIGTERM),
        (DVC, signal.SIGKILL, signal.SIGTERM),
    ],
)
def test_stage_whose_launcher_or_dvc_ends_saves_once_and_leaves_nothing(
    start: Start, playground: Path, command: tuple[str, ...], number: signal.Signals, saved_on: signal.Signals
) -> None:
    # dvc runs a stage's command by $SHELL. bash replaces itself by a single command unasked; sh need not.
    running = start(*command, env=environment(SHELL="/bin/sh"))
    running.process.send_signal(number)
    code = running.process.wait()
    assert code == 75 or command == DVC or number == signal.SIGKILL
    running.until(f"saved on {saved_on.name}")
    wait_until(lambda: nothing_runs(playground))
    assert running.output.count("saved on") == 1


def test_launcher_killed_with_the_client_leaves_nothing(start: Start, playground: Path) -> None:
    """The kernel does so when memory runs out, and so do people who kill a whole process tree."""
    launcher = psutil.Process(start(*COMMAND).process.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # Apptainer's go with their parent
            process.kill()
    wait_until(lambda: nothing_runs(playground))


HALF = "data/runs/r1-llm-only/trained/half"
OUTPUTS = [path for stage in declared_stages(ROOT) if stage.name == "train@r1-llm-only" for path in stage.written]
WRITING = """
import os, time
from pathlib import Path

print("half is there:", os.path.exists({half!r}), flush=True)
for path in map(Path, {paths!r}):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("written")
print("ready", flush=True)
time.sleep({seconds})
"""


def test_dvc_removes_what_a_killed_stage_has_written_before_it_runs_again(start: Start, playground: Path) -> None:
    killed = start(*DVC, stage=WRITING.format(half=HALF, paths=[HALF], seconds=600)).process
    dvc = psutil.Process(killed.pid)
    for process in (dvc, *dvc.children(recursive=True)):  # dvc first: it writes its locks when a stage ends
        with suppress(psutil.NoSuchProcess):
            process.kill()
    killed.wait()
    wait_until(lambda: nothing_runs(playground))
    assert (playground / HALF).exists()
    again = start(*DVC, stage=WRITING.format(half=HALF, paths=OUTPUTS, seconds=0))
    assert again.process.wait() == 0, again.output
    assert "half is there: False" in again.output
    (playground / HALF).parent.unlink()


def test_ctrl_c_on_dvc_lets_the_stage_save_and_leaves_nothing(start: Start, playground: Path) -> None:
    running = start(*DVC)
    os.killpg(running.process.pid, signal.SIGINT)  # as a terminal sends it: to dvc and the launcher alike
    assert running.process.wait() != 0
    wait_until(lambda: nothing_runs(playground))
    assert re.findall("saved on .*", running.output) == ["saved on SIGINT"]


@pytest.mark.parametrize("command", [COMMAND, DVC])
def test_closed_terminal_leaves_nothing(start: Start, playground: Path, command: tuple[str, ...]) -> None:
    main, terminal = pty.openpty()
    # setsid --ctty makes it the terminal of the session, as a terminal window does.
    running = start("setsid", "--ctty", "--wait", *command, stdin=terminal)
    os.close(terminal)
    os.close(main)
    running.until("saved on")
    wait_until(lambda: nothing_runs(playground))
    assert running.output.count("saved on") == 1


def test_stage_that_ran_out_of_memory_is_restarted(
    start: Start, playground: Path, limit_memory: Callable[[str], object]
) -> None:
    running = start(*COMMAND, stage=GREEDY)
    (container,) = containers(playground)
    limit_memory(container)
    go = playground / "data/bases/vlm/go"
    go.touch()
    assert running.process.wait() == 0, running.output
    assert "ready r1-llm-only --attempt 1" in running.output
    assert "train r1-llm-only ran out of memory; restarting it with micro_batch 2 -> 1" in running.output
    go.unlink()
    wait_until(lambda: nothing_runs(playground))
