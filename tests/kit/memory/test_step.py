"""What is recorded without weights is what a training takes: on a CPU, where torch's profiler can tell.

The measured training is the plain one: real weights, two steps of the real trainer, and nothing of the recorder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from stages.kit.memory.step import record_step
from stages.kit.mixture.trainer import make_trainer
from stages.kit.models.parts import apply_recipe
from stages.kit.models.processors import Processor
from stages.kit.planning.plan import Plan
from stages.kit.training.contract import StartContract
from stages.kit.training.peak import cpu_peak
from tests.kit.memory.small import (
    ALL,
    FULL,
    GATE,
    LABELS,
    R1,
    R2,
    R4,
    batch_of,
    config_of,
    peak_bytes,
    plan_of,
    quantization_tensors,
)
from tools.gpu.models import random_model, with_contents

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "detection r1": ("detection", R1),
    "detection r1, one at a time": ("detection", {**R1, "micro_batch": 1}),
    "detection r1, checkpointed": ("detection", {**R1, "gradient_checkpointing": True}),
    "detection r1, bf16": ("detection", {**R1, "precision": "bf16"}),
    "detection r1, fp16": ("detection", {**R1, "precision": "fp16"}),
    "detection r1, nf4": ("detection", {**R1, "quantization": "nf4"}),
    "detection r4, nf4, bf16": ("detection", {**R4, "quantization": "nf4", "precision": "bf16"}),
    "detection r1, eager": ("detection", {**R1, "attn": "eager"}),
    "detection r2": ("detection", R2),
    "detection r2, bf16, checkpointed": ("detection", {**R2, "precision": "bf16", "gradient_checkpointing": True}),
    "detection r4": ("detection", R4),
    "detection r4, no accumulation": ("detection", {**R4, "grad_accumulation": 1}),
    "detection, all of it": ("detection", ALL),
    "text lora": ("text", R1),
    "text lora, checkpointed": ("text", {**R1, "gradient_checkpointing": True}),
    "text lora, nf4, one short": ("text", {**R1, "quantization": "nf4", "micro_batch": 1, "max_length": 16}),
    "text full": ("text", FULL),
    "text full, fused": ("text", {**FULL, "optimizer": "adamw_torch_fused"}),
    "text full, bf16": ("text", {**FULL, "precision": "bf16"}),
    "text full, checkpointed": ("text", {**FULL, "gradient_checkpointing": True}),
    "text full, long": ("text", {**FULL, "max_length": 256}),
    "moe full": ("moe", FULL),
    "moe full, checkpointed": ("moe", {**FULL, "gradient_checkpointing": True}),
    "moe full, bf16": ("moe", {**FULL, "precision": "bf16"}),
    "moe full, fused": ("moe", {**FULL, "optimizer": "adamw_torch_fused"}),
    "moe lora": ("moe", R1),
    "moe gate": ("moe", GATE),
    "moe router labels": ("moe", LABELS),
    "moe router labels, bf16": ("moe", {**LABELS, "precision": "bf16"}),
}


def measured_bytes(
    plan: Plan, config: PreTrainedConfig, processor: Processor, batch: Mapping[str, torch.Tensor], scratch_dir: Path
) -> int:
    """The peak of two optimizer steps: only the second begins with the optimizer's state there."""
    torch.manual_seed(0)
    batch = with_contents(batch)
    model = random_model(plan, config)
    scales = quantization_tensors(model)
    samples = plan.schedule.micro_batch * plan.schedule.grad_accumulation
    trainer = make_trainer(
        replace(plan, schedule=replace(plan.schedule, num_steps=2, train_samples=samples)),
        model=apply_recipe(model, plan.parts, plan.lora, plan.full_targets),
        processor=processor,
        collator=lambda _: dict(batch),
        callbacks=[],
        scratch_dir=scratch_dir,
        report_to="none",
        logging_strategy="no",
    )
    trainer.remove_callback(StartContract)  # an adapter's gradient is zero where the model itself is random
    trainer.remove_callback(trainer.rehearsal)
    if plan.precision == "fp16":  # a step that overflows leaves no optimizer state
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with cpu_peak([*batch.values(), *trainer.model.parameters(), *trainer.model.buffers(), *scales]) as peak:
        trainer.train()
    return peak.size_bytes


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_recorded_without_weights_is_what_a_training_takes(
    name: str, processors: Mapping[str, Processor], tmp_path: Path
) -> None:
    model, settings = SETTINGS[name]
    plan, config = plan_of(**settings), config_of(model)
    batch = batch_of(plan, config)
    predicted = peak_bytes(record_step(plan, config, processors[model], batch))
    assert predicted == pytest.approx(measured_bytes(plan, config, processors[model], batch, tmp_path), rel=0.002)
