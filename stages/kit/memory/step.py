"""One training step, recorded: the trainer, the recipe and the batch of the real run, with or without weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import PeftModel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig, PreTrainedModel

from stages.core.params.schema import DeviceParams
from stages.kit.memory.cuda import MULTIPROCESSORS
from stages.kit.memory.recorder import Recorder, emptied, recorder_of
from stages.kit.memory.recording import Recording
from stages.kit.memory.spread import spread
from stages.kit.memory.stand_in_kernels import stand_in_kernels
from stages.kit.mixture.trainer import make_trainer
from stages.kit.models.adapters import apply_recipe
from stages.kit.models.kernels import fused_kernels
from stages.kit.models.load import DTYPES, local, new_model, resolve_attention, shard
from stages.kit.models.prompts import Processor
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import Phase
from stages.kit.training.batches import FEATURES
from stages.kit.training.trainer import RecipeTrainer, StartContract, optimizer_states


def record_step(
    plan: Plan,
    config: PreTrainedConfig,
    processor: Processor,
    batch: Mapping[str, torch.Tensor],
    *,
    gpus: Mapping[str, int] | None = None,
) -> Recording:
    """The second optimizer step of a run, when the optimizer's state is there already, as RecipeTrainer does it.

    batch: one micro-batch, as the collator makes it; every micro-batch of the step is this one.
    gpus: of modules by name, with placement balanced (models/load.py).
    """
    here = _on_this_cpu(plan)
    with ExitStack() as stack:
        # accelerate collects garbage, which takes long among all that torch and transformers have imported.
        gc.freeze()
        stack.callback(gc.unfreeze)
        stack.callback(forget_accelerator)
        recorder = stack.enter_context(recorder_of(plan.device, plan.attn, config))
        if plan.features_bytes:
            batch = from_features(batch, config, here.precision)
        batch = {name: emptied(tensor) for name, tensor in batch.items()}
        attn = resolve_attention(here.attn, here.device, here.precision, padding_free=here.padding_free)
        model = new_model(config, precision=here.precision, attn=attn)
        if plan.quantization == "nf4":
            from stages.kit.memory.quantized import quantize_nf4

            model = quantize_nf4(model, here.precision)
        model = apply_recipe(model, plan.parts, plan.lora, plan.full_targets)
        stack.enter_context(stand_in_kernels(MULTIPROCESSORS if plan.device.kind == "cuda" else 1))
        stack.enter_context(fused_kernels(model, used=plan.fused_kernels))
        if plan.placement == "sharded":
            stack.enter_context(recorder.watching_resizes())
            shard(model, here, stack.enter_context(pretended_processes(plan.device.total)))
        trainer = one_batch_trainer(here, model, processor, batch)
        _label_parameters(model, recorder)
        if gpus is not None:
            spread(model, gpus, recorder)
        fill_optimizer_state(trainer)
        with recorder.on(0):  # where Trainer puts a step's samples, wherever the layers lie
            recorder.label(batch.values(), "activations")
            if plan.device.kind == "cuda":  # Trainer fetches all micro-batches of a step before the first one runs
                others = plan.schedule.grad_accumulation - 1
                recorder.add(others * sum(tensor.nbytes for tensor in batch.values()), "activations")

        def begin(phase: Phase) -> None:
            if phase == "forward":  # accelerate may have copied it since it was made
                recorder.label(optimizer_states(trainer), "optimizer")
            recorder.begin(phase)

        mark_phases(trainer, begin)
        trainer.train()
        return recorder.finish()


def from_features(
    batch: Mapping[str, torch.Tensor], config: PreTrainedConfig, precision: str
) -> dict[str, torch.Tensor]:
    """The batch with features in place of pixels, without contents: a row for each token of its pictures."""
    tokens, width = int((batch["input_ids"] == config.image_token_id).sum()), config.get_text_config().hidden_size
    features = torch.empty(tokens, width, dtype=DTYPES[precision])
    return {**{name: tensor for name, tensor in batch.items() if name != "pixel_values"}, FEATURES: features}


def _label_parameters(model: PreTrainedModel | PeftModel, recorder: Recorder) -> None:
    """And their gradients, as they come."""
    for name, parameter in model.named_parameters():
        recorder.label([local(parameter)], "adapters" if ".lora_" in name else "weights")
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda grown: recorder.label([local(grown.grad)], "gradients"))


def forget_accelerator() -> None:
    """accelerate keeps the precision of a process's first trainer, and the next one may have another."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001


def one_batch_trainer(
    plan: Plan,
    model: PreTrainedModel | PeftModel,
    processor: Processor,
    batch: Mapping[str, torch.Tensor],
) -> RecipeTrainer:
    """The real trainer, to which every micro-batch is this one; without the start contract and the rehearsal."""
    trainer = make_trainer(
        plan,
        model=model,
        processor=processor,
        collator=lambda _: dict(batch),
        callbacks=[],
        report_to="none",
        logging_strategy="no",
    )
    trainer.remove_callback(StartContract)
    trainer.remove_callback(trainer.rehearsal)
    return trainer


def _on_this_cpu(plan: Plan) -> Plan:
    """The plan of one step that this process can take."""
    accumulation = min(2, plan.schedule.grad_accumulation)
    return replace(
        plan,
        device=DeviceParams(kind="cpu"),
        placement="sharded" if plan.placement == "sharded" else "single",
        attn=plan.attn if plan.attn == "eager" else "sdpa",  # flash-attn's too: cuda.py has its kernels
        dataloader_workers=0,
        trainable={},
        schedule=replace(
            plan.schedule,
            num_steps=1,
            warmup_steps=0,
            grad_accumulation=accumulation,
            train_samples=plan.schedule.micro_batch * accumulation,
        ),
    )


@contextmanager
def pretended_processes(count: int) -> Iterator[DeviceMesh]:
    """As if this was the first of so many processes; what it says to the others goes nowhere."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        torch.distributed.destroy_process_group()


def fill_optimizer_state(trainer: RecipeTrainer) -> None:
    """Make the optimizer and its state, by a step that changes nothing."""
    optimizer = trainer.create_optimizer()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def mark_phases(trainer: RecipeTrainer, begin: Callable[[Phase], None]) -> None:
    """Has `begin` called where forward, backward and the optimizer's step begin."""
    compute_loss, backward = trainer.compute_loss, trainer.accelerator.backward

    def forward(*args: Any, **kwargs: Any) -> Any:
        begin("forward")
        return compute_loss(*args, **kwargs)

    def then_step(*args: Any, **kwargs: Any) -> None:
        begin("backward")
        backward(*args, **kwargs)
        begin("step")

    trainer.compute_loss = forward  # type: ignore[method-assign]
    trainer.accelerator.backward = then_step
