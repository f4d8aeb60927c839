"""Apptainer alone: ordinary users, its own failures, the bytes of a stage."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.smoke.conftest import ENGINE, environment
from tests.smoke.test_seal import ATTEMPTS, COMMAND, trying

pytestmark = [pytest.mark.engine, pytest.mark.skipif(ENGINE != "apptainer", reason="of Apptainer")]

# Without rights, and with a user namespace to be made by Apptainer, also where root runs the tests: who has a number
# other than 0 in a user namespace has no capability there.
ORDINARY = ("unshare", "--map-user=1000", "--map-group=1000")


def run(workspace: Path, stage: str, *before: str, **more: str) -> subprocess.CompletedProcess[str]:
    (workspace / "stages/train.py").write_text(stage)
    return subprocess.run(
        [*before, *COMMAND], cwd=workspace, env=environment(**more), capture_output=True, text=True, check=False
    )


def test_an_ordinary_users_stage_may_do_as_little(playground: Path) -> None:
    attempts = [attempt for attempt, _ in ATTEMPTS]
    who = 'print(os.getuid(), [line for line in open("/proc/self/status") if line.startswith("CapEff")])'
    result = run(playground, trying(attempts) + who, *ORDINARY)
    assert result.returncode == 0, result.stderr
    outcomes, said = result.stdout.splitlines()
    assert [attempt for attempt, error in json.loads(outcomes).items() if error is None] == []
    assert said == r"1000 ['CapEff:\t0000000000000000\n']"


def test_an_ordinary_users_stage_writes_outputs_and_sees_neither_home_nor_what_a_cluster_binds(
    playground: Path, tmp_path: Path
) -> None:
    stage = f"""
import os
os.mkdir("data/runs/r1-llm-only/trained")
open("/tmp/scratch", "w").write("x")
print(os.environ["HOME"], os.path.exists({str(tmp_path)!r}))
"""
    result = run(playground, stage, *ORDINARY, HOME=str(tmp_path), APPTAINER_BIND=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "/tmp False\n"), result.stderr
    assert (playground / "data/runs/r1-llm-only/trained").stat().st_uid == os.getuid()
