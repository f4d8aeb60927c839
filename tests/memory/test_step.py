"""A step recorded without weights takes what a real one does, as torch's profiler measures it on a CPU.

The measured training is the plain one: real weights, two steps of the real trainer, and nothing of the recorder. Of a
sharded one it is one process that pretends there are others: of real ones the profiler sees neither gloo's copies for
sure, nor what its threads free. What real ones train: tests/training/test_together.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from stages.internals.accelerate_internals import reset_accelerator
from stages.internals.torch_internals import pretended_processes
from tests.memory.real_steps import PROCESSES, measured_bytes, sharded
from tests.memory.small import ALL, ATTENTION, EVERYTHING, FULL, GATE, LABELS, R1, R4, peak_bytes, plan_of, recorded

BF16, FP16, CHECKPOINTED = {"precision": "bf16"}, {"precision": "fp16"}, {"gradient_checkpointing": True}
NF4, FUSED = {"quantization": "nf4"}, {"optimizer": "adamw_torch_fused"}
PACKED, NOISE = {"padding_free": True}, {"neftune_alpha": 5.0}
# So little of a batch that the optimizer's step is the peak.
SHORT = {"micro_batch": 1, "grad_accumulation": 1, "max_length": 16}
ONE = {"grad_accumulation": 1}
DORA = {**R4, **ONE, "lora": replace(EVERYTHING, dora=True)}
PISSA = {**R1, "lora": replace(ATTENTION, init="pissa", rslora=True, loraplus_lr_ratio=16.0)}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "detection r1, fp16, eager, one at a time": ("detection", {**R1, **FP16, "attn": "eager", "micro_batch": 1}),
    "detection r1, PiSSA, LoRA+": ("detection", PISSA),
    "detection r4, DoRA, nf4, checkpointed": ("detection", {**DORA, **NF4, **CHECKPOINTED}),
    "detection r1, from features": ("detection", {**R1, "features_bytes": 1}),
    "text full, bf16, fused": ("text", {**FULL, **BF16, **FUSED}),
    "moe gate": ("moe", GATE),
    "detection r4, nf4, bf16, packed, checkpointed": (
        "detection",
        {**R4, **ONE, **NF4, **BF16, **PACKED, **CHECKPOINTED},
    ),
    "detection, all of it, packed, eager": ("detection", {**ALL, **PACKED, "attn": "eager"}),
    "text full, packed, noise, long": ("text", {**FULL, **PACKED, **NOISE, "max_length": 256, "micro_batch": 4}),
    "moe full, bf16, packed": ("moe", {**FULL, **BF16, **PACKED}),
    "moe router labels, bf16, packed": ("moe", {**LABELS, **BF16, **PACKED}),
    "text full, Lion": ("text", {**FULL, **SHORT, "optimizer": "lion_32bit"}),
    "text full, Adafactor": ("text", {**FULL, **SHORT, "optimizer": "adafactor"}),
    "text full, Muon": ("text", {**FULL, **SHORT, "optimizer": "muon"}),
    "detection r4, nf4, bf16, Muon, noise": ("detection", {**R4, **ONE, **NF4, **BF16, "optimizer": "muon", **NOISE}),
    "detection r4, DoRA, bf16, checkpointed, sharded": ("detection", sharded({**DORA, **BF16, **CHECKPOINTED})),
    "detection, all of it, sharded": ("detection", sharded(ALL)),
    "moe full, sharded": ("moe", sharded({**FULL, "max_length": 32})),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_recorded_without_weights_is_what_a_training_takes(name: str) -> None:
    model, settings = SETTINGS[name]
    plan = plan_of(**settings)
    with pretended_processes(PROCESSES) if plan.memory.placement == "sharded" else nullcontext() as mesh:
        measured = measured_bytes(model, plan, mesh)
    reset_accelerator()
    assert peak_bytes(recorded(model, plan)) == pytest.approx(measured, rel=0.002)
