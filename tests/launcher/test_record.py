"""The record that the launcher leaves of a stage: through the real launcher, on a stage that does next to nothing."""

import hashlib
import os
import runpy
import shutil
import sys
from dataclasses import replace
from datetime import datetime
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.core.environment import installed_packages, pinned_instructions
from stages.core.errors import UserError
from stages.core.lineage import content_digest
from stages.core.params import load_params
from stages.core.provenance import Provenance, read_provenance
from stages.launcher import process as machine
from stages.launcher.gpus import Gpu
from stages.launcher.pipeline import declared_stages
from stages.launcher.process import ProcessEngine, cuda_of_torch, this_machine, triton_dir
from stages.launcher.record import code_digest, git_state, lock_digest, used_params
from stages.planning.plan import read_plan
from tests.documents import write_yaml
from tests.launcher.small_checkout import commit, run, set_gpus, small_checkout

RECORD = "data/provenance/detection/train@r1-llm-only.json"

STAGE = """
import os, pathlib, sys

sys.exit(int(os.environ["OMP_CODE"])) if "OMP_CODE" in os.environ else None
pathlib.Path("params.yaml").write_text(pathlib.Path("params.yaml").read_text() + "# edited meanwhile")
trained = pathlib.Path("data/runs/r1-llm-only/trained")
trained.mkdir(exist_ok=True)
(trained / "weights").write_text("weights")
"""

PIPELINE = f"""
stages:
  train:
    foreach: ${{recipes}}
    do:
      cmd: exec docker/run train
      params: ["tracking", "profiles.${{profile}}.memory.micro_batch", "profiles.${{profile}}.bases.none"]
      deps: [data/bases/vlm, "data/runs/${{key}}/plan.yaml", docker, stages/train.py]
      outs: ["{RECORD.replace("r1-llm-only", "${key}")}", "data/runs/${{key}}/trained"]
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A checkout with one commit, and STAGE as its train stage."""
    workspace = small_checkout(tmp_path / "a workspace", pipeline=PIPELINE, train=STAGE)
    commit(workspace)
    return workspace


def train(workspace: Path, code: int = 0, **environment: str) -> Provenance:
    """The record of a training by the launcher."""
    run(workspace, "docker/run", "train", "r1-llm-only", code=code, **environment)
    return read_provenance(workspace / RECORD)


def test_record_has_the_origin_of_the_outputs(workspace: Path) -> None:
    record = train(workspace, DVC_EXP_NAME="narrow", OMP_NUM_THREADS="1", SECRET="x")
    assert record.stage == "train@r1-llm-only"
    assert record.commit == run(workspace, "git", "rev-parse", "HEAD").strip()
    assert record.changed == []  # the stage edits params.yaml, but after it has started
    assert record.params == {
        "profiles.tiny.memory.micro_batch": 16,
        "tracking": {"to": [], "project": "bakeoff", "wandb_mode": "offline"},
    }
    plan = read_plan("r1-llm-only", runs_dir=workspace / "data/runs")
    assert record.plan is not None
    assert record.plan["schedule"]["num_steps"] == plan.schedule.num_steps
    assert (record.plan["seed"], record.attempt, record.experiment) == (42, 0, "narrow")
    base = workspace / "data/bases/vlm"
    assert record.inputs["data/bases/vlm"] == content_digest(base)
    plan_path = "data/runs/r1-llm-only/plan.yaml"
    assert record.inputs[plan_path] == hashlib.sha256((workspace / plan_path).read_bytes()).hexdigest()
    assert (record.engine, record.image, record.gpus, record.driver) == ("process", None, [], None)
    assert record.machine == replace(
        this_machine(pinned_instructions({})), packages=record.machine.packages if record.machine else {}
    )
    assert record.machine.packages["pydantic"] == version("pydantic")
    assert record.environment == {"OMP_NUM_THREADS": "1"}
    assert datetime.fromisoformat(record.started) <= datetime.fromisoformat(record.ended)
    assert record.seconds > 0


def test_changes_since_the_commit_are_named_and_results_are_not(workspace: Path) -> None:
    (workspace / "stages/core/errors.py").open("a").write("# changed")
    (workspace / "stages/thử nghiệm.py").write_text("new")
    (workspace / "dvc.lock").write_text("written by every stage")
    (workspace / "notes.txt").write_text("a note")
    record = train(workspace)
    assert record.changed == ["stages/core/errors.py", "stages/thử nghiệm.py"]
    record = train(workspace)  # the stage has edited params.yaml meanwhile
    assert "params.yaml" in record.changed


def test_failed_stage_leaves_no_record_and_an_unwritable_record_fails_the_stage(workspace: Path) -> None:
    """DVC would miss an output; so does who runs the stage by hand."""
    (workspace / "data/provenance").write_text("no folder")
    for code, environment in ((3, {"OMP_CODE": "3"}), (1, {})):
        with pytest.raises(UserError, match=r"train@r1-llm-only\.json cannot be read"):
            train(workspace, code, **environment)


def test_reading_git_changes_nothing(workspace: Path) -> None:
    """DVC may be writing there at the same time."""
    os.utime(workspace / "stages/train.py", (10**9, 10**9))  # as it was, but git has to look
    before = (workspace / ".git/index").read_bytes()
    commit, changed = git_state(workspace, ["stages"])
    assert commit is not None
    assert changed == []
    assert (workspace / ".git/index").read_bytes() == before


def test_gpus_and_driver_are_recorded(workspace: Path) -> None:
    gpus = (Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA A100", used_bytes=0) for index in range(2))
    raw = YAML(typ="safe").load(workspace / "params.yaml")
    raw["gpu"] = 24
    raw["profiles"]["tiny"]["device"] = {"kind": "cuda", "count": 2}
    raw["profiles"]["tiny"]["memory"]["placement"] = "ddp"
    write_yaml(raw, workspace / "params.yaml")
    record = train(workspace, **set_gpus(workspace, *gpus))
    assert record.gpus == ["NVIDIA A100"] * 2
    assert record.device == "2 x NVIDIA A100, driver 580.95.05"


def test_code_digest_depends_on_content_alone_and_params_have_defaults(workspace: Path, tmp_path: Path) -> None:
    (stage, *_) = declared_stages(workspace)
    before = code_digest(workspace, stage)
    moved = tmp_path / "moved"
    shutil.copytree(workspace, moved, symlinks=True)
    (moved / "stages/other.py").write_text("not declared")
    assert code_digest(moved, stage) == before
    (moved / "stages/train.py").open("a").write("# changed")
    assert code_digest(moved, stage) != before
    used = used_params(load_params(workspace / "params.yaml"), replace(stage, params=("recipes.r1-llm-only",)))
    assert used["recipes.r1-llm-only"]["max_grad_norm"] == 1.0


def test_packages_are_those_that_are_imported(tmp_path: Path) -> None:
    for folder, name in (("first", "Some_Package-1.0"), ("second", "some.package-2.0"), ("second", "other-3")):
        (tmp_path / folder / f"{name}.dist-info").mkdir(parents=True)
    assert installed_packages([str(tmp_path / "first"), str(tmp_path / "second"), str(tmp_path / "absent")]) == {
        "some-package": "1.0",
        "other": "3",
    }


def test_a_lock_whose_packages_were_changed_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing another program may bring an older package: images are then resized by another Pillow."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / ".bakeoff").mkdir()
    (tmp_path / ".bakeoff/target").write_text("cpu\n")
    lock = tmp_path / ".bakeoff/cpu.lock"
    lock.write_text(
        "pillow==13.0.0 \\\n    --hash=sha256:0\npywin32==312 ; sys_platform == 'win32' \\\n    --hash=sha256:1\n"
    )
    for name in ("pillow-13.0.0", "mlflow-3.17.2"):
        (tmp_path / f"{name}.dist-info").mkdir()
    assert lock_digest(tmp_path, ProcessEngine(), target="cpu") == hashlib.sha256(lock.read_bytes()).hexdigest()
    (tmp_path / "pillow-13.0.0.dist-info").rename(tmp_path / "pillow-12.3.0.dist-info")
    assert lock_digest(tmp_path, ProcessEngine(), target="cpu") is None


def test_cuda_of_torch_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_path = next(path for folder in sys.path for path in Path(folder).glob("torch/version.py"))
    assert cuda_of_torch() == runpy.run_path(str(version_path))["cuda"]
    monkeypatch.setattr(machine, "find_spec", lambda _: ModuleSpec("torch", None, origin=str(tmp_path / "x.py")))
    (tmp_path / "version.py").write_text("cuda: str | None = '13.0'\n")
    assert cuda_of_torch() == "13.0"


def test_triton_has_a_folder_for_each_image_and_set_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Path("/repository")
    images = [None, ("bakeoff:cuda-0", "sha256:0123456789abcdef"), ("bakeoff:cuda-0", "sha256:fedcba9876543210")]
    folders = [triton_dir(image, repository) for image in images]
    assert folders[1] == repository / ".bakeoff/triton/0123456789ab"
    assert folders[0] == triton_dir(None, repository)
    monkeypatch.setattr(machine, "installed_packages", lambda _: {"triton": "0.0.1"})
    folders.append(triton_dir(None, repository))
    assert {folder.parent for folder in folders} == {repository / ".bakeoff/triton"}
    assert len(set(folders)) == 4
