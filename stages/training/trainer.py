"""A recipe's training step: TRL's SFTTrainer, resumable, with a learning rate for each part of the model; the start
contract before and after its first backward pass, and the rehearsal of the largest batch."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import SFTConfig, SFTTrainer

from stages.core.errors import UserError
from stages.core.params.schema import LrSchedule, Part, ScheduleOptions
from stages.internals.accelerate_internals import use_fp16_on_cpu
from stages.internals.torch_internals import cpu_peak
from stages.internals.trl_internals import metric_sums, scoring_answers_only, set_metric_sums, set_token_count
from stages.models.adapters import count_trainable, part_of
from stages.models.load import check_placement, full_tensor, reshard, to_local
from stages.models.prompts import Processor
from stages.planning.memory_use import GpuUse
from stages.planning.plan import Plan, sorted_steps
from stages.training.batches import FEATURES, IGNORED
from stages.training.muon import MuonWithAdamW, hidden_matrices
from stages.training.noise import noisy_embeddings
from stages.training.randomness import random_state, set_random_state
from stages.training.records import LOSS, SCORE, best_step, is_over
from stages.training.resume import ResumableTrainer

log = logging.getLogger(__name__)

# Trainer collects garbage twice a run: a third of a second each among all that is imported by now, which is none.
gc.freeze()


class RecipeTrainer(ResumableTrainer):
    def __init__(
        self,
        plan: Plan,
        *,
        model: PreTrainedModel | PeftModel,
        processor: Processor,
        collator: Callable[[Sequence[Mapping[str, int]]], dict[str, Any]],
        validator: Callable[[RecipeTrainer], dict[str, float]] | None = None,
        **arguments: Any,
    ) -> None:
        """validator: the figures of a validation, of a model in evaluation mode. arguments: more of SFTConfig."""
        self.plan = plan
        self.validator = validator
        self.gpu_use = GpuUse(range(torch.cuda.device_count()) if plan.on_gpu else ())
        self.rehearsal = Rehearsal(self)
        self.progress = ProgressCallback() if sys.stderr.isatty() else LineProgress()
        self._scratch = TemporaryDirectory(ignore_cleanup_errors=True)  # Trainer wants a folder, and leaves it empty
        prepare_for_trl(model)
        super().__init__(
            model=model,
            args=training_arguments(plan, self._scratch.name, **arguments),
            # The collator makes each sample from its number, when it is due.
            train_dataset=Dataset.from_dict({"sample": range(plan.schedule.train_samples)}),
            processing_class=processor,
            data_collator=collator,
            callbacks=[StartContract(plan), self.rehearsal, self.progress],
        )
        self.remove_callback(PrinterCallback)
        for parameter in self.model.parameters():
            if parameter.requires_grad:  # SFTTrainer casts what is trained on a quantized model to bf16
                parameter.data = parameter.data.to(torch.float32)
        check_start(self.model, plan, devices_in_use=self.args.n_gpu)
        switch_mode_once(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.plan.memory.precision == "fp16" and self.accelerator.device.type == "cpu":
            use_fp16_on_cpu(self.accelerator)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *, num_items_in_batch: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """SFTTrainer's loss, also from features of images, and for a model spread over several devices.

        Its fused head leaves the loss on the head's device, the last one, and Trainer wants it on the first.
        """
        if (features := inputs.pop(FEATURES, None)) is not None:
            inputs["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=(features,))}
        num_items = num_items_in_batch.to(self.model.get_output_embeddings().weight.device)
        tokens_before, alpha = metric_sums(self)["tokens"], self.plan.recipe.neftune_alpha
        noise = noisy_embeddings(self.model, inputs, alpha) if alpha and self.model.training else nullcontext()
        with scoring_answers_only(), noise:
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items)
        if "attention_mask" not in inputs:  # SFTTrainer counts the rows of Qwen2-VL's positions
            tokens = torch.tensor(inputs["input_ids"].shape[1], device=self.args.device)
            set_token_count(self, tokens_before + self.accelerator.reduce(tokens, "sum").item())
        return loss.to(self.args.device)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """SFTTrainer's; a step of several micro-batches has its samples in the order of their lengths."""
        loader: Any = super().get_train_dataloader()
        plan, lengths = self.plan, getattr(self.data_collator, "lengths", None)
        if plan.recipe.effective_batch > plan.memory.micro_batch and lengths is not None:
            loader.set_sampler(SortedInSteps(loader.get_sampler(), lengths, plan.recipe.effective_batch))
        return loader

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The planned optimizer, one parameter group for each part, with and without weight decay; with LoRA+ the
        adapters' B apart, and of Muon also the weights that are AdamW's."""
        if self.optimizer is None:  # type: ignore[has-type]
            model, rates = model or self.model, self.plan.schedule.learning_rates
            weight_decay, lora = self.plan.recipe.weight_decay, self.plan.recipe.lora
            ratio = lora.loraplus_lr_ratio if lora is not None else 1.0
            decayed = set(self.get_decay_parameter_names(model))
            by_muon = hidden_matrices(model) if self.plan.memory.optimizer == "muon" else set()
            groups: dict[tuple[Part, bool, bool, float], dict[str, Any]] = {}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    part, decays, muon = part_of(name), name in decayed, name in by_muon
                    rate = rates[part] * (ratio if ".lora_B." in name else 1.0)
                    group = {"params": [], "lr": rate, "weight_decay": weight_decay if decays else 0.0, "muon": muon}
                    groups.setdefault((part, decays, muon, rate), group)["params"].append(parameter)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = (MuonWithAdamW if by_muon else optimizer_class)([*groups.values()], **options)
        return self.optimizer

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Validate. Trainer calls it before the first step, and after a step before it saves that; nothing of the
        training changes."""
        assert self.validator is not None
        assert self.plan.validation is not None
        with unchanged(self):
            self.model.eval()  # SFTTrainer logs its own figures of validation in this mode
            # The first process decides for all: a difference in a last digit would stop one and not the others.
            [metrics] = broadcast_object_list([self.validator(self)])
            self.log(metrics)
            self.model.train()
            reshard(self.model)
        control: TrainerControl = self.control  # type: ignore[has-type]
        self.control = control = self.callback_handler.on_evaluate(self.args, self.state, control, metrics)
        step, history = self.state.global_step, self.state.log_history
        best = best_step(history, self.plan.validation)
        if self.plan.validation.keep_best and best == step < self.state.max_steps:
            control.should_save = True
        if is_over(history, self.plan.validation):
            control.should_training_stop = True
            control.should_save = False  # what resumes from here would go on
        return metrics

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """0: Trainer's own count visits every parameter in each micro-batch, for an unused figure."""
        return 0

    def peak_bytes(self) -> tuple[int, int]:
        """Peak memory of tensors so far, (allocated, reserved by torch), on the fullest device of this process.

        On a GPU over the whole training, on a CPU over its rehearsal, both the same.
        """
        if not self.plan.on_gpu:
            return self.rehearsal.cpu_peak_bytes, self.rehearsal.cpu_peak_bytes
        gpus = range(torch.cuda.device_count())
        return max(map(torch.cuda.max_memory_allocated, gpus)), max(map(torch.cuda.max_memory_reserved, gpus))


def prepare_for_trl(model: PreTrainedModel | PeftModel) -> None:
    """Set what SFTTrainer reads from a model."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    # SFTTrainer and Trainer make the outputs of all input embeddings require gradients under checkpointing. Only its
    # reentrant form needs that; with ours it would send a backward pass through a frozen vision tower.
    base.enable_input_require_grads = lambda: None
    # TRL's head divides by a step's tokens for every model, even if the model's own loss would not (Qwen2.5-VL).
    base.accepts_loss_kwargs = True


def switch_mode_once(model: nn.Module) -> None:
    """Put the model in training mode; `train` and `eval` then visit its modules only if it is in the other mode.

    Trainer calls `train` in each micro-batch, which takes milliseconds for the thousands of modules of an adapter.
    """
    switch = model.train(True).train

    def train(mode: bool = True) -> nn.Module:
        return model if model.training == mode else switch(mode)

    model.train = train  # type: ignore[method-assign]


def training_arguments(plan: Plan, output_dir: str, **more: Any) -> SFTConfig:
    recipe, memory, schedule = plan.recipe, plan.memory, plan.schedule
    return SFTConfig(
        output_dir=output_dir,
        per_device_train_batch_size=memory.micro_batch,
        gradient_accumulation_steps=schedule.grad_accumulation,
        num_train_epochs=schedule.epochs,
        max_steps=schedule.num_steps,
        learning_rate=max(schedule.learning_rates.values()),
        # transformers' `constant` would ignore the warm-up.
        lr_scheduler_type="constant_with_warmup" if recipe.lr_schedule == "constant" else recipe.lr_schedule,
        lr_scheduler_kwargs=scheduler_options(plan),
        warmup_steps=schedule.warmup_steps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        optim="adamw_torch_fused" if memory.optimizer == "muon" else memory.optimizer,
        adam_beta2=0.99 if memory.optimizer == "lion_32bit" else 0.999,  # Lion's own (arXiv 2302.06675)
        seed=plan.seed,
        data_seed=plan.seed,
        use_cpu=not plan.on_gpu,
        bf16=memory.precision == "bf16",
        fp16=memory.precision == "fp16",
        router_aux_loss_coef=0.0,  # of SFTTrainer's own loss for mixtures, the mean over micro-batches
        activation_checkpointing=memory.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if memory.gradient_checkpointing else None,
        max_length=None,  # the collator refuses samples that are too long; SFTTrainer would cut them
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        accelerator_config={
            # The order of the samples is drawn from (data_seed, epoch), whatever else draws random numbers.
            "use_seedable_sampler": True,
            # Else a sharded model's gradients would be kept whole, in fp32, until the step's last micro-batch.
            "gradient_accumulation_kwargs": {"sync_each_batch": plan.is_sharded},
        },
        dataloader_num_workers=plan.dataloader_workers,
        dataloader_pin_memory=plan.on_gpu,
        ddp_find_unused_parameters=False,  # the start contract wants a gradient in all that is trained
        # Off, as it waits for the GPU in each micro-batch; under fp16 one overflow would make all later losses NaN.
        logging_nan_inf_filter=memory.precision == "fp16",
        logging_steps=max(1, min(10, schedule.num_steps // 20)),
        save_strategy="no",
        disable_tqdm=True,  # RecipeTrainer.progress shows it
        **more,
    )


def scheduler_options(plan: Plan) -> dict[str, float]:
    """Arguments of the schedule in transformers/optimization.py, beside its numbers of steps."""
    options, schedule = plan.recipe.lr_schedule_options or ScheduleOptions(), plan.schedule
    least = options.min_lr_ratio or 0.0
    own: dict[LrSchedule, dict[str, float]] = {
        "cosine_with_min_lr": {"min_lr_rate": least},
        "polynomial": {"lr_end": least * max(schedule.learning_rates.values()), "power": options.power or 0.0},
        "warmup_stable_decay": {"min_lr_ratio": least, "num_decay_steps": options.decay_steps(schedule.num_steps)},
    }
    return own.get(plan.recipe.lr_schedule, {})


@dataclass
class SortedInSteps(Sampler[int]):
    """`sorted_steps` of what accelerate's sampler draws, from (seed, epoch) alone."""

    drawn: SeedableRandomSampler
    lengths: Sequence[int]
    effective_batch: int

    def __len__(self) -> int:
        return len(self.drawn)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(sorted_steps(self.drawn, self.lengths, self.effective_batch))

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate's data loader."""
        self.drawn.set_epoch(epoch)


class ContractBreach(UserError):
    """The run does not do what its recipe says."""

    def __init__(self, plan: Plan, breach: str) -> None:
        super().__init__(f"recipe {plan.name}: {breach}")


def check_start(model: nn.Module, plan: Plan, *, devices_in_use: int) -> None:
    """Trainable counts by part as planned, trained weights in fp32, everything on the planned kind of device; under
    fp16 nothing in bf16, which is slow on a Turing GPU.

    devices_in_use: the devices that this process would split a batch over; more than one means DataParallel.
    """
    if isinstance(model, nn.DataParallel) or devices_in_use > 1:
        raise ContractBreach(plan, "it would run under DataParallel; use placement single, ddp, sharded or balanced")
    check_placement(model, plan.device)
    counts = count_trainable(model)
    for part, expected in plan.trainable.items():
        if counts[part] != expected:
            count = "the model has" if part == "all" else f"{part} trains"
            raise ContractBreach(plan, f"{count} {counts[part]:,} parameters, but the plan says {expected:,}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ContractBreach(plan, f"{name} is to be trained, but is {parameter.dtype}, not float32")
    if plan.memory.precision == "fp16":
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype == torch.bfloat16:
                raise ContractBreach(plan, f"precision is fp16, but {name} is bfloat16")


def check_gradients(model: nn.Module, plan: Plan) -> None:
    """After a backward pass: finite gradients wherever they are due, none elsewhere, and not all zero in any part.

    All processes of a sharded model call it together, and find the same, whichever of them holds the fault.
    """
    nonzero: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        part, gradient = part_of(name), parameter.grad
        if (gradient is not None) != parameter.requires_grad:
            state, fault = ("trained", "no gradient") if parameter.requires_grad else ("frozen there", "a gradient")
            raise ContractBreach(plan, f"{part} is {state}, but {name} got {fault}")
        if gradient is not None:
            if not full_tensor(torch.isfinite(gradient).all()):
                fault = f"the gradient of {name} ({part}) is not finite"
                raise ContractBreach(
                    plan, f"{fault}; a training that was resumed has diverged: lower its learning_rate"
                )
            nonzero[part] = nonzero.get(part, False) or bool(full_tensor(gradient.any()))
    for part in plan.recipe.parts.trained():
        if not nonzero.get(part):
            raise ContractBreach(plan, f"{part} is trained, but all its gradients are zero")


MAX_OVERFLOWS = 16
"""First steps that may overflow under fp16: GradScaler starts at 2**16 and halves its scale after each."""


class StartContract(TrainerCallback):
    """Checks gradients once, between the first backward pass and the first optimizer step.

    Under fp16 the first steps may overflow, and GradScaler then skips them: the check waits for one that does not.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checked = False
        self.overflows = 0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        if not self.checked:
            if self.plan.memory.precision == "fp16" and self.overflows < MAX_OVERFLOWS and _overflowed(model):
                self.overflows += 1
                return
            check_gradients(model, self.plan)
            self.checked = True


def _overflowed(model: nn.Module) -> bool:
    """Whether the backward pass overflowed; clipping by an infinite norm has then made its gradients NaN or zero."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finite = all(bool(full_tensor(torch.isfinite(gradient).all())) for gradient in gradients)
    return not finite or not any(bool(full_tensor(gradient.any())) for gradient in gradients)


class Rehearsal(TrainerCallback):
    """Sends the largest micro-batch forward and backward, so that out-of-memory surfaces within minutes.

    Right after the optimizer's first step, before which it has no states, and before the validation of the untrained
    model, which would be repeated on every rung of the ladder.

    With accumulation the batch goes twice, as all micro-batches but a step's first find gradients already there.
    Trained weights stay the same, bit for bit. Under ddp and sharded each process sends the same samples.
    """

    def __init__(self, trainer: RecipeTrainer) -> None:
        self.trainer = trainer
        self.done = False
        self.cpu_peak_bytes = 0
        """Peak of tensors on a CPU; 0 on a GPU, where torch.cuda tracks the peak."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.eval_on_start:
            self.rehearse()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self.done and self.trainer.optimizer.state:  # fp16 may skip the first steps
            self.cpu_peak_bytes = self.rehearse()
            self.done = True

    def rehearse(self) -> int:
        trainer, plan = self.trainer, self.trainer.plan
        on_cpu = trainer.args.device.type == "cpu"
        inputs = trainer.data_collator.largest_batch(plan.memory.micro_batch)
        measured = cpu_peak((*inputs.values(), *lasting_tensors(trainer))) if on_cpu else nullcontext()
        with unchanged(trainer), trainer.accelerator.no_sync(trainer.model_wrapped), measured as peak:
            for _ in range(plan.rehearsed_micro_batches):
                trainer.training_step(trainer.model_wrapped, dict(inputs), inputs["labels"].ne(IGNORED).sum())
        return peak.size_bytes if peak is not None else 0


def lasting_tensors(trainer: SFTTrainer) -> list[torch.Tensor]:
    """All tensors that stay between two steps."""
    model = trainer.model
    return [*map(to_local, model.parameters()), *model.buffers(), *optimizer_states(trainer)]


def optimizer_states(trainer: SFTTrainer) -> Iterator[torch.Tensor]:
    for state in trainer.optimizer.state.values():
        yield from (to_local(value) for value in state.values() if isinstance(value, torch.Tensor))


@contextmanager
def unchanged(trainer: SFTTrainer) -> Iterator[None]:
    """Restores what a forward and a backward pass change: random numbers, gradients, buffers, sums for the log."""
    model = trainer.model
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    sums, drawn = metric_sums(trainer), random_state()
    yield
    set_random_state(drawn)
    set_metric_sums(trainer, sums)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


class LineProgress(TrainerCallback):
    """One line a logging interval, for logs and pipes, with the time left from the second step on: the first has the
    rehearsal too."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, float]] = []
        """Number of steps before, and time at, the beginning of the first two steps."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if len(self.begun) < 2:
            self.begun.append((state.global_step, time.monotonic()))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, float], **_: Any
    ) -> None:
        at = f"step {state.global_step}/{state.max_steps}"
        if LOSS in logs:
            score = f"  score {logs[SCORE]:.4f}" if SCORE in logs else ""
            log.info("%s  validation loss %.4f%s", at, logs[LOSS], score)
        if "loss" in logs:
            speed = ""
            for first, began in self.begun[1:]:
                rate = (state.global_step - first) / (time.monotonic() - began)
                left = (state.max_steps - state.global_step) / rate
                speed = f"  {rate:.2f} steps/s  {int(left // 60)}:{int(left % 60):02d} left"
            log.info("%s  loss %.4f%s", at, logs["loss"], speed)
