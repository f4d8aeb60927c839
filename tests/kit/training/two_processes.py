"""Real trainings of a small model in two processes, one of which is asked to end; each writes what came of it.

Run: python -m torch.distributed.run --standalone --nproc-per-node=2 -m tests.kit.training.two_processes FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open

from stages.core.params.schema import CheckpointParams, DeviceParams
from stages.kit.models.load import auto_class
from stages.kit.models.parts import apply_recipe
from stages.kit.models.processors import load_processor
from stages.kit.models.sharding import local, process_mesh, shard
from stages.kit.planning.plan import Plan
from stages.kit.training.checkpoints import Checkpoints, kept_checkpoints
from stages.kit.training.contract import StartContract
from stages.kit.training.preemption import train_to_the_end
from stages.kit.training.seed import seed_everything
from stages.kit.training.trainer import RecipeTrainer
from tests.kit.memory.small import FULL, R1, TINY, config_of, plan_of
from tests.kit.training.at_step import At

SETTINGS: dict[Literal["ddp", "sharded"], Mapping[str, Any]] = {"ddp": R1, "sharded": FULL}
SAMPLES = 7
"""The last of an epoch's micro-batches has one sample for two processes."""
WHEN_ASKED = CheckpointParams(every_minutes=None)


def plan_for(placement: Literal["ddp", "sharded"]) -> Plan:
    plan = plan_of(micro_batch=1, grad_accumulation=2, **SETTINGS[placement])
    schedule = replace(plan.schedule, num_steps=4, epochs=2, train_samples=SAMPLES)
    return replace(
        plan,
        placement=placement,
        device=DeviceParams(kind="cpu", count=2),
        schedule=schedule,
        dataloader_workers=1,
    )


def collate(samples: Sequence[Mapping[str, int]]) -> dict[str, torch.Tensor]:
    ids = torch.stack(
        [torch.randint(1024, (16,), generator=torch.Generator().manual_seed(each["sample"])) for each in samples]
    )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def build(plan: Plan, scratch_dir: Path) -> RecipeTrainer:
    seed_everything(plan.seed + dist.get_rank())  # each process draws its own
    torch.manual_seed(0)
    config = config_of("text")
    model = auto_class(config).from_config(config, attn_implementation="sdpa")
    model = apply_recipe(model, plan.parts, plan.lora)
    if plan.placement == "sharded":
        shard(model, plan, process_mesh(plan))
    torch.manual_seed(dist.get_rank())
    trainer = RecipeTrainer(
        plan,
        model=model,
        processor=load_processor(TINY, None).tokenizer,
        collator=collate,
        callbacks=[],
        scratch_dir=scratch_dir,
        report_to="none",
    )
    trainer.remove_callback(StartContract)  # an adapter's gradient is zero where the model itself is random
    trainer.remove_callback(trainer.rehearsal)
    return trainer


def outcome(trainer: RecipeTrainer) -> dict[str, Any]:
    """What this process has of it, as JSON."""
    trained = {name: local(each.detach()) for name, each in trainer.model.named_parameters() if each.requires_grad}
    kept = ("loss", "grad_norm", "mean_token_accuracy", "num_tokens", "entropy", "train_loss")
    return {
        "weights": {name: [value.hex() for value in tensor.flatten().tolist()] for name, tensor in trained.items()},
        "logs": [{name: logs[name] for name in kept if name in logs} for logs in trainer.state.log_history],
        "trace": trainer.trace,
    }


def train(plan: Plan, folder: Path, *, asked_at: int | None = None) -> tuple[int, RecipeTrainer]:
    """The exit code, and the trainer. asked_at: the step after which the second process is asked to end, and no other;
    with it its data loader's worker, as torchrun asks."""
    trainer = build(plan, folder)
    if asked_at is not None and dist.get_rank() == 1:
        trainer.add_callback(At(asked_at, ask_this_process_group))
    identity = {"placement": plan.placement}
    with kept_checkpoints(folder, identity, keep=2, owner=dist.get_rank() == 0) as checkpoints:
        try:
            train_to_the_end(trainer, checkpoints, WHEN_ASKED)
        except SystemExit as end:
            return int(str(end.code)), trainer
        return 0, trainer


def ask_this_process_group() -> None:
    """From outside: a worker takes what its own parent sends otherwise."""
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], check=True, start_new_session=True)


def saved_parts(checkpoints: Checkpoints, step: int) -> dict[str, list[str]]:
    """The tensors in each process's file, by the first part of their names."""
    parts = {}
    for path in sorted(checkpoints.at(step).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            parts[path.stem] = sorted({name.split("/")[1] for name in file.keys()})  # noqa: SIM118 - no mapping
    return parts


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    dist.init_process_group("gloo")
    mock.patch("os.fsync").start()  # it can take a minute
    for placement in SETTINGS:
        plan = plan_for(placement)
        place = folder / placement
        _, undisturbed = train(plan, place / "undisturbed")
        code, interrupted = train(plan, place / "interrupted", asked_at=3)
        ended, step = interrupted.state.global_step, interrupted.saved_step
        assert interrupted.checkpoints is not None
        parts = saved_parts(interrupted.checkpoints, ended)
        again, resumed = train(plan, place / "interrupted")
        dist.barrier()
        found[placement] = {
            "codes": [code, again],
            "steps": [ended, step],
            "parts": parts,
            "undisturbed": outcome(undisturbed),
            "resumed": outcome(resumed),
        }
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
