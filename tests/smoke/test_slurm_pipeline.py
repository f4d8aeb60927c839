"""A whole small pipeline as jobs of Slurm, a training among them whose time is over before it is done."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stages.kit.launcher.pipeline import declared_stages
from tests.smoke.test_slurm import jobs, pytestmark  # noqa: F401 - skipped where that is
from tools.faults.judge import require_same_end
from tools.faults.workspaces import CHAIN, TARGET, build_reference, copy_folder, workspace_in


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert jobs() == {}


@pytest.mark.timeout(900)
def test_jobs_leave_the_bytes_of_processes_also_where_a_training_takes_two(tmp_path: Path) -> None:
    reference = build_reference(tmp_path / "reference")
    plain = workspace_in(tmp_path / "in jobs", reference.environment)
    copy_folder(reference.before_dir(CHAIN[0]), plain.folder)
    slurm = {"BAKEOFF_PLACE": "slurm", "SLURM_CONF": os.environ["SLURM_CONF"]}
    workspace = replace(plain, environment={**plain.environment, **slurm})

    def meanwhile(process: "subprocess.Popen[bytes]") -> None:
        """What Slurm does before the time is over, at the first checkpoint."""
        while not any((workspace.folder / ".bakeoff/checkpoints").glob("*/*/step-*")):
            assert process.poll() is None
            time.sleep(0.02)
        (number,) = jobs()
        subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)

    ended = workspace.dvc("repro", TARGET, meanwhile=meanwhile)
    assert ended.code == 0, ended.output
    assert "goes back into the queue" in ended.output
    assert "goes on from step" in ended.output
    assert len(re.findall(r"launcher: job \d+\n", ended.output)) == len(CHAIN) - 1, "all but check"
    written = [out for stage in declared_stages(workspace.folder) if stage.name in CHAIN for out in stage.written]
    require_same_end(workspace.folder, reference.finished_dir, written)
    assert workspace.dvc("status", "-q", TARGET).code == 0
