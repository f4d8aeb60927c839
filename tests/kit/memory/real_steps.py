"""Real trainings of small models: the memory that they take, and by several processes, what they train."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from transformers import PreTrainedModel, TrainerCallback

from stages.core.params.schema import DeviceParams, LoraParams
from stages.kit.internals.accelerate_internals import reset_accelerator
from stages.kit.internals.torch_internals import cpu_peak
from stages.kit.memory.step import from_features
from stages.kit.mixture.trainer import make_trainer
from stages.kit.models.adapters import apply_recipe, trained_tensors
from stages.kit.models.kernels import fused_kernels
from stages.kit.models.load import local, process_mesh, shard, whole
from stages.kit.planning.plan import Plan
from stages.kit.training.batches import FEATURES
from stages.kit.training.trainer import ContractBreach, RecipeTrainer, StartContract, check_gradients
from tests.kit.memory.small import (
    FULL,
    GATE,
    LABELS,
    R1,
    batch_of,
    config_of,
    plan_of,
    processor_of,
    quantization_tensors,
)
from tools.gpu.measure import random_model, with_contents

PROCESSES = 2

# A rank of 1 leaves one of two processes nothing of an adapter's first matrix.
LORA = {**R1, "lora": LoraParams(rank=1, alpha=2, targets={"llm": ("q_proj", "down_proj")})}
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("text", FULL),
    "lora": ("text", LORA),
    "lora, ddp": ("text", {**LORA, "placement": "ddp"}),
    "gate": ("moe", GATE),
    "labels": ("moe", LABELS),
    "gate, ddp": ("moe", {**GATE, "placement": "ddp"}),
    "labels, ddp": ("moe", {**LABELS, "placement": "ddp"}),
}


class PlainAllGather(DefaultAllGather):
    """Without memory of its own, as NCCL's. gloo's gathers in a copy."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        shares = output_tensor.chunk(group.size())
        shares[group.rank()].copy_(input_tensor)
        for rank, share in enumerate(shares):
            dist.broadcast(share, group=group, group_src=rank)


class PlainReduceScatter(DefaultReduceScatter):
    """Without memory of its own, as NCCL's. gloo's sums up in a copy."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


class WholeGradients(TrainerCallback):
    """Keeps what the optimizer is about to be given, gathered from all processes."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        self.found = {f"gradient of {name}": whole(gradient).clone() for name, gradient in named.items()}


def sharded(settings: dict[str, Any]) -> dict[str, Any]:
    return {"placement": "sharded", "device": DeviceParams(kind="cpu", count=PROCESSES), **settings}


def trainer_of(
    plan: Plan,
    model_name: str,
    scratch_dir: Path,
    *,
    collator: Callable[[Any], dict[str, Any]],
    num_samples: int,
    mesh: DeviceMesh | None,
) -> RecipeTrainer:
    """Two optimizer steps of a model whose weights are the same in every process; mesh: of these, if there are more."""
    torch.manual_seed(0)
    model = apply_recipe(random_model(plan, config_of(model_name)), plan.parts, plan.lora, plan.full_targets)
    if mesh is not None and plan.placement == "sharded":
        shard(model, plan, mesh)
    trainer = make_trainer(
        replace(plan, schedule=replace(plan.schedule, num_steps=2, train_samples=num_samples)),
        model=model,
        processor=processor_of(model_name),
        collator=collator,
        report_to="none",
        logging_strategy="no",
    )
    trainer.remove_callback(trainer.rehearsal)
    if plan.precision == "fp16":  # a step that overflows leaves no optimizer state
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    return trainer


def measured_bytes(model_name: str, plan: Plan, scratch_dir: Path, mesh: DeviceMesh | None) -> int:
    """The peak of this process in two optimizer steps: only the second begins with the optimizer's state there."""
    batch = with_contents(batch_of(plan, config_of(model_name)))
    if plan.features_bytes:
        batch = from_features(batch, config_of(model_name), plan.precision)
        batch[FEATURES].uniform_()
    # All processes together; those that are pretended do not count for Trainer.
    num_samples = plan.schedule.micro_batch * plan.schedule.grad_accumulation * plan.device.count
    trainer = trainer_of(
        plan, model_name, scratch_dir, collator=lambda _: dict(batch), num_samples=num_samples, mesh=mesh
    )
    trainer.remove_callback(StartContract)  # an adapter's gradient is zero where the model itself is random
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(PlainAllGather())
            module.set_custom_reduce_scatter(PlainReduceScatter())
    held = [*map(local, trainer.model.parameters()), *trainer.model.buffers(), *quantization_tensors(trainer.model)]
    with fused_kernels(trainer.model, used=plan.fused_kernels), cpu_peak([*batch.values(), *held]) as peak:
        trainer.train()
    return peak.size_bytes


def train(name: str, mesh: DeviceMesh | None, scratch_dir: Path) -> Mapping[str, torch.Tensor]:
    """The weights of a text model after two steps of 8 samples, and the second step's gradients, which AdamW does not
    depend on. No two samples are alike."""
    model_name, settings = TRAINED[name]
    plan = plan_of(**(sharded(settings) if mesh is not None else {**settings, "placement": "single"}))
    accumulation = 8 // (plan.schedule.micro_batch * plan.device.count)
    plan = replace(plan, schedule=replace(plan.schedule, grad_accumulation=accumulation, max_grad_norm=1e9))

    def collator(samples: Any) -> dict[str, torch.Tensor]:
        ids = torch.stack(
            [torch.randint(1024, (32,), generator=torch.Generator().manual_seed(each["sample"])) for each in samples]
        )
        labels = ids.clone() if not plan.domains else ids[:, :1].expand_as(ids) % len(plan.domains)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    trainer = trainer_of(plan, model_name, scratch_dir, collator=collator, num_samples=16, mesh=mesh)
    gradients = WholeGradients()
    trainer.add_callback(gradients)
    trainer.train()
    model: PreTrainedModel | PeftModel = trainer.accelerator.unwrap_model(trainer.model)
    return {**trained_tensors(model), **gradients.found}


def breach_of(mesh: DeviceMesh, scratch_dir: Path) -> str:
    """The breach that the start contract reports if the last process alone holds a gradient that is not finite."""
    plan = plan_of(**sharded(FULL))
    trainer = trainer_of(plan, "text", scratch_dir, collator=dict, num_samples=1, mesh=mesh)
    ids = torch.ones(1, 8, dtype=torch.long)
    trainer.model(input_ids=ids, labels=ids).loss.backward()
    check_gradients(trainer.model, plan)
    if mesh.get_rank() == PROCESSES - 1:
        local(trainer.model.get_decoder().norm.weight.grad).fill_(torch.nan)
    try:
        check_gradients(trainer.model, plan)
    except ContractBreach as breach:
        return str(breach)
    return "nothing"


def main(rank: int, folder: Path) -> None:
    """Train in each of two processes; the first one writes what came of it."""
    mesh = process_mesh(plan_of(**sharded(FULL)))
    with tempfile.TemporaryDirectory() as scratch:
        for name in TRAINED:
            tensors = train(name, mesh, Path(scratch))
            reset_accelerator()
            if rank == 0:
                save_file(dict(tensors), folder / f"{name}.safetensors")
        breach = breach_of(mesh, Path(scratch))
    if rank == 0:
        (folder / "breach.txt").write_text(breach)
