"""TRL's SFTTrainer with what a recipe adds: a learning rate for each part, and the start contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer

from stages.kit.models.parts import part_of
from stages.kit.models.processors import Processor
from stages.kit.params import Part
from stages.kit.plan import Plan
from stages.kit.training.collators import ConversationCollator
from stages.kit.training.contract import StartContract, check_start
from stages.kit.training.progress import PROGRESS_CALLBACKS


class RecipeTrainer(SFTTrainer):
    def __init__(
        self,
        plan: Plan,
        *,
        model: PreTrainedModel | PeftModel,
        processor: Processor,
        collator: ConversationCollator,
        callbacks: list[TrainerCallback],
        scratch_dir: Path,
        **reporting: Any,
    ) -> None:
        """scratch_dir: where Trainer may write; nothing there is an output. reporting: more training arguments."""
        self.plan = plan
        super().__init__(
            model=model,
            args=training_arguments(plan, scratch_dir, **reporting),
            # The collator makes each sample from its number, when it is due.
            train_dataset=Dataset.from_dict({"sample": range(plan.schedule.train_samples)}),
            processing_class=processor,
            data_collator=collator,
            callbacks=[StartContract(plan), *callbacks],
        )
        for callback in PROGRESS_CALLBACKS:
            if not any(isinstance(ours, callback) for ours in callbacks):
                self.remove_callback(callback)
        for parameter in self.model.parameters():
            if parameter.requires_grad:  # SFTTrainer casts what is trained on a quantized model to bf16
                parameter.data = parameter.data.to(torch.float32)
        check_start(self.model, plan, devices_in_use=self.args.n_gpu)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The planned optimizer, one parameter group for each part, with and without weight decay."""
        if self.optimizer is None:  # type: ignore[has-type]
            model = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(model))
            groups: dict[tuple[Part, bool], list[torch.nn.Parameter]] = {}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    groups.setdefault((part_of(name), name in decayed), []).append(parameter)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(
                [
                    {
                        "params": parameters,
                        "lr": self.plan.schedule.learning_rates[part],
                        "weight_decay": self.plan.schedule.weight_decay if decay else 0.0,
                    }
                    for (part, decay), parameters in groups.items()
                ],
                **options,
            )
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
        activation_checkpointing=plan.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if plan.gradient_checkpointing else None,
        max_length=None,  # the collator refuses what is too long; SFTTrainer would cut it
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_num_workers=plan.dataloader_workers,
        dataloader_pin_memory=plan.device.kind == "cuda",
        logging_steps=max(1, min(10, schedule.num_steps // 20)),
        save_strategy="no",
        **more,
    )
