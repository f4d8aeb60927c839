from pathlib import Path

import pytest

from stages.kit.launcher.slurm.inside_job import JOB_VARIABLE, run_inside_job
from stages.kit.launcher.slurm.job_dir import JobDir
from tests.documents import write_yaml


def test_a_stage_does_not_meet_what_a_cancelled_job_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobDir(tmp_path / "job")
    job.folder.mkdir()
    monkeypatch.setenv(JOB_VARIABLE, str(job.folder))
    write_yaml(
        {"stages": {"merge": {"cmd": "exec docker/run merge r1-llm-only", "outs": ["data/merged"]}}},
        tmp_path / "dvc.yaml",
    )
    write_yaml({}, tmp_path / "params.yaml")
    left = tmp_path / "data/merged/of-another-job"
    left.mkdir(parents=True)

    def stage() -> int:
        (tmp_path / "data/merged").mkdir()
        (tmp_path / "data/merged/weights").write_text("own")
        return 0

    assert run_inside_job("merge", ("r1-llm-only",), stage, workspace_dir=tmp_path, say=print) == 0
    end = job.end()
    assert end is not None
    assert end.outputs == ["data/merged"]
    assert [path.name for path in (job.outputs_dir / "data/merged").iterdir()] == ["weights"]
