"""A whole small pipeline as jobs of Slurm, a training among them whose time is over before it is done; experiments."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

from stages.core.lineage import folder_digest
from stages.launcher.pipeline import declared_stages
from tests.documents import write_yaml
from tests.launcher.small_checkout import commit, run, wait_until
from tests.smoke.slurm_jobs import ENVIRONMENT, NEEDS_SLURM, jobs, let_end, make_workspace, repro
from tests.workspaces import (
    CHAIN,
    RECIPE,
    TARGET,
    Meanwhile,
    Workspace,
    build_reference,
    copy_folder,
    require_same_end,
    workspace_in,
)

pytestmark = NEEDS_SLURM


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    wait_until(lambda: jobs() == {})


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return make_workspace(tmp_path)


@pytest.mark.parametrize("how", ["--temp", "--queue"])
def test_experiments_in_a_clone_and_in_the_queue_run_as_jobs(workspace: Path, how: str) -> None:
    let_end(workspace)
    run(workspace, "git", "add", "--force", "go")  # for the clone to have it
    commit(workspace)
    output = run(workspace, "dvc", "exp", "run", how, "--name", "seven", "-S", "seed=7", "train", **ENVIRONMENT)
    if how == "--queue":
        run(workspace, "dvc", "queue", "start", **ENVIRONMENT)
        wait_until(lambda: any(word in run(workspace, "dvc", "queue", "status") for word in ("Success", "Failed")))
        output = run(workspace, "dvc", "queue", "logs", "seven")
    assert "launcher: job " in output
    run(workspace, "dvc", "exp", "apply", "seven")
    assert (workspace / "data/trained/weights").read_text() == "of seed 7"


def test_a_job_that_nothing_would_find_again_is_asked_to_end(workspace: Path) -> None:
    """DVC makes another clone for the next experiment."""
    command = repro(workspace, "exp", "run", "--temp", "-S", "seed=7", "train")
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    command.process.kill()
    command.until(f"asking job {number} to save and end, as no command would reattach")
    command.ended()
    wait_until(lambda: jobs() == {})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_reference(tmp_path_factory.mktemp("reference"))


def before(stage: str, folder: Path, reference: Path) -> Workspace:
    """A workspace as it was before a stage."""
    workspace = workspace_in(folder)
    copy_folder(reference / "before" / stage, workspace.folder)
    return workspace


def in_jobs(plain: Workspace, **environment: str) -> Workspace:
    """That workspace with stages that run as jobs."""
    slurm = {"BAKEOFF_PLACE": "slurm", "SLURM_CONF": os.environ["SLURM_CONF"]}
    return replace(plain, environment={**plain.environment, **slurm, **environment})


def time_is_up(workspace: Workspace, *, nodes: int = 1) -> Meanwhile:
    """Send Slurm's signal for the end of a job's time while the training can save, and before it goes on."""
    num_processes = 2 * nodes if nodes > 1 else 1  # torchrun and a worker on each node

    def meanwhile(process: "subprocess.Popen[bytes]") -> None:
        while len(training := training_of(workspace)) < num_processes or not all_have_it_in("SigCgt", training):
            assert process.poll() is None
            time.sleep(0.02)
        for each in training:
            each.suspend()
        (number,) = (number for number, state in jobs().items() if state == "RUNNING")
        subprocess.run(["scancel", *(("--batch",) if nodes == 1 else ()), "--signal=USR1", number], check=True)
        first = [each for each in training if each.parent() not in training]  # to which launchers pass it on
        while not all_have_it_in("ShdPnd", first):
            time.sleep(0.02)
        for each in training:
            each.resume()

    return meanwhile


def training_of(workspace: Workspace) -> list[psutil.Process]:
    """The processes of the training in a workspace, launchers left out."""
    found = []
    for process in workspace.processes():
        with suppress(psutil.Error):  # it has just ended
            found += [process] if "stages.train" in process.cmdline() else []
    return found


def all_have_it_in(mask: str, processes: list[psutil.Process]) -> bool:
    """Whether SIGUSR1 is in a mask of all of them (proc(5)): SigCgt if it is handled, ShdPnd if it waits."""
    with suppress(OSError):  # one has just ended
        texts = [Path(f"/proc/{each.pid}/status").read_text() for each in processes]
        masks = [int(text.partition(f"{mask}:")[2].split()[0], 16) for text in texts]
        return all(each & 1 << (signal.SIGUSR1 - 1) for each in masks)
    return False


@pytest.mark.timeout(900)
def test_jobs_leave_the_bytes_of_processes_also_where_a_training_takes_two(reference: Path, tmp_path: Path) -> None:
    workspace = in_jobs(before(CHAIN[0], tmp_path / "in jobs", reference))
    ended = workspace.dvc("repro", TARGET, meanwhile=time_is_up(workspace))
    assert ended.code == 0, ended.output
    train = ended.output.partition("> exec docker/run train")[2].partition("Running stage")[0]
    assert "goes back into the queue" in train, train
    assert "resuming from step" in train, train
    assert len(re.findall(r"launcher: job \d+\n", ended.output)) == len(CHAIN)
    written = [out for stage in declared_stages(workspace.folder) if stage.name in CHAIN for out in stage.written]
    require_same_end(workspace.folder, reference / "finished", written)
    assert workspace.dvc("status", "-q", TARGET).code == 0


@pytest.mark.timeout(900)
def test_a_training_over_two_nodes_leaves_the_bytes_of_two_processes_also_in_two_jobs(
    reference: Path, tmp_path: Path
) -> None:
    """Both nodes are this machine, whose name may be known by an address of a network card."""
    plan = f"plan@{RECIPE}"
    over_nodes = in_jobs(before(plan, tmp_path / "two nodes", reference), GLOO_SOCKET_IFNAME="lo")
    alone = before(plan, tmp_path / "two processes", reference)
    trained = {}
    for workspace, device in ((over_nodes, {"nodes": 2}), (alone, {"count": 2})):
        path = workspace.folder / "params.yaml"
        params = YAML(typ="safe").load(path)
        profile = params["profiles"][params["profile"]]
        profile["device"] |= device
        profile["memory"]["placement"] = "ddp"
        write_yaml(params, path)
        meanwhile = time_is_up(workspace, nodes=2) if workspace is over_nodes else None
        ended = workspace.dvc("repro", f"train@{RECIPE}", meanwhile=meanwhile)
        assert ended.code == 0, ended.output
        assert ("resuming from step" in ended.output) == (workspace is over_nodes)
        run_dir = workspace.folder / "data/runs" / RECIPE
        trained[workspace.folder] = folder_digest(run_dir / "trained"), (run_dir / "training/trace.csv").read_bytes()
    assert trained[over_nodes.folder] == trained[alone.folder]
