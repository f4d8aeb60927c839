"""Time of a training on this machine's CPU: a micro-batch of it runs here and now, on random weights.

A measured time is in no plan, record or report: `make plan` prints it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from stages.core.errors import pluralize
from stages.evaluation.generate import generated_tokens
from stages.evaluation.validation import generating
from stages.internals.accelerate_internals import reset_accelerator
from stages.memory.fakes import fake_batch, fake_processor, quantize_nf4
from stages.memory.fit import computed_length, relative_length, time_text
from stages.memory.predict import BatchOf, MemoryPredictor, sample_depths, with_depth
from stages.memory.step import from_features, mark_phases, one_batch_trainer, record_step
from stages.models.adapters import apply_recipe, count_trainable
from stages.models.kernels import fused_kernels
from stages.models.load import new_model, resolve_attention
from stages.planning.plan import Plan
from stages.planning.prediction import Phase
from stages.training.batches import FEATURES, packed
from stages.training.kernels import prepare_kernels
from stages.training.trainer import RecipeTrainer

WHOLE_FLOPS = 1e12
"""Arithmetic of the largest micro-batch that runs as it is: some twenty seconds of one core."""
SHORT = 128
"""Tokens of a sample that runs in place of a larger micro-batch; fewer take longer each."""
ENOUGH_S = 2.0
"""Steps are repeated for so long; the first ones are slower."""
MAX_STEPS, TOKENS = 8, 16


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measured seconds of the parts of a training."""

    micro_batch_s: float
    """Forward and backward, of mean length."""
    update_s: float
    """The optimizer's step."""
    loss_s: float
    """Forward alone."""
    prompts_s: float
    """Reading the prompts that a validation completes at once."""
    token_s: float
    """One more token in each of their completions."""

    def scaled(self, *, arithmetic: float, trained: float, weights: float) -> Speed:
        """The speed of a larger model and batch: how many times as much arithmetic a forward pass has, how many times
        as many weights are trained, and are read for a token."""
        return Speed(
            micro_batch_s=self.micro_batch_s * arithmetic,
            update_s=self.update_s * trained,
            loss_s=self.loss_s * arithmetic,
            prompts_s=self.prompts_s * arithmetic,
            token_s=self.token_s * weights,
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredTime:
    """Time of a training on this machine, or without data of one of its steps, as it was a moment ago.

    Loading, the rehearsal, checkpoints, features of images and evaluation are not in it.
    """

    num_steps: int | None
    step_s: float
    hours: dict[str, float]
    """Time of all steps, or of the one, by one name: "this machine"."""
    validation_s: float
    """All validations, if each completion is as long as it may be; 0 without data."""
    num_threads: int

    def __str__(self) -> str:
        step, total = time_text(self.step_s / 3600), time_text(self.hours["this machine"])
        what = f"about {total}: {pluralize(self.num_steps, 'step')} of {step}" if self.num_steps else ""
        validation = f", and up to {time_text(self.validation_s / 3600)} of validation" if self.validation_s else ""
        measured = f"measured on this machine now, with {pluralize(self.num_threads, 'thread')}"
        return f"{what or f'no data yet: a step of about {step}'}{validation}; {measured}"


def training_time(plan: Plan, speed: Speed, *, has_data: bool) -> MeasuredTime:
    """Steps, and validations: before the first step, every so many steps, and after the last."""
    schedule, wanted, size = plan.schedule, plan.validation, plan.memory.micro_batch
    step_s, validation_s = schedule.grad_accumulation * speed.micro_batch_s + speed.update_s, 0.0
    if has_data and wanted is not None:
        completions_s = speed.prompts_s + wanted.max_new_tokens * speed.token_s
        once_s = ceil(wanted.samples / size) * speed.loss_s + ceil(wanted.score_samples / size) * completions_s
        validation_s = (1 + ceil(schedule.num_steps / wanted.every_steps)) * once_s
    return MeasuredTime(
        num_steps=schedule.num_steps if has_data else None,
        step_s=step_s,
        hours={"this machine": (schedule.num_steps if has_data else 1) * step_s / 3600},
        validation_s=validation_s,
        num_threads=torch.get_num_threads(),
    )


def measured_time(plan: Plan, predictor: MemoryPredictor, lengths: Sequence[int]) -> MeasuredTime | None:
    """The time of a plan on this CPU. lengths: of the training samples in tokens, the longest first; none without data.

    A micro-batch of mean length runs as it is, if that takes seconds. Of a larger one a short sample runs through two
    layers, and is scaled up. None for several processes, and for a model that is too large even for that.
    """
    if plan.on_gpu or plan.is_data_parallel:
        return None
    config, processor = predictor.config, predictor.processor
    flops = predictor(plan).flops * relative_length(plan, lengths)
    if lengths and flops <= WHOLE_FLOPS:
        typical = partial(predictor.batch_of, max_length=ceil(computed_length(plan, lengths)))
        speed, _ = measured_speed(plan, config, typical)
        return training_time(plan, speed, has_data=True)
    few, one = with_depth(config, sample_depths(config)[0]), plan.with_micro_batch(1)
    batch_of = partial(fake_batch, few, max_length=SHORT, max_pixels=plan.images.max_pixels if plan.images else None)
    recording = record_step(one, few, processor, training_batch(one, few, batch_of))
    if (few_flops := recording.flops / one.rehearsed_micro_batches) > WHOLE_FLOPS:
        return None
    speed, counts = measured_speed(one, few, batch_of)
    trained, weights = (plan.trainable[name] / max(1, counts[name]) for name in ("total", "all"))
    speed = speed.scaled(arithmetic=flops / few_flops, trained=trained, weights=weights)
    return training_time(plan, speed, has_data=bool(lengths))


def measured_speed(plan: Plan, config: PreTrainedConfig, batch_of: BatchOf) -> tuple[Speed, dict[str, int]]:
    """Speed of a plan's micro-batches, and `count_trainable` of the model that ran them."""
    plan = replace(plan, trainable={}, dataloader_workers=0, schedule=replace(plan.schedule, grad_accumulation=1))
    batch = with_contents(training_batch(plan, config, batch_of))
    with random_trainer(plan, config, batch, num_steps=MAX_STEPS) as trainer:
        times = [perf_counter()]

        def begin(phase: Phase) -> None:
            times.append(perf_counter())
            if phase == "step" and times[-1] - times[0] > ENOUGH_S:
                trainer.control.should_training_stop = True

        mark_phases(trainer, begin)
        trainer.train()
        forward, backward, update, end = *times[-3:], perf_counter()
        prompts_s, token_s = completion_seconds(trainer, batch_of)
    reset_accelerator()
    speed = Speed(
        micro_batch_s=update - forward,
        update_s=end - update,
        loss_s=backward - forward,
        prompts_s=prompts_s,
        token_s=token_s,
    )
    return speed, count_trainable(trainer.model)


def completion_seconds(trainer: RecipeTrainer, batch_of: BatchOf) -> tuple[float, float]:
    """Seconds of reading the prompts that a validation completes at once, and of one more token in each; 0 if it
    completes none."""
    plan = trainer.plan
    rows = min(plan.validation.score_samples, plan.memory.micro_batch) if plan.validation else 0
    if not rows:
        return 0.0, 0.0
    prompts = with_contents(batch_of(micro_batch=rows))
    numbers = list(range(len(prompts.pop("labels"))))
    trainer.model.eval()

    def seconds(num_tokens: int) -> float:
        limits = {"batch_size": rows, "max_new_tokens": num_tokens}
        began = perf_counter()
        for _ in generated_tokens(model, [(numbers, dict(prompts))], lambda _: False, **limits):
            pass
        return perf_counter() - began

    with generating(trainer) as model, torch.no_grad():
        prompts_s, all_s = seconds(1), seconds(1 + TOKENS)
    return prompts_s, max(0.0, all_s - prompts_s) / TOKENS


# --- Trainers of random weights


def random_model(plan: Plan, config: PreTrainedConfig) -> PreTrainedModel:
    """The plan's base with random weights, on its device, without a file."""
    with torch.device(plan.device.kind):
        attn = resolve_attention(plan.memory.attn, plan.device, plan.memory.precision, padding_free=plan.padding_free)
        model = new_model(config, precision=plan.memory.precision, attn=attn)
    if plan.is_quantized:
        model = quantize_nf4(model, plan.memory.precision, fill=partial(_fill_randomly, device=model.device))
    return model


def _fill_randomly(layer: Any, device: torch.device) -> None:
    """Quantize random weights as transformers does with each weight that it loads (Bnb4bitQuantize)."""
    import bitsandbytes as bnb

    weight = torch.empty(layer.out_features, layer.in_features, dtype=layer.compute_dtype, device=device)
    nn.init.normal_(weight, std=0.02)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, **layer.weight.__dict__).to(device)


def with_contents(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A stand-in batch that can be computed with: pixels between 0 and 1, and in texts different tokens.

    With the same token everywhere, every token would have the same experts.
    """
    filled = dict(batch)
    filled |= {name: torch.rand_like(batch[name]) for name in ("pixel_values", FEATURES) if name in batch}
    if "image_grid_thw" not in batch:
        ids = batch["input_ids"]
        filled["input_ids"] = torch.arange(ids.numel()).view(ids.shape) % 256
    return filled


def training_batch(plan: Plan, config: PreTrainedConfig, batch_of: BatchOf) -> dict[str, torch.Tensor]:
    """A micro-batch as the plan's training takes it, its features without contents."""
    batch: Any = batch_of(micro_batch=plan.memory.micro_batch)
    batch = from_features(batch, config, plan.memory.precision) if plan.features_bytes else batch
    return packed(batch, config, plan.recipe.loss) if plan.padding_free else batch


@contextmanager
def random_trainer(
    plan: Plan, config: PreTrainedConfig, batch: Mapping[str, torch.Tensor], *, num_steps: int
) -> Iterator[RecipeTrainer]:
    """The plan's trainer on a model of random weights, with this batch as every micro-batch of `num_steps` steps.

    Raises UserError if the predicted kernels do not run.
    """
    prepare_kernels(plan)
    model = random_model(plan, config)
    gc.collect()
    if plan.on_gpu:
        torch.cuda.empty_cache()  # a real model is loaded weight by weight, and is never there unquantized
    adapted = apply_recipe(model, plan.recipe)
    samples = plan.recipe.effective_batch * num_steps
    plan = replace(plan, schedule=replace(plan.schedule, num_steps=num_steps, train_samples=samples))
    with fused_kernels(adapted, used=plan.fused_kernels):
        yield one_batch_trainer(plan, adapted, fake_processor(config, None), batch)
