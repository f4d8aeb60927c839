"""Models of random weights: memory of a training step, predicted and measured; time of steps and of answers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.evaluation.answer import answered_tokens
from stages.kit.internals.torch_internals import cpu_peak
from stages.kit.memory.calibration import Calibration, load_calibration
from stages.kit.memory.predict import depth_of, predict, predict_generation, with_depth
from stages.kit.memory.stand_in import stand_in_batch, stand_in_processor
from stages.kit.memory.step import Inference
from stages.kit.models.load import check_device, resolve_attention
from stages.kit.planning.ladder import prefill_batch_size
from stages.kit.training.resume import seed_everything
from stages.kit.training.trainer import RecipeTrainer, lasting_tensors
from tools.gpu.device import Kind
from tools.gpu.flops import model_flops, peak_tflops
from tools.gpu.kernels import KINDS, kernels, kind_of
from tools.gpu.models import ACCUMULATION, batch_of, config_of, plan_of, random_model, random_trainer, with_contents
from tools.gpu.pieces import Setting

SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Shares of the language model's layers: the first that fits is predicted and measured."""
MAX_STEPS = 24
"""fp16 skips the first steps until the scale of its gradients suits."""
TIMED_STEPS = 4


def predict_memory(
    device: Kind, *, setting: dict[str, Any], facts: dict[str, Any], layers: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Two predictions of the same: scaled up from a few layers, as the plan stage does it, and of all layers.

    layers: of the language model and of the vision tower; None: as many as fit the device, all of them on a CPU.
    Raises UserError where not even the fewest fit.
    """
    wanted = Setting(**setting)
    plan, whole = plan_of(wanted, device), config_of(wanted.geometry)
    batch, processor = batch_of(plan, whole, max_pixels=wanted.max_pixels), stand_in_processor(whole, None)
    calibration = with_workspaces(load_calibration(), facts)
    text, vision = depth_of(whole)
    for depth in [layers] if layers else [(max(1, round(text * share)), vision) for share in SHARES]:
        config = with_depth(whole, (depth[0], depth[1]))
        scaled = predict(plan, config, processor, batch, calibration)
        if device == "cpu" or layers or scaled.verdict(facts["memory_bytes"]) == "fits":
            exact = predict(plan, config, processor, batch, calibration, exact=True)
            both = {"scaled": scaled, "exact": exact}
            amounts = {
                name: {"allocated_bytes": each.allocated_bytes, "reserved_bytes": each.reserved_bytes}
                for name, each in both.items()
            }
            return {"layers": depth, **amounts}
    raise UserError(f"does not fit with {SHARES[-1]:.1%} of its layers")


def with_workspaces(calibration: Calibration, facts: Mapping[str, Any]) -> Calibration:
    """With cuBLAS's workspaces as they were measured: they are part of what a prediction says torch allocates."""
    if not facts["workspaces_bytes"]:
        return calibration
    measured = replace(calibration.cublas_workspaces_mib, value=facts["workspaces_bytes"] / 2**20)
    return replace(calibration, cublas_workspaces_mib=measured)


def measure_training(device: Kind, *, setting: dict[str, Any], prediction: dict[str, Any]) -> dict[str, Any]:
    """Bytes and seconds of a step of the layers that were predicted, and what it spends the time on.

    This takes the whole process: seeds and settings of torch and TRL stay changed. Raises UserError where too few steps
    came about, and as random_trainer does.
    """
    wanted = Setting(**setting)
    plan = plan_of(wanted, device)
    check_device(plan.device, plan.precision)
    resolve_attention(plan.attn, plan.device, plan.precision)
    config = with_depth(config_of(wanted.geometry), tuple(prediction["layers"]))
    seed_everything(plan.seed)
    batch = with_contents(batch_of(plan, config, max_pixels=wanted.max_pixels))
    if device == "cuda":  # a recipe's data loader has workers for that
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    with random_trainer(plan, config, batch, num_steps=MAX_STEPS) as trainer:
        meter = StepMeter(trainer, batch, device)
        trainer.add_callback(meter)
        trainer.train()
    if not meter.launches:
        raise UserError(f"the optimizer made too few steps in {MAX_STEPS}: no gradient was finite")
    step_s, busy_s = median(meter.seconds), sum(meter.spent.values())
    tflops = ACCUMULATION * model_flops(plan, config, batch) / step_s / 1e12
    peak = peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None
    return {
        **meter.memory,
        "samples": ACCUMULATION * wanted.micro_batch,
        "step_s": round(step_s, 4),
        "tokens_per_s": round(ACCUMULATION * batch["input_ids"].numel() / step_s, 1),
        "tflops_per_s": round(tflops, 3),
        "share_of_peak": round(tflops / peak[0], 4) if peak else None,
        # Of an unprofiled step: profiling makes launches slower.
        "idle_share": round(max(0.0, 1 - busy_s / step_s), 4) if device == "cuda" else None,
        "launches": meter.launches,
        **{kind: round(meter.spent.get(kind, 0.0) / busy_s, 4) for kind, _ in KINDS},
    }


def measure_answers(
    device: Kind,
    *,
    geometry: str,
    batch_size: int,
    prompt: int,
    new_tokens: int,
    facts: dict[str, Any],
    precision: Any = "bf16",
    max_pixels: int = 1003520,
) -> dict[str, Any]:
    """Have a model answer a batch of prompts, all of them `new_tokens` long, as evaluation does; its peak of memory
    against the prediction."""
    attn: Any = resolve_attention("auto", DeviceParams(kind=device), precision)
    config, size = config_of(geometry), prefill_batch_size(batch_size)
    plan = plan_of(Setting(geometry, "full", precision=precision, attn=attn, padding_free=False), device)
    batch = with_contents(stand_in_batch(config, micro_batch=size, max_length=prompt, max_pixels=max_pixels))
    del batch["labels"]
    inference = Inference(device=plan.device, precision=precision, attn=attn)
    calibration = with_workspaces(load_calibration(), facts)
    limits = {"batch_size": batch_size, "max_new_tokens": new_tokens}
    predicted = predict_generation(inference, config, batch, calibration, **limits)
    model = random_model(plan, config).eval()

    @torch.inference_mode()
    def seconds(length: int) -> float:
        batches = ((list(range(first, first + size)), batch) for first in range(0, batch_size, size))
        began = time.perf_counter()
        for _ in answered_tokens(model, batches, lambda _: False, batch_size=batch_size, max_new_tokens=length):
            pass
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first_s, all_s = seconds(1), seconds(new_tokens)
    if device == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        with cpu_peak([*model.parameters(), *model.buffers(), *batch.values()]) as peak:
            seconds(new_tokens)
        peak_bytes = peak.size_bytes
    return {
        "attn": attn,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "samples_per_s": round(batch_size / all_s, 3),
        "first_token_s": round(first_s, 4),
        "further_token_s": round((all_s - first_s) / max(1, new_tokens - 1), 5),
        "peak_bytes": peak_bytes,
        "error": predicted.allocated_bytes / peak_bytes - 1,
    }


class StepMeter(TrainerCallback):
    """Once the optimizer has its state: memory of the next step; then the seconds of some, from end to end, fetching
    included; then what one more spends them on. The step after the first may still compile or choose kernels."""

    def __init__(self, trainer: RecipeTrainer, batch: Mapping[str, torch.Tensor], device: Kind) -> None:
        self._trainer, self._batch, self._device = trainer, batch, device
        self._ends: list[float] = []
        self._measuring = ExitStack()
        self.memory: dict[str, int] = {}
        """Bytes: allocated and reserved, as torch.cuda.max_memory_allocated counts them; total, with everything else
        that is in use on the device. On a CPU all three are the same. retries: how often torch had to make room."""
        self.spent: dict[str, float] = {}
        """Seconds of one step by kind of kernel."""
        self.launches = 0
        """Kernels of one step; on a CPU, operators."""

    @property
    def seconds(self) -> list[float]:
        return [end - begin for begin, end in pairwise(self._ends[2 : 3 + TIMED_STEPS])]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._trainer.optimizer.state:
            return
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        num_steps = len(self._ends) - 1
        if num_steps == 0:
            self._begin_memory()
        elif num_steps == 1:
            self.memory = self._end_memory()
        elif num_steps == 2 + TIMED_STEPS:
            activity = ProfilerActivity.CUDA if self._device == "cuda" else ProfilerActivity.CPU
            self._profile = self._measuring.enter_context(profile(activities=[activity]))
        elif num_steps == 3 + TIMED_STEPS:
            self._measuring.close()
            for name, seconds in kernels(self._profile, self._device):
                self.spent[kind_of(name)] = self.spent.get(kind_of(name), 0.0) + seconds
                self.launches += not re.match(r"mem(cpy|set)", name.lower())
            control.should_training_stop = True

    def _begin_memory(self) -> None:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            held = (*self._batch.values(), *lasting_tensors(self._trainer))
            self._cpu_peak = self._measuring.enter_context(cpu_peak(held))

    def _end_memory(self) -> dict[str, int]:
        if self._device == "cpu":
            self._measuring.close()
            size = self._cpu_peak.size_bytes
            return {"allocated_bytes": size, "reserved_bytes": size, "total_bytes": size, "retries": 0}
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        reserved_bytes = torch.cuda.max_memory_reserved()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": reserved_bytes,
            "total_bytes": reserved_bytes + total_bytes - free_bytes - torch.cuda.memory_reserved(),
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }
