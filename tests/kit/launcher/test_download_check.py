"""A base of many GB is not fetched for a run that this machine has no GPU for, unless only fetching is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.core.params.schema import Params
from stages.kit.launcher.download_check import fetches_only, refuse_download_without_gpus
from stages.kit.launcher.gpus import Gpu, GpuState
from stages.kit.launcher.pipeline import Pipeline
from tests import ROOT
from tests.documents import write_yaml
from tests.kit.launcher.small_checkout import copy_launcher

HUB = "hub:Qwen/Qwen2-VL-7B-Instruct@eed1309"
BUSY = GpuState(gpu=Gpu(index=0, uuid="GPU-0", name="NVIDIA A100"), used_bytes=70 * 2**30, total_bytes=80 * 2**30)


def check(
    *command_line: str,
    profile: str = "qwen2-vl-7b-48gb",
    source: str = HUB,
    gpus: Sequence[GpuState] = (),
    in_container: bool = False,
    cuda: str | None = "13.0",
    visible: str | None = None,
) -> None:
    params: Params = replace(load_params(ROOT / "params.yaml"), profile=profile)
    refuse_download_without_gpus(
        source,
        params,
        Pipeline.of(ROOT),
        command_line=command_line,
        in_container=in_container,
        visible=visible,
        read_gpus=lambda: gpus,
        cuda_of_torch=lambda: cuda,
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
        check("dvc", "repro")
    check(*caught.value.message.rpartition("node: ")[2].split())


def test_what_needs_no_download_or_no_gpu_is_not_refused() -> None:
    check("dvc", "repro", source="")
    check("dvc", "repro", source="folder:/models/vlm")
    check("dvc", "repro", source="generated")
    check("dvc", "repro", profile="tiny")
    check("dvc", "repro", gpus=[BUSY])  # whoever computes there now may be done when the training starts


def test_fewer_or_hidden_gpus_are_too_few() -> None:
    with pytest.raises(UserError, match="wants 2 GPUs; this machine has 1 GPU"):
        check("dvc", "repro", profile="qwen2-vl-7b-2x48gb", gpus=[BUSY])
    with pytest.raises(UserError, match="not in CUDA_VISIBLE_DEVICES="):
        check("dvc", "repro", gpus=[BUSY], visible="")


def test_a_torch_for_cpus_is_refused_where_stages_use_it() -> None:
    with pytest.raises(UserError, match="make setup TARGET=cuda"):
        check("dvc", "repro", gpus=[BUSY], cuda=None)
    check("dvc", "repro", gpus=[BUSY], cuda=None, in_container=True)


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
    copy_launcher(tmp_path)
    params = YAML(typ="safe").load(ROOT / "params.yaml") | {"profile": "qwen2-vl-7b-48gb"}
    write_yaml(params, tmp_path / "params.yaml")
    (tmp_path / "stages/base.py").write_text("import pathlib; pathlib.Path('fetched').touch()")
    (tmp_path / "dvc.yaml").write_text(PIPELINE)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    environment = {
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "HOME": os.environ["HOME"],
        "BAKEOFF_ENGINE": "process",
        "CUDA_VISIBLE_DEVICES": "",  # also where these tests run on a machine with GPUs
        "DVC_NO_ANALYTICS": "1",
    }

    def dvc(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["dvc", *args], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    dvc("init", "--quiet")
    refused = dvc("repro", "train")
    assert refused.returncode != 0
    assert "To fetch only, as on a login node: dvc repro base@vlm" in refused.stderr
    assert not (tmp_path / "fetched").exists()
    fetching = dvc("repro", "base@vlm")
    assert fetching.returncode == 0, fetching.stderr
    assert (tmp_path / "fetched").exists()
