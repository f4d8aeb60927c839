"""Jobs of Slurm without a Slurm: where stages run, a job's identity, its resources, its end. With one: tests/smoke."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, JobParams, Params, SlurmParams
from stages.core.signals import handling
from stages.launcher import slurm
from stages.launcher.pipeline import JOB_VARIABLE, MARGIN, PROCESS_GIB, DeclaredStage, Request, host_gib
from stages.launcher.process import ForwardedSignals
from stages.launcher.slurm import (
    JobDir,
    QueuedJob,
    StageJob,
    job_options,
    refuse_changed_job,
    run_inside_job,
    runs_in_slurm,
)
from stages.planning.resolve import resolve_plan
from tests.launcher.small_checkout import PARAMS, request_of

IN_SEED_1 = replace(PARAMS, seed=1)
IN_SLURM = replace(PARAMS, profiles={"tiny": replace(PARAMS.active, place="slurm")})
FOLDERS = ("stages", "docker", "data/x")
STAGE = DeclaredStage(
    name="train@r1", command="docker/run train r1", params=("seed", "tracking"), deps=FOLDERS, outs=()
)
ON_GPU = PARAMS.on("qwen2-vl-7b")
RECIPE = "r1-llm-only"
GIB = 2**30


@pytest.mark.parametrize(
    ("caller", "params", "in_slurm"),
    [
        ({}, PARAMS, False),
        ({"BAKEOFF_PLACE": "slurm"}, PARAMS, True),
        ({}, IN_SLURM, True),
        ({"BAKEOFF_PLACE": "here"}, IN_SLURM, False),
        ({"BAKEOFF_JOB": "/x"}, IN_SLURM, False),
    ],
)
def test_stage_is_submitted_once(caller: dict[str, str], params: Params, in_slurm: bool) -> None:
    assert runs_in_slurm(caller, params) is in_slurm


def request(workspace: Path, stage: str = "train", name: str = "r1", params: Params = PARAMS, **caller: str) -> Request:
    return request_of(workspace, stage, name, params=params, stages=[STAGE], caller=caller)


def fingerprint(workspace: Path, params: Params = PARAMS, **caller: str) -> str:
    return StageJob(request(workspace, params=params, **caller)).fingerprint


def test_job_is_known_by_its_inputs_settings_code_and_packages_alone(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text("1")
    first = fingerprint(tmp_path)
    asking = replace(PARAMS.slurm, save_seconds=10)
    assert fingerprint(tmp_path, replace(PARAMS, slurm=asking, scored="selection"), HOME="/x") == first
    others = [
        fingerprint(tmp_path, replace(PARAMS, seed=1)),
        fingerprint(tmp_path, BAKEOFF_ENGINE="docker"),
        fingerprint(tmp_path, OMP_NUM_THREADS="3"),
    ]
    for folder in FOLDERS:
        (tmp_path / folder / "file").write_text("2")
        others.append(fingerprint(tmp_path))
    assert len({first, *others}) == 7


def planned(workspace: Path, **changes: Any) -> None:
    """A plan for 8 billion weights in bf16, of which an eighth is trained."""
    plan = resolve_plan(ON_GPU, RECIPE, train_samples=32)
    counts = {"vision": 0, "projector": 0, "llm": GIB, "total": GIB, "all": 8 * GIB}
    plan = replace(plan, trainable=counts, **{"dataloader_workers": 0, **changes})
    plan.write(workspace / "data/runs" / RECIPE / "plan.yaml")


def test_host_memory_holds_each_process_its_copy_of_the_model_and_a_checkpoint(tmp_path: Path) -> None:
    assert host_gib(request(tmp_path, "train", RECIPE)) == 8, "without a plan"
    planned(tmp_path)
    assert host_gib(request(tmp_path, "train", RECIPE)) == MARGIN * (PROCESS_GIB + 16 + 12)
    assert host_gib(request(tmp_path, "merge", RECIPE)) == MARGIN * (PROCESS_GIB + 2 * 16)
    assert host_gib(request(tmp_path, "evaluate", RECIPE)) == MARGIN * (PROCESS_GIB + 16)
    planned(tmp_path, placement="ddp", device=DeviceParams(kind="cuda", count=4, memory_gb=48), dataloader_workers=2)
    assert host_gib(request(tmp_path, "train", RECIPE)) == MARGIN * (4 * (PROCESS_GIB + 16 + 2) + 12)


def options(workspace: Path, stage: str = "train", **own: Any) -> list[str]:
    params = replace(ON_GPU, slurm=SlurmParams(gpu=JobParams(**own)))
    return job_options(request(workspace, stage, RECIPE, params))


def test_a_persons_options_come_last_and_replace_those_that_they_exclude(tmp_path: Path) -> None:
    found = options(tmp_path, partition="a100", account="lab", minutes=90, memory_gb=64, options=("--gres=gpu:a100:1",))
    assert found[-1] == "--gres=gpu:a100:1"
    assert "--gres=gpu:1" not in found
    assert {"--partition=a100", "--account=lab", "--time=90", "--mem=61035M"} <= set(found)
    found = options(tmp_path, options=("--mem-per-cpu=4G", "--cpus-per-task="))
    assert [option for option in found if "mem" in option or "cpus" in option] == ["--mem-per-cpu=4G"]
    assert "--gres=gpu:1" in found
    found = options(tmp_path, stage="compare", partition="a100")
    assert not any(option.startswith(("--gres", "--partition")) for option in found), "those of slurm.cpu"


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    """The job of a merge."""
    job = JobDir(tmp_path / "job")
    job.folder.mkdir()
    return job


def run_merge(workspace: Path, stage: Callable[[], Any], **slurm: str) -> int:
    declared = DeclaredStage(name="merge", command="docker/run merge r1", params=(), deps=(), outs=("data/merged",))
    caller = {JOB_VARIABLE: str(workspace / "job"), **{f"SLURM_{name}": value for name, value in slurm.items()}}
    return run_inside_job(request_of(workspace, "merge", "r1", stages=[declared], caller=caller), stage)


def test_job_starts_without_the_outputs_of_a_cancelled_one(job: JobDir, tmp_path: Path) -> None:
    (tmp_path / "data/merged/of-another-job").mkdir(parents=True)

    def stage() -> int:
        (tmp_path / "data/merged").mkdir()
        (tmp_path / "data/merged/weights").write_text("own")
        return 0

    assert run_merge(tmp_path, stage) == 0
    assert job.end() == 0
    assert [path.name for path in (job.outputs_dir / "data/merged").iterdir()] == ["weights"]


@pytest.mark.parametrize(("restarts", "code"), [("0", 7), ("1", 0)])
def test_failure_of_another_node_ends_that_start_of_the_job_alone(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str, code: int
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(slurm, "ask_to_end", lambda number, *, alone: asked.append(number))
    assert run_merge(tmp_path, lambda: 7, JOB_ID="12", NODEID="1") == 7
    assert (asked, job.end()) == (["12"], None), "the first node writes the end"
    assert run_merge(tmp_path, lambda: 0, NODEID="0", RESTART_COUNT=restarts) == code
    assert job.end() == code


def test_signal_before_the_stage_handles_it_is_answered_as_one_to_the_stage(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher reads inputs and may wait for GPUs; by default the signal would end it without a word."""
    monkeypatch.setattr(slurm, "job_info", lambda number: {"JobState": "RUNNING"})
    with handling(lambda *_: None):
        assert run_merge(tmp_path, lambda: signal.raise_signal(signal.SIGUSR1)) == 128 + signal.SIGUSR1
    assert job.end() == 128 + signal.SIGUSR1
    assert "the time of its job was over before it saved a new checkpoint" in capsys.readouterr().err


def test_launcher_waits_until_a_job_whose_results_were_collected_has_left_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = StageJob(request(tmp_path))
    queued = QueuedJob("12", "RUNNING", "None", job.name)
    queue = [[queued], [queued], []]
    monkeypatch.setattr(slurm, "queued_jobs", lambda: queue.pop(0))
    monkeypatch.setattr(slurm, "QUERY_S", (0, 0))
    assert job.own_job(ForwardedSignals()) is None
    queue.append([queued])
    job.dir.folder.mkdir(parents=True)
    assert job.own_job(ForwardedSignals()) == queued


def test_facts_that_changed_since_submission_are_named(job: JobDir, tmp_path: Path) -> None:
    submitted, changed = (request(tmp_path, params=each, BAKEOFF_JOB=str(job.folder)) for each in (PARAMS, IN_SEED_1))
    job.facts_path.write_text(json.dumps(slurm.job_facts(submitted)))
    refuse_changed_job(submitted)
    with pytest.raises(UserError, match=r"^params changed after this job was submitted"):
        refuse_changed_job(changed)
