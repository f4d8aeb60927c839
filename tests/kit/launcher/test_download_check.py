"""A base of many GB is not fetched for a run that this machine has no GPU for, unless only fetching is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.kit.launcher import download_check
from stages.kit.launcher.download_check import fetches_only, refuse_download_without_gpus
from stages.kit.launcher.gpus import Gpu
from stages.kit.launcher.pipeline import declared_stages
from tests import ROOT
from tests.kit.launcher.small_checkout import copy_code, run, small_checkout

HUB = "hub:Qwen/Qwen2-VL-7B-Instruct@eed1309"
REPRO = ("dvc", "repro")
PARAMS, STAGES = load_params(ROOT / "params.yaml"), declared_stages(ROOT)


def check(*command_line: str, profile: str = "qwen2-vl-7b-48gb", source: str = HUB, **machine: Any) -> None:
    """machine: that of a login node, with these changes."""
    machine = {"gpus": 0, "in_container": False, "cuda": "13.0", "visible": None, **machine}
    busy = [Gpu(index=index, uuid=f"GPU-{index}", name="A100", used_bytes=2**36) for index in range(machine["gpus"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download_check, "read_gpus", lambda: busy)
        patch.setattr(download_check, "cuda_of_torch", lambda: machine["cuda"])
        refuse_download_without_gpus(
            source,
            replace(PARAMS, profile=profile),
            STAGES,
            command_line=command_line,
            in_container=machine["in_container"],
            visible=machine["visible"],
        )


@pytest.mark.parametrize(
    ("command_line", "way_out"),
    [
        (("dvc", "repro"), "dvc repro base@vlm prepare@nutrition-tables"),
        (("dvc", "repro", "base@vlm", "compare@detection"), "dvc repro base@vlm prepare@nutrition-tables"),
        (
            ("dvc", "exp", "run", "-S", "profile=qwen2-vl-7b-48gb", "evaluate@r1-llm-only"),
            "dvc exp run --temp -S profile=",
        ),
        (
            ("dvc", "exp", "exec-run", "--infofile", "x"),
            "dvc exp run --temp -S profile=qwen2-vl-7b-48gb base@vlm prepare@",
        ),
        ((), "dvc exp run --temp"),
    ],
)
def test_without_a_gpu_nothing_is_fetched_for_a_whole_run(command_line: tuple[str, ...], way_out: str) -> None:
    with pytest.raises(UserError) as caught:
        check(*command_line)
    message = caught.value.message
    assert "profile qwen2-vl-7b-48gb wants 1 GPU, and this machine has none" in message
    assert f"nothing is fetched from {HUB}" in message
    assert way_out in message


def test_the_way_out_is_let_through() -> None:
    with pytest.raises(UserError) as caught:
        check(*REPRO)
    check(*caught.value.message.rpartition("node: ")[2].split())


@pytest.mark.parametrize(
    "settings",
    [
        {"source": ""},
        {"source": "folder:/models/vlm"},
        {"source": "generated"},
        {"profile": "tiny"},
        {"gpus": 1},  # whoever computes there now may be done when the training starts
        {"gpus": 1, "cuda": None, "in_container": True},
    ],
)
def test_what_needs_no_download_or_no_gpu_or_has_one_is_not_refused(settings: dict[str, Any]) -> None:
    check(*REPRO, **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"gpus": 1, "profile": "qwen2-vl-7b-2x48gb"}, "wants 2 GPUs; this machine has 1 GPU"),
        ({"gpus": 1, "visible": ""}, "not in CUDA_VISIBLE_DEVICES="),
        ({"gpus": 1, "cuda": None}, "make setup TARGET=cuda"),
    ],
)
def test_too_few_gpus_or_a_torch_for_cpus_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check(*REPRO, **settings)


@pytest.mark.parametrize(
    ("command", "only"),
    [
        ("dvc repro base@vlm", True),
        ("python -m dvc exp run --temp -S profile=x -S recipes.a.base=bases/b base@vlm prepare@nutrition-tables", True),
        ("dvc repro dvc.yaml:base@vlm", True),
        ("dvc repro --downstream base@vlm", False),
        ("dvc repro plan@r1-llm-only base@vlm", False),
        ("dvc repro -S bases.vlm=hub:a/base@vlm", False),
        ("dvc repro compare", False),
    ],
)
def test_targets_are_read_from_the_command_line(command: str, only: bool) -> None:
    assert fetches_only(command.split()) == only


PIPELINE = """
stages:
  base:
    foreach: [vlm]
    do:
      cmd: exec docker/run base ${item}
      outs: [fetched]
  train:
    cmd: exec docker/run train r1-llm-only
    deps: [fetched]
"""


@pytest.mark.pipeline
def test_a_stage_of_dvcs_is_refused_before_it_starts_and_fetches_where_that_is_all(tmp_path: Path) -> None:
    fetching = "import pathlib; pathlib.Path('fetched').touch()"
    workspace = small_checkout(tmp_path / "a workspace", pipeline=PIPELINE, base=fetching)
    copy_code(workspace, "tools.run.__main__")
    params = (workspace / "params.yaml").read_text()
    (workspace / "params.yaml").write_text(params.replace("profile: tiny", "profile: qwen2-vl-7b-48gb"))
    run(workspace, "git", "init", "--quiet")
    run(workspace, "dvc", "init", "--quiet")
    no_gpus: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": ""}  # also where these tests run on a machine with GPUs
    refused = run(workspace, "dvc", "repro", "train", code=255, **no_gpus)
    assert "To fetch only, as on a login node: dvc repro base@vlm" in refused
    side_by_side = run(workspace, "python", "-m", "tools.run", "train", code=255, **no_gpus)
    assert "To fetch only, as on a login node: dvc repro base@vlm" in side_by_side
    assert not (workspace / "fetched").exists()
    run(workspace, "dvc", "repro", "base@vlm", **no_gpus)
    assert (workspace / "fetched").exists()
