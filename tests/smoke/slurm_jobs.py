"""Workspaces whose stage is a job of a real Slurm, commands in them, and the state of Slurm."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from tests import ROOT
from tests.documents import write_yaml
from tests.launcher.small_checkout import CALLER, Command, commit, run, small_checkout, wait_until

NEEDS_SLURM = [
    pytest.mark.engine,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        "SLURM_CONF" not in os.environ or not shutil.which("sbatch"),
        reason="no Slurm is up; start one with .ci/with-slurm COMMAND",
    ),
]

# Ends when there is a file `go`; asked to end, it saves like a training, unless OMP_FORGETS is set.
STAGE = """
import os, pathlib, signal, sys, time

def note(text):
    with open("notes", "a") as file:
        print(text, file=file)

def asked(number, frame):
    note(f"asked by {signal.Signals(number).name}")
    if "OMP_FORGETS" not in os.environ:
        saved = pathlib.Path(".bakeoff/checkpoints/r1-llm-only/x")
        (saved / f"step-{len(list(saved.glob('*'))):06d}").mkdir(parents=True)
    sys.exit(128 + number)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, asked)
note(f"begin {os.environ.get('HF_TOKEN')} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
print("the stage speaks", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
if os.path.exists("fail"):
    sys.exit(7)
seed = pathlib.Path("params.yaml").read_text().split("seed: ")[1].split()[0]
pathlib.Path("data/trained").mkdir()
pathlib.Path("data/trained/weights").write_text(f"of seed {seed}")
note("end")
"""

PIPELINE = """
stages:
  train:
    cmd: exec docker/run train r1-llm-only
    params: [seed]
    outs: [data/trained, data/provenance/train.json]
"""

ENVIRONMENT: dict[str, Any] = CALLER | {
    "BAKEOFF_PLACE": "slurm",
    "SLURM_CONF": os.environ.get("SLURM_CONF", ""),
    "HF_TOKEN": "hf_smokesmokesmokesmokesmokesmokesmoke",
}


def make_workspace(folder: Path) -> Path:
    """With one stage, train, which DVC runs."""
    workspace = small_checkout(folder / "a workspace", pipeline=PIPELINE, train=STAGE)
    set_params(workspace)
    with (workspace / ".gitignore").open("a") as ignored:
        ignored.write("/go\n/fail\n")
    run(workspace, "git", "init", "--quiet")
    run(workspace, "dvc", "init", "--quiet")
    commit(workspace)
    return workspace


def set_params(workspace: Path, *, profile: str = "tiny", seed: int = 42, **slurm: Any) -> None:
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    job = {"memory_gb": 1.0, **{name: value for name, value in slurm.items() if name != "save_seconds"}}
    raw["slurm"] = {"cpu": job, "gpu": job, "save_seconds": slurm.get("save_seconds", 180)}
    write_yaml(raw | {"profile": profile, "seed": seed}, workspace / "params.yaml")


def jobs() -> dict[str, str]:
    """State of each job of this cluster that has not ended, by its number."""
    lines = subprocess.run(["squeue", "--noheader", "--format=%i %T"], check=True, capture_output=True, text=True)
    return dict(line.split() for line in lines.stdout.splitlines())


def num_ended(workspace: Path) -> int:
    """The number of times that jobs of this workspace ended or went back into the queue, by Slurm's own log."""
    log = Path(ENVIRONMENT["SLURM_CONF"]).with_name("log") / "jobs"
    return sum(f"WorkDir={workspace} " in line for line in log.read_text().splitlines()) if log.exists() else 0


def repro(workspace: Path, *arguments: str, **environment: str) -> Command:
    """`dvc repro train`, or another command of dvc's, typed in the workspace."""
    return Command(workspace, "dvc", *(arguments or ("repro", "train")), env=ENVIRONMENT | environment)


def launcher_of(command: Command) -> psutil.Process:
    (launcher,) = psutil.Process(command.process.pid).children()
    return launcher


def kill(command: Command) -> None:
    """SIGKILL to dvc and to the launcher that waits."""
    launcher = launcher_of(command)
    command.process.kill()
    launcher.kill()
    command.process.wait()


def let_end(workspace: Path) -> None:
    (workspace / "go").touch()


def trained(workspace: Path) -> str:
    return (workspace / "data/trained/weights").read_text()


def occupied(workspace: Path) -> str:
    """The number of a job that has both nodes."""
    sleep = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300"]
    number = subprocess.run(sleep, check=True, capture_output=True, text=True).stdout.strip()
    wait_until(lambda: jobs()[number] == "RUNNING")
    return number
