"""Seconds that a training step and a batch of answers take at real size, with random weights, and on what."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.memory.stand_in import stand_in_batch
from stages.kit.models.load import check_device, resolve_attention
from stages.kit.training.seed import seed_everything
from stages.kit.training.trainer import RecipeTrainer
from tools.calibrate.measured import MAX_STEPS, random_model, random_trainer, with_contents
from tools.calibrate.settings import ACCUMULATION, Setting
from tools.gpu.flops import model_flops, peak_tflops
from tools.gpu.pieces import Kind

TIMED_STEPS = 4

KINDS: tuple[tuple[str, str], ...] = (
    ("copies", r"memcpy|memset|direct_copy|catarray|aten::(copy_|fill_|cat\b)|fillfunctor"),
    ("dequantization", r"quantize|bitsandbytes::"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("optimizer", r"adam|multi_tensor_apply|koptimizer|_foreach_"),
    ("loss (Triton)", r"^_(forward|backward)_kernel"),
    ("matmul", r"gemm|gemv|nvjet|cutlass|cublas|splitk|wgmma|convol|dgrad|wgrad|fprop|aten::(add|b|_grouped_)?mm\b"),
    ("elementwise", r"elementwise|reduce_kernel|norm|softmax|index|gather|scatter|sort|scan|dropout|at::native|aten::"),
)
"""Kinds of kernel by what their names hold, lower case; the first that matches. Reductions count as elementwise. On a
CPU the names are torch's operators."""


def kind_of(name: str) -> str:
    name = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def train(device: Kind, **setting: Any) -> dict[str, Any]:
    """Train some steps of a setting as the shipped recipes would, and say what one takes.

    setting: fields of a Setting. Raises UserError where no step came about.
    """
    wanted = Setting(**setting)
    check_device(DeviceParams(kind=device), wanted.precision)
    # The fastest that there is, as profiles have it.
    attn: Any = resolve_attention("auto", DeviceParams(kind=device), wanted.precision)
    wanted = replace(wanted, attn=attn)
    plan, config = wanted.plan(device), wanted.config()
    seed_everything(plan.seed)
    batch = with_contents(wanted.batch(config))
    if device == "cuda":  # a recipe's data loader has workers for that
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    with random_trainer(plan, config, wanted.processor(), batch, num_steps=MAX_STEPS) as trainer:
        pace = Pace(trainer, device)
        trainer.add_callback(pace)
        trainer.train()
    if len(pace.seconds) < TIMED_STEPS:
        raise UserError(f"the optimizer made too few steps in {MAX_STEPS}: no gradient was finite")
    step_s = median(pace.seconds)
    flops = ACCUMULATION * model_flops(plan, config, batch)
    tokens = ACCUMULATION * batch["input_ids"].numel()
    peak = peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None
    busy_s = sum(pace.spent.values())
    return {
        "attn": attn,
        "precision": plan.precision,
        "samples": ACCUMULATION * wanted.micro_batch,
        "step_s": round(step_s, 4),
        "slowest_s": round(max(pace.seconds), 4),
        "tokens_per_s": round(tokens / step_s, 1),
        "tflops_per_s": round(flops / step_s / 1e12, 3),
        "share_of_peak": round(flops / step_s / 1e12 / peak[0], 4) if peak else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "launches": pace.launches,
        # Of an unprofiled step: profiling makes launches slower.
        "idle_share": round(max(0.0, 1 - busy_s / step_s), 4) if device == "cuda" and pace.spent else None,
        "spent_s": {kind: round(seconds, 5) for kind, seconds in pace.spent.items()},
    }


class Pace(TrainerCallback):
    """Times steps from end to end, fetching included, once the optimizer has its state, and profiles one more."""

    def __init__(self, trainer: RecipeTrainer, device: Kind) -> None:
        self._trainer, self._device = trainer, device
        self._last: float | None = None
        self._profile: profile | None = None
        self.seconds: list[float] = []
        self.spent: dict[str, float] = {}
        """Seconds of one step by kind of kernel."""
        self.launches = 0
        """Kernels of one step; on a CPU, operators."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        if self._profile is not None:
            self._profile.stop()
            self._split(self._profile)
            control.should_training_stop = True
            return
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        # The first step with a state may still compile or choose kernels.
        if self._trainer.optimizer.state and state.global_step > 1:
            if self._last is None and self._device == "cuda":
                torch.cuda.reset_peak_memory_stats()  # the model lay there unquantized
            self._last = now
        if len(self.seconds) == TIMED_STEPS:
            self._profile = profile(
                activities=[ProfilerActivity.CUDA if self._device == "cuda" else ProfilerActivity.CPU]
            )
            self._profile.start()

    def _split(self, profiled: profile) -> None:
        for name, seconds in kernels(profiled, self._device):
            self.spent[kind_of(name)] = self.spent.get(kind_of(name), 0.0) + seconds
            self.launches += not re.match(r"mem(cpy|set)", name.lower())


def kernels(profiled: profile, device: Kind) -> list[tuple[str, float]]:
    """Name and seconds of each kernel and copy on a GPU, and of each operator on a CPU, without those that it calls."""
    if device == "cpu":
        return [(event.name, event.self_cpu_time_total / 1e6) for event in profiled.events()]
    return [
        (event.name, (event.time_range.end - event.time_range.start) / 1e6)
        for event in profiled.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]


@torch.inference_mode()
def answer(
    device: Kind,
    *,
    geometry: str,
    precision: str,
    batch_size: int,
    prompt: int,
    new_tokens: int,
    max_pixels: int = 1003520,
) -> dict[str, Any]:
    """Have a model of random weights answer a batch of prompts, all of them `new_tokens` long, as evaluation does."""
    setting = Setting(
        geometry=geometry,
        recipe="full",
        precision=precision,  # type: ignore[arg-type]
        attn=resolve_attention("auto", DeviceParams(kind=device), precision),  # type: ignore[arg-type]
    )
    config = setting.config()
    model = random_model(setting.plan(device), config).eval()
    batch = with_contents(stand_in_batch(config, micro_batch=batch_size, max_length=prompt, max_pixels=max_pixels))
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name != "labels"}

    def seconds(length: int) -> float:
        began = time.perf_counter()
        model.generate(**inputs, min_new_tokens=length, max_new_tokens=length, do_sample=False)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first_s, all_s = seconds(1), seconds(new_tokens)
    return {
        "attn": setting.attn,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "samples_per_s": round(batch_size / all_s, 3),
        "first_token_s": round(first_s, 4),
        "further_token_s": round((all_s - first_s) / max(1, new_tokens - 1), 5),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }
