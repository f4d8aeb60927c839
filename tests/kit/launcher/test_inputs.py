"""What a stage reads has to be what its maker's record says: through the real launcher, on stages that do little."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.kit.launcher.small_checkout import small_checkout

PIPELINE = """
stages:
  plan@r1-llm-only:
    cmd: docker/run plan
    deps: [data/bases/vlm]
    outs: [data/runs/r1-llm-only/plan.yaml, data/provenance/plan@r1-llm-only.json]
  train@r1-llm-only:
    cmd: docker/run train
    deps: [data/runs/r1-llm-only/plan.yaml]
    outs: [data/runs/r1-llm-only/trained, data/provenance/train@r1-llm-only.json]
  compare@detection:
    cmd: docker/run compare
    deps: [data/runs/r1-llm-only/plan.yaml, data/runs/r1-llm-only/trained]
    outs: [data/report]
"""

PLAN = Path("data/runs/r1-llm-only/plan.yaml")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    train = "from pathlib import Path\nPath('data/runs/r1-llm-only/trained').write_text('weights')\n"
    return small_checkout(tmp_path / "a workspace", pipeline=PIPELINE, plan="", train=train, compare="")


def launched(workspace: Path, *args: str) -> str:
    """What the launcher said; "" where the stage ran."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "BAKEOFF_ENGINE": "process"}
    ended = subprocess.run(
        ["docker/run", *args], cwd=workspace, env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode == 0) == (ended.stderr == "")
    return ended.stderr


def test_what_its_maker_did_not_leave_is_refused_and_named_by_every_stage_that_reads_it(workspace: Path) -> None:
    plan = workspace / PLAN
    for args in (("plan", "r1-llm-only"), ("train", "r1-llm-only"), ("compare", "detection")):
        assert launched(workspace, *args) == ""
    good = plan.read_text()
    plan.write_text(good.replace("seed: 42", "seed: 43"))
    said = (
        f"{PLAN} is not what plan@r1-llm-only made, by its record in data/provenance/plan@r1-llm-only.json; "
        "rebuild it with: dvc repro -f -s plan@r1-llm-only"
    )
    for args in (("train", "r1-llm-only"), ("compare", "detection")):  # one of them has no record of its own
        assert said in launched(workspace, *args)
    plan.write_text(good)
    assert launched(workspace, "train", "r1-llm-only") == ""


def test_what_no_record_tells_of_is_taken_as_it_is(workspace: Path) -> None:
    assert launched(workspace, "train", "r1-llm-only") == ""
    (workspace / "data/provenance/train@r1-llm-only.json").unlink()
    (workspace / "data/runs/r1-llm-only/trained").write_text("other weights")
    assert launched(workspace, "compare", "detection") == ""


def test_a_record_that_is_damaged_itself_is_named(workspace: Path) -> None:
    assert launched(workspace, "plan", "r1-llm-only") == ""
    (workspace / "data/provenance/plan@r1-llm-only.json").write_text("{")
    assert "data/provenance/plan@r1-llm-only.json is damaged" in launched(workspace, "train", "r1-llm-only")
