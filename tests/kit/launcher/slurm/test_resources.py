from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.params.load import load_params
from stages.core.params.schema import DeviceParams, JobParams, Params, SlurmParams
from stages.kit.launcher.slurm.resources import MARGIN, PROCESS_GIB, host_gib, job_options
from stages.kit.planning.plan import resolve_plan, write_plan
from tests import ROOT

PARAMS = load_params(ROOT / "params.yaml").on("qwen2-vl-7b-48gb")
RECIPE = "r1-llm-only"
GIB = 2**30


def planned(workspace: Path, **changes: Any) -> Path:
    """A workspace with a plan for 8 billion weights in bf16, of which an eighth is trained."""
    plan = resolve_plan(PARAMS, RECIPE, train_samples=32)
    counts = {"vision": 0, "projector": 0, "llm": GIB, "total": GIB, "all": 8 * GIB}
    changes = {"dataloader_workers": 0, **changes}
    write_plan(replace(plan, trainable=counts, **changes), workspace / "data/runs" / RECIPE / "plan.yaml")
    return workspace


def asking(**job: Any) -> Params:
    return replace(PARAMS, slurm=SlurmParams(gpu=JobParams(**job)))


def test_the_hosts_memory_has_room_for_each_process_its_copy_of_the_model_and_a_checkpoint(tmp_path: Path) -> None:
    workspace = planned(tmp_path)
    assert host_gib("train", RECIPE, workspace) == MARGIN * (PROCESS_GIB + 16 + 12)
    assert host_gib("merge", RECIPE, workspace) == MARGIN * (PROCESS_GIB + 2 * 16)
    assert host_gib("evaluate", RECIPE, workspace) == MARGIN * (PROCESS_GIB + 16)
    planned(tmp_path, placement="ddp", device=DeviceParams(kind="cuda", count=4, memory_gb=48), dataloader_workers=2)
    assert host_gib("train", RECIPE, workspace) == MARGIN * (4 * (PROCESS_GIB + 16 + 2) + 12)


@pytest.mark.parametrize("damage", [None, "no plan"])
def test_without_a_plan_that_can_be_read_a_stage_still_asks_for_memory(tmp_path: Path, damage: str | None) -> None:
    if damage:
        (tmp_path / "data/runs" / RECIPE).mkdir(parents=True)
        (tmp_path / "data/runs" / RECIPE / "plan.yaml").write_text(damage)
    assert host_gib("train", RECIPE, tmp_path) == 8


def test_what_a_person_sets_comes_last_and_wins(tmp_path: Path) -> None:
    params = asking(partition="a100", account="lab", minutes=90, memory_gb=64, options=("--gres=gpu:a100:1",))
    options = job_options("train", RECIPE, params, num_gpus=1, workspace_dir=tmp_path)
    assert options[-1] == "--gres=gpu:a100:1"
    assert "--gres=gpu:1" not in options
    assert {"--partition=a100", "--account=lab", "--time=90", "--mem=61035M"} <= set(options)


def test_stages_without_a_gpu_are_asked_for_apart(tmp_path: Path) -> None:
    params = asking(partition="a100")
    options = job_options("compare", "detection", params, num_gpus=0, workspace_dir=tmp_path)
    assert not any(option.startswith(("--gres", "--partition", "--time")) for option in options)


def test_a_persons_option_takes_the_place_of_what_it_excludes(tmp_path: Path) -> None:
    params = asking(options=("--mem-per-cpu=4G", "--cpus-per-task="))
    options = job_options("train", RECIPE, params, num_gpus=1, workspace_dir=tmp_path)
    assert [option for option in options if "mem" in option or "cpus" in option] == ["--mem-per-cpu=4G"]
    assert "--gres=gpu:1" in options
