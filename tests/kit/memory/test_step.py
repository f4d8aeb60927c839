"""A step recorded without weights takes what a real one does, as torch's profiler measures it on a CPU.

The measured training is the plain one: real weights, two steps of the real trainer, and nothing of the recorder. Of a
sharded one it is one process that pretends there are others: of real ones the profiler sees neither gloo's copies for
sure, nor what its threads free. What real ones train is that of one process.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.kit.internals.accelerate_internals import reset_accelerator
from stages.kit.internals.torch_internals import pretended_processes
from tests.kit.memory.real_steps import PROCESSES, TRAINED, main, measured_bytes, sharded, train
from tests.kit.memory.small import ALL, FULL, GATE, LABELS, R1, R4, peak_bytes, plan_of, recorded
from tests.kit.training.two_processes import run_two

BF16, CHECKPOINTED = {"precision": "bf16"}, {"gradient_checkpointing": True}
NF4, FUSED = {"quantization": "nf4"}, {"optimizer": "adamw_torch_fused"}
PACKED = {"padding_free": True}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "detection r1, fp16": ("detection", {**R1, "precision": "fp16"}),
    "detection r1, nf4, checkpointed": ("detection", {**R1, **NF4, **CHECKPOINTED}),
    "detection r1, eager, one at a time": ("detection", {**R1, "attn": "eager", "micro_batch": 1}),
    "detection r1, from features": ("detection", {**R1, "features_bytes": 1}),
    "text full, bf16, fused": ("text", {**FULL, **BF16, **FUSED}),
    "moe gate": ("moe", GATE),
    "detection r4, nf4, bf16, packed, checkpointed": ("detection", {**R4, **NF4, **BF16, **PACKED, **CHECKPOINTED}),
    "detection, all of it, packed, eager": ("detection", {**ALL, **PACKED, "attn": "eager"}),
    "text full, packed, long": ("text", {**FULL, **PACKED, "max_length": 256, "micro_batch": 4}),
    "moe full, bf16, packed": ("moe", {**FULL, **BF16, **PACKED}),
    "moe router labels, bf16, packed": ("moe", {**LABELS, **BF16, **PACKED}),
    "detection r4, bf16, checkpointed, sharded": ("detection", sharded({**R4, **BF16, **CHECKPOINTED})),
    "detection, all of it, sharded": ("detection", sharded(ALL)),
    "moe full, sharded": ("moe", sharded({**FULL, "max_length": 32})),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_recorded_without_weights_is_what_a_training_takes(name: str, tmp_path: Path) -> None:
    model, settings = SETTINGS[name]
    plan = plan_of(**settings)
    with pretended_processes(PROCESSES) if plan.placement == "sharded" else nullcontext() as mesh:
        measured = measured_bytes(model, plan, tmp_path, mesh)
    reset_accelerator()
    assert peak_bytes(recorded(model, plan)) == pytest.approx(measured, rel=0.002)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two real processes found."""
    folder = tmp_path_factory.mktemp("two-processes")
    run_two(main, folder)
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
