"""torchrun starts a process a device; their ends and signals become the stage's. The workers here do nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.core.errors import OUT_OF_MEMORY
from tests import ROOT

STAGE = """
import sys
from stages.core.errors import OutOfMemory
from stages.core.params.schema import DeviceParams
from stages.kit.training.processes import run_workers

try:
    run_workers(DeviceParams(kind="cpu", count=int(sys.argv[1]), nodes=int(sys.argv[2])), ["worker"])
except OutOfMemory as error:
    sys.exit(error.exit_code)
"""
WORKER = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    Path("saved-" + os.environ["RANK"]).touch()
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, save)
Path(f"{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").touch()
"""


def start(folder: Path, then: str, *, count: int = 2, nodes: int = 1, **environment: str) -> subprocess.Popen[str]:
    """then: the end of each worker, as code."""
    (folder / "worker.py").write_text(WORKER + then)
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", STAGE, str(count), str(nodes)]
    return subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (f"sys.exit({OUT_OF_MEMORY})", OUT_OF_MEMORY),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_the_end_of_one_worker_ends_the_stage(tmp_path: Path, end: str, code: int) -> None:
    stage = start(tmp_path, f'if os.environ["RANK"] == "1":\n    {end}\ntime.sleep(60)')
    _, log = stage.communicate()
    assert stage.returncode == code, log
    assert {path.name for path in tmp_path.glob("*-of-*")} == {"0-of-2", "1-of-2"}


def test_a_signal_reaches_the_workers_which_save(tmp_path: Path) -> None:
    stage = start(tmp_path, "time.sleep(60)")
    while len([*tmp_path.glob("*-of-*")]) < 2:
        assert stage.poll() is None, stage.communicate()[1]
        time.sleep(0.02)
    stage.terminate()
    _, log = stage.communicate()
    assert stage.returncode == 128 + signal.SIGTERM, log
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


def test_several_nodes_need_torchruns_variables(tmp_path: Path) -> None:
    alone = start(tmp_path, "", nodes=2)
    assert "a training over 2 nodes is started on each of them: BAKEOFF_PLACE=slurm" in alone.communicate()[1]
    assert alone.returncode == 1
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = str(listening.getsockname()[1])
    first = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    stages = [start(tmp_path, "", count=1, nodes=2, PET_NODE_RANK=str(rank), **first) for rank in range(2)]
    logs = [stage.communicate()[1] for stage in stages]
    assert [stage.returncode for stage in stages] == [0, 0], logs
    assert {path.name for path in tmp_path.glob("*-of-*")} == {"0-of-2", "1-of-2"}
