from collections.abc import Callable
from pathlib import Path

import pytest

from stages.kit.launcher.slurm import inside_job
from stages.kit.launcher.slurm.inside_job import JOB_VARIABLE, run_inside_job
from stages.kit.launcher.slurm.job_dir import JobDir
from tests.documents import write_yaml


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """The job of a merge, which this process is in."""
    job = JobDir(tmp_path / "job")
    job.folder.mkdir()
    monkeypatch.setenv(JOB_VARIABLE, str(job.folder))
    write_yaml(
        {"stages": {"merge": {"cmd": "exec docker/run merge r1-llm-only", "outs": ["data/merged"]}}},
        tmp_path / "dvc.yaml",
    )
    write_yaml({}, tmp_path / "params.yaml")
    return job


def run_merge(workspace_dir: Path, stage: Callable[[], int]) -> int:
    return run_inside_job("merge", ("r1-llm-only",), stage, workspace_dir=workspace_dir, say=print)


def test_a_stage_does_not_meet_what_a_cancelled_job_left(job: JobDir, tmp_path: Path) -> None:
    left = tmp_path / "data/merged/of-another-job"
    left.mkdir(parents=True)

    def stage() -> int:
        (tmp_path / "data/merged").mkdir()
        (tmp_path / "data/merged/weights").write_text("own")
        return 0

    assert run_merge(tmp_path, stage) == 0
    end = job.end()
    assert end is not None
    assert end.outputs == ["data/merged"]
    assert [path.name for path in (job.outputs_dir / "data/merged").iterdir()] == ["weights"]


@pytest.mark.parametrize(("restarts", "code"), [("0", 7), ("1", 0)])
def test_what_another_node_failed_with_ends_its_own_start_of_the_job_and_no_later_one(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str, code: int
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(inside_job, "ask_to_end", lambda number, *, alone: asked.append(number))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert run_merge(tmp_path, lambda: 7) == 7
    assert (asked, job.end()) == (["12"], None), "the first node has the last word"
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert run_merge(tmp_path, lambda: 0) == code
    end = job.end()
    assert end is not None
    assert end.code == code
