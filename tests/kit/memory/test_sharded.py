"""Sharded over processes, or a whole one in each, a model is trained as in one, and what sharding takes is predicted.

What is trained is that of two real processes. Memory is that of one that pretends there are others: of real ones the
profiler sees neither gloo's copies for sure, nor what its threads free.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.core.params.schema import DeviceParams
from stages.kit.memory.calibration import load_calibration
from stages.kit.memory.predict import predict
from stages.kit.memory.step import forget_accelerator, pretended_processes, record_step
from stages.kit.models.processors import Processor
from tests import ROOT
from tests.kit.memory.sharded_steps import PROCESSES, TRAINED, measured_bytes, sharded_plan, train
from tests.kit.memory.small import ALL, FULL, LABELS, R1, R4, batch_of, config_of, peak_bytes, plan_of

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "detection r4, bf16, checkpointed": ("detection", {**R4, "precision": "bf16", "gradient_checkpointing": True}),
    "detection, all of it": ("detection", ALL),
    "text full, bf16": ("text", {**FULL, "precision": "bf16"}),
    "moe full": ("moe", {**FULL, "max_length": 32}),
    "moe router labels": ("moe", LABELS),
}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two real processes found."""
    folder = tmp_path_factory.mktemp("two-processes")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(
        [sys.executable, *launch, "-m", "tests.kit.memory.sharded_steps", str(folder)],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
    )
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_of_two_processes_gives_the_weights_and_gradients_of_one(
    name: str, two_processes: Path, tmp_path: Path
) -> None:
    alone = train(name, None, tmp_path)
    together = load_file(two_processes / f"{name}.safetensors")
    assert together.keys() == alone.keys()
    for tensor_name, tensor in together.items():
        torch.testing.assert_close(tensor, alone[tensor_name], rtol=0, atol=2e-6)


def test_the_start_contract_is_every_processs_whoever_holds_the_breach(two_processes: Path) -> None:
    assert "the gradient of model.norm.weight (llm) is not finite" in (two_processes / "breach.txt").read_text()


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_recorded_without_weights_is_what_a_sharded_training_takes(
    name: str, processors: Mapping[str, Processor], tmp_path: Path
) -> None:
    model, settings = SETTINGS[name]
    plan, config = sharded_plan(settings), config_of(model)
    with pretended_processes(PROCESSES) as mesh:
        measured = measured_bytes(model, settings, mesh, tmp_path)
    forget_accelerator()
    predicted = peak_bytes(record_step(plan, config, processors[model], batch_of(plan, config)))
    assert predicted == pytest.approx(measured, rel=0.002)


def test_a_few_layers_say_what_all_of_a_sharded_model_take(processors: Mapping[str, Processor]) -> None:
    plan, config = (
        plan_of(kind="cuda", precision="bf16", gradient_checkpointing=True, **FULL),
        config_of("text", (6, 0)),
    )
    plan = replace(plan, placement="sharded", device=replace(plan.device, count=4))
    batch = batch_of(plan, config)
    scaled_up, exact = (
        predict(plan, config, processors["text"], batch, load_calibration(), exact=exact) for exact in (False, True)
    )
    assert scaled_up.allocated_bytes == pytest.approx(exact.allocated_bytes, rel=0.005)


def test_more_devices_take_less_each_and_what_is_shared_out_by_their_number(
    processors: Mapping[str, Processor],
) -> None:
    config = config_of("text")
    taken = {}
    for count in (2, 8):
        plan = plan_of(kind="cuda", precision="bf16", **FULL)
        plan = replace(plan, placement="sharded", device=DeviceParams(kind="cuda", count=count))
        recording = record_step(plan, config, processors["text"], batch_of(plan, config))
        taken[count] = recording.peaks()["backward"].budget
    for entry in ("weights", "gradients", "optimizer"):
        # The allocator rounds up what is small.
        assert taken[2][entry] == pytest.approx(4 * taken[8][entry], rel=0.1)
    assert taken[2]["activations"] == taken[8]["activations"]


def test_the_group_that_is_pretended_is_gone_after_a_record(processors: Mapping[str, Processor]) -> None:
    plan, config = sharded_plan(R1), config_of("text")
    record_step(plan, config, processors["text"], batch_of(plan, config))
    assert not torch.distributed.is_initialized()
