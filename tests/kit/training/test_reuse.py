"""What another recipe has trained is taken over where it is the same training, and nowhere else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stages.core.lineage import Lineage, read_lineage, verified_lineage, write_lineage
from stages.core.publish import publish_json
from stages.kit.memory_use.stage_memory import stage_memory_path, write_stage_memory
from stages.kit.training.record import read_record
from stages.kit.training.reuse import reuse_training
from tests.kit.training.small import plan_for
from tests.made_up_records import TRAINING
from tests.made_up_runs import made_up_memory

PLAN = plan_for("r2-vision-only")
OTHER = Path("data/runs/r3-stage1")
MINE = Path("data/runs") / PLAN.recipe


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lineage:
    """In a workspace where another recipe was trained."""
    monkeypatch.chdir(tmp_path)
    Path("data/bases/vlm").mkdir(parents=True)
    Path("data/bases/vlm/config.json").write_text("{}")
    base = write_lineage(Path("data/bases/vlm"), kind="base", name="vlm", source={"folder": "x"})
    (OTHER / "trained").mkdir(parents=True)
    (OTHER / "trained/weights.safetensors").write_bytes(b"weights")
    write_lineage(OTHER / "trained", kind="trained", name=OTHER.name, parents={"base": (Path("data/bases/vlm"), base)})
    publish_json(replace(TRAINING, recipe=OTHER.name, fingerprint="same"), OTHER / "training/training.json")
    (OTHER / "training/trace.csv").write_text("step,loss,grad_norm\n")
    write_stage_memory(made_up_memory("train", OTHER.name), task=PLAN.task)
    return base


def test_the_same_training_is_taken_over_under_the_own_name(base: Lineage) -> None:
    assert reuse_training(OTHER.name, PLAN, "same", base, write=True)
    record = read_record(MINE / "training/training.json")
    assert (record.recipe, record.taken_from, record.fingerprint) == (PLAN.recipe, OTHER.name, "same")
    lineage = verified_lineage(MINE / "trained", fix="")
    assert (lineage.name, lineage.digest) == (PLAN.recipe, read_lineage(OTHER / "trained").digest)
    assert lineage.parents["base"].lineage == base
    assert (MINE / "training/trace.csv").read_text() == "step,loss,grad_norm\n"
    memory_path = stage_memory_path(Path("data"), PLAN.task, name=PLAN.recipe, stage="train")
    assert json.loads(memory_path.read_text())["name"] == PLAN.recipe


@pytest.mark.parametrize("damage", ["another", "flipped", "missing", "record"])
def test_nothing_else_is(base: Lineage, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="stages")
    if damage == "flipped":
        (OTHER / "trained/weights.safetensors").write_bytes(b"weightz")
    elif damage == "missing":
        (OTHER / "trained/lineage.json").unlink()
    elif damage == "record":
        (OTHER / "training/training.json").write_text("{")
    assert not reuse_training(OTHER.name, PLAN, "other" if damage == "another" else "same", base, write=True)
    assert not MINE.exists()
    assert "r3-stage1 has trained by the same plan, but" in caplog.text
