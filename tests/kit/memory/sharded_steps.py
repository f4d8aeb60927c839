"""Real trainings of small models, sharded over the processes that torchrun starts, and the memory that each takes.

Run: python -m torch.distributed.run --standalone --nproc-per-node=2 -m tests.kit.memory.sharded_steps RESULT.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stages.kit.memory.step import forget_accelerator
from stages.kit.models.load import DTYPES, auto_class
from stages.kit.models.parts import apply_recipe
from stages.kit.models.processors import load_processor
from stages.kit.models.sharding import local, process_mesh, shard
from stages.kit.params import DeviceParams
from stages.kit.plan import Plan
from stages.kit.training.contract import StartContract
from stages.kit.training.peak import cpu_peak
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.memory.small import ALL, FULL, R1, R4, TINY, batch_of, config_of, plan_of

PROCESSES = 2

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "detection r4, bf16, checkpointed": ("detection", {**R4, "precision": "bf16", "gradient_checkpointing": True}),
    "detection, all of it": ("detection", ALL),
    "text lora": ("text", R1),
    "text full": ("text", FULL),
    "text full, bf16, checkpointed": ("text", {**FULL, "precision": "bf16", "gradient_checkpointing": True}),
    "moe full": ("moe", FULL),
}


def sharded_plan(settings: dict[str, Any]) -> Plan:
    return replace(plan_of(**settings), placement="sharded", device=DeviceParams(kind="cpu", count=PROCESSES))


def measured_bytes(model_name: str, settings: dict[str, Any], scratch_dir: Path) -> int:
    """The peak of this process in two optimizer steps: only the second begins with the optimizer's state there."""
    plan, config = sharded_plan(settings), config_of(model_name)
    processor = load_processor(TINY, None)
    batch = batch_of(plan, config)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=DTYPES[plan.precision], attn_implementation=plan.attn)
    model = apply_recipe(model, plan.parts, plan.lora)
    shard(model, plan, process_mesh(plan))
    samples = plan.schedule.micro_batch * plan.schedule.grad_accumulation * PROCESSES
    trainer = RecipeTrainer(
        replace(plan, schedule=replace(plan.schedule, num_steps=2, train_samples=samples)),
        model=model,
        processor=processor if model_name == "detection" else processor.tokenizer,
        collator=lambda _: dict(batch),
        callbacks=[],
        scratch_dir=scratch_dir,
        report_to="none",
        logging_strategy="no",
    )
    trainer.remove_callback(StartContract)  # an adapter's gradient is zero where the model itself is random
    trainer.remove_callback(trainer.rehearsal)
    with cpu_peak([*batch.values(), *map(local, model.parameters()), *model.buffers()]) as peak:
        trainer.train()
    return peak.size_bytes


def main() -> None:
    peaks = {}
    for name, (model, settings) in SETTINGS.items():
        with tempfile.TemporaryDirectory() as scratch:
            peaks[name] = measured_bytes(model, settings, Path(scratch))
        forget_accelerator()
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(peaks))


if __name__ == "__main__":
    main()
