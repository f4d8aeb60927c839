"""Apptainer alone: ordinary users, its own failures, the bytes of a stage."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.launcher.small_checkout import run
from tests.smoke.conftest import ENGINE, copy_of_checkout, environment, train
from tests.smoke.test_seal import ATTEMPTS, trying

pytestmark = [pytest.mark.engine, pytest.mark.skipif(ENGINE != "apptainer", reason="of Apptainer")]

# Without rights, and with a user namespace to be made by Apptainer, also where root runs the tests: who has a number
# other than 0 in a user namespace has no capability there.
ORDINARY = ("unshare", "--map-user=1000", "--map-group=1000")


def test_an_ordinary_users_stage_may_do_as_little(playground: Path) -> None:
    attempts = [attempt for attempt, _ in ATTEMPTS]
    who = 'print(os.getuid(), [line for line in open("/proc/self/status") if line.startswith("CapEff")])'
    result = train(playground, trying(attempts) + who, *ORDINARY)
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
    result = train(playground, stage, *ORDINARY, HOME=str(tmp_path), APPTAINER_BIND=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "/tmp False\n"), result.stderr
    trained = playground / "data/runs/r1-llm-only/trained"
    assert trained.stat().st_uid == os.getuid()
    trained.rmdir()


@pytest.mark.parametrize("parent", ["/tmp", "/var/tmp"])
def test_a_workspace_below_a_folder_that_each_container_has_of_its_own_is_read_only_too(
    playground: Path, parent: str
) -> None:
    with TemporaryDirectory(dir=parent) as folder:
        workspace = shutil.copytree(playground, Path(folder) / "workspace", symlinks=True)
        attempts = [attempt for attempt, error in ATTEMPTS if error == "Read-only file system"]
        result = train(workspace, trying(attempts))
    assert result.returncode == 0, result.stderr
    assert [attempt for attempt, error in json.loads(result.stdout).items() if "Read-only" not in str(error)] == []


def test_stages_give_the_bytes_that_a_process_gives_also_in_jobs(tmp_path: Path) -> None:
    """With the locked packages, and in jobs if Slurm is up. The weights of the pipeline: test_pipeline.py."""
    digests = {}
    for engine, place in (("process", "here"), ("apptainer", "slurm" if "SLURM_CONF" in os.environ else "here")):
        workspace = copy_of_checkout(tmp_path / f"{engine} {place}")
        chosen = environment(BAKEOFF_ENGINE=engine, BAKEOFF_PLACE=place)
        for stage in (("base", "vlm"), ("prepare", "nutrition-tables"), ("plan", "r1-llm-only")):
            output = run(workspace, "docker/run", *stage, **chosen)
            assert ("launcher: srun" in output) == (place == "slurm")
        files = [path for path in (workspace / "data").rglob("*") if path.is_file()]
        digests[engine] = {
            str(path.relative_to(workspace)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if "provenance" not in path.parts
        }
        records = [json.loads(path.read_text()) for path in (workspace / "data/provenance").rglob("*.json")]
        assert {record["engine"] for record in records} == {engine}
    assert digests["process"] == digests["apptainer"]
