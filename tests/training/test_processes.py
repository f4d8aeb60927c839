"""torchrun starts a process a device; their ends and signals become the stage's. The workers here do nothing."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.core.params.schema import DeviceParams
from stages.training.processes import run_workers
from tests import ROOT
from tests.training.two_processes import FRESH

WORKER = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    Path("saved-" + os.environ["RANK"]).touch()
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, save)
Path(f"{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").touch()
"""


def stage(folder: Path, device: DeviceParams, environment: Mapping[str, str]) -> None:
    """The process of a stage."""
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", **environment}
    try:
        run_workers(device, ["worker"])
    except OutOfMemory as error:
        sys.exit(error.exit_code)


def start(folder: Path, then: str, *, count: int = 2, nodes: int = 1, **environment: str) -> BaseProcess:
    """then: the end of each worker, as code."""
    (folder / "worker.py").write_text(WORKER + then)
    process = FRESH.Process(
        target=stage, args=(folder, DeviceParams(kind="cpu", count=count, nodes=nodes), environment)
    )
    process.start()
    return process


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (f"sys.exit({OUT_OF_MEMORY})", OUT_OF_MEMORY),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_the_end_of_one_worker_ends_the_stage(tmp_path: Path, end: str, code: int) -> None:
    both_run = 'while not Path("0-of-2").exists():\n        time.sleep(0.02)'
    started = start(tmp_path, f'if os.environ["RANK"] == "1":\n    {both_run}\n    {end}\nsignal.pause()')
    started.join()
    assert started.exitcode == code
    assert {path.name for path in tmp_path.glob("*-of-*")} == {"0-of-2", "1-of-2"}


def test_a_signal_reaches_the_workers_which_save(tmp_path: Path) -> None:
    started = start(tmp_path, "signal.pause()")
    while len([*tmp_path.glob("*-of-*")]) < 2:
        assert started.is_alive()
        time.sleep(0.02)
    started.terminate()
    started.join()
    assert started.exitcode == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


def test_several_nodes_need_torchruns_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")  # set by the call, in this process; put back
    with pytest.raises(UserError, match="a training over 2 nodes is started on each of them: BAKEOFF_PLACE=slurm"):
        run_workers(DeviceParams(kind="cpu", nodes=2), ["worker"])
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = str(listening.getsockname()[1])
    first = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    stages = [start(tmp_path, "", count=1, nodes=2, PET_NODE_RANK=str(rank), **first) for rank in range(2)]
    for each in stages:
        each.join()
    assert [each.exitcode for each in stages] == [0, 0]
    assert {path.name for path in tmp_path.glob("*-of-*")} == {"0-of-2", "1-of-2"}
