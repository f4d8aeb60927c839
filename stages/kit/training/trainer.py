"""TRL's SFTTrainer, resumable, with what a recipe adds: a learning rate a part, the start contract, a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig

from stages.core.params.schema import Part
from stages.kit.internals.accelerate_internals import use_fp16_on_cpu
from stages.kit.models.adapters import part_of
from stages.kit.models.prompts import Processor
from stages.kit.planning.plan import Plan
from stages.kit.training.collators import FEATURES
from stages.kit.training.contract import StartContract, check_start
from stages.kit.training.order import SortedInSteps
from stages.kit.training.rehearsal import Rehearsal
from stages.kit.training.resumable import ResumableTrainer


class RecipeTrainer(ResumableTrainer):
    def __init__(
        self,
        plan: Plan,
        *,
        model: PreTrainedModel | PeftModel,
        processor: Processor,
        collator: Callable[[Sequence[Mapping[str, int]]], dict[str, Any]],
        callbacks: list[TrainerCallback],
        scratch_dir: Path,
        **arguments: Any,
    ) -> None:
        """scratch_dir: where Trainer may write; nothing there is an output. arguments: more of SFTConfig."""
        self.plan = plan
        self.rehearsal = Rehearsal(self, plan.schedule)
        # SFTTrainer and Trainer make the outputs of all input embeddings require gradients under checkpointing. Only
        # its reentrant form needs that; with ours it would send a backward pass through a frozen vision tower.
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        base.enable_input_require_grads = lambda: None
        # TRL's head divides by a step's tokens for every model, also where the model's own loss would not (Qwen2.5-VL).
        base.accepts_loss_kwargs = True
        super().__init__(
            model=model,
            args=training_arguments(plan, scratch_dir, **arguments),
            # The collator makes each sample from its number, when it is due.
            train_dataset=Dataset.from_dict({"sample": range(plan.schedule.train_samples)}),
            processing_class=processor,
            data_collator=collator,
            callbacks=[StartContract(plan), self.rehearsal, *callbacks],
        )
        self.remove_callback(PrinterCallback)
        for parameter in self.model.parameters():
            if parameter.requires_grad:  # SFTTrainer casts what is trained on a quantized model to bf16
                parameter.data = parameter.data.to(torch.float32)
        check_start(self.model, plan, devices_in_use=self.args.n_gpu)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.plan.precision == "fp16" and self.accelerator.device.type == "cpu":
            use_fp16_on_cpu(self.accelerator)

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *, num_items_in_batch: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """SFTTrainer's loss, also from features of pictures, and for a model whose layers lie on several devices.

        Its fused head leaves the loss on the head's device, the last one, and Trainer wants it on the first.
        """
        if (features := inputs.pop(FEATURES, None)) is not None:
            inputs["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=(features,))}
        num_items = num_items_in_batch.to(self.model.get_output_embeddings().weight.device)
        tokens_before = self._total_train_tokens
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items)
        if "attention_mask" not in inputs:  # SFTTrainer counts the rows of Qwen2-VL's positions
            tokens = torch.tensor(inputs["input_ids"].shape[1], device=self.args.device)
            self._total_train_tokens = tokens_before + self.accelerator.reduce(tokens, "sum").item()
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss.to(self.args.device)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """SFTTrainer's, with the samples of a step in the order of their lengths where it has several micro-batches."""
        loader: Any = super().get_train_dataloader()
        schedule, lengths = self.plan.schedule, getattr(self.data_collator, "lengths", None)
        if schedule.effective_batch > schedule.micro_batch and lengths is not None:
            loader.set_sampler(SortedInSteps(loader.get_sampler(), lengths, schedule.effective_batch))
        return loader

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The planned optimizer, one parameter group for each part, with and without weight decay."""
        if self.optimizer is None:  # type: ignore[has-type]
            model, schedule = model or self.model, self.plan.schedule
            decayed = set(self.get_decay_parameter_names(model))
            groups: dict[tuple[Part, bool], list[torch.nn.Parameter]] = {}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    groups.setdefault((part_of(name), name in decayed), []).append(parameter)
            settings = [
                {
                    "params": parameters,
                    "lr": schedule.learning_rates[part],
                    "weight_decay": schedule.weight_decay if decay else 0.0,
                }
                for (part, decay), parameters in groups.items()
            ]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(settings, **options)
        return self.optimizer


def training_arguments(plan: Plan, scratch_dir: Path, **more: Any) -> SFTConfig:
    schedule = plan.schedule
    return SFTConfig(
        output_dir=str(scratch_dir),
        per_device_train_batch_size=schedule.micro_batch,
        gradient_accumulation_steps=schedule.grad_accumulation,
        num_train_epochs=schedule.epochs,
        max_steps=schedule.num_steps,
        learning_rate=max(schedule.learning_rates.values()),
        lr_scheduler_type=schedule.lr_schedule,
        warmup_steps=schedule.warmup_steps,
        weight_decay=schedule.weight_decay,
        max_grad_norm=schedule.max_grad_norm,
        optim=plan.optimizer,
        seed=plan.seed,
        data_seed=plan.seed,
        use_cpu=plan.device.kind == "cpu",
        bf16=plan.precision == "bf16",
        fp16=plan.precision == "fp16",
        router_aux_loss_coef=0.0,  # of SFTTrainer's own loss for mixtures, the mean over micro-batches
        activation_checkpointing=plan.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if plan.gradient_checkpointing else None,
        max_length=None,  # the collator refuses what is too long; SFTTrainer would cut it
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        accelerator_config={
            # The order of the samples is drawn from (data_seed, epoch), whatever else draws random numbers.
            "use_seedable_sampler": True,
            # Else a sharded model's gradients would be kept whole, in fp32, until the step's last micro-batch.
            "gradient_accumulation_kwargs": {"sync_each_batch": plan.placement == "sharded"},
        },
        dataloader_num_workers=plan.dataloader_workers,
        dataloader_pin_memory=plan.device.kind == "cuda",
        logging_steps=max(1, min(10, schedule.num_steps // 20)),
        save_strategy="no",
        disable_tqdm=True,  # progress.py shows it
        **more,
    )
