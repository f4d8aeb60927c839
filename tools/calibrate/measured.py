"""The step that is predicted, done for real with random weights: what it takes of a GPU, or of this CPU."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch.nn import functional as F
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from stages.core.errors import UserError
from stages.kit.memory.step import mark_phases, one_batch_trainer
from stages.kit.models.load import new_model
from stages.kit.models.parts import apply_recipe
from stages.kit.models.processors import Processor
from stages.kit.planning.plan import Plan
from stages.kit.planning.prediction import Phase
from stages.kit.training.fused_loss import prepare_fused_loss
from stages.kit.training.peak import cpu_peak
from stages.kit.training.rehearsal import held_tensors
from stages.kit.training.seed import seed_everything
from stages.kit.training.trainer import RecipeTrainer

MAX_STEPS = 16
"""Of the optimizer. Two are enough; but fp16 skips the first ones until its gradients' scale suits."""

_strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=_strict)
class Measured:
    """Of one optimizer step, when the optimizer's state is there already. On a CPU all three amounts are the same."""

    allocated_bytes: int
    """As torch.cuda.max_memory_allocated counts it."""
    reserved_bytes: int
    """As torch.cuda.max_memory_reserved counts it."""
    total_bytes: int
    """With all else that is in use on the device, as the driver says."""
    phases: dict[Phase, int]
    """The peak of the allocated bytes in each phase; empty on a CPU."""
    num_retries: int
    """How often torch returned memory to a full device to make room."""
    step_s: float


@dataclass(frozen=True, kw_only=True, config=_strict)
class DeviceFacts:
    """What can be measured of a GPU without a model."""

    name: str
    capability: tuple[int, int]
    versions: str
    """The libraries that decide about memory: `torch 2.13.0+cu130, transformers 5.23.0, ...`."""
    total_bytes: int
    """What CUDA sees of the card."""
    context_bytes: int
    """In use beside torch's allocator after the first kernels; a training loads more of them."""
    workspace_bytes: int
    """That cuBLAS takes for a forward pass, from torch's allocator."""
    workspaces: int
    """As many of them are there after a backward pass."""
    attention: dict[str, str]
    """The kernel that torch chooses, by case."""


def measure_step(
    plan: Plan, config: PreTrainedConfig, processor: Processor, batch: Mapping[str, torch.Tensor]
) -> Measured:
    """Train a model of random weights as the plan says until the optimizer has its state, and measure the next step.

    This takes the whole process: seeds and settings of torch and TRL stay changed. Raises UserError where no step came
    about, and as random_trainer does.
    """
    seed_everything(plan.seed)
    batch = with_contents(batch)
    with random_trainer(plan, config, processor, batch, num_steps=MAX_STEPS) as trainer:
        meter: Meter = CudaMeter() if plan.device.kind == "cuda" else CpuMeter(trainer, batch)
        step = MeasuredStep(trainer, meter)
        trainer.add_callback(step)
        mark_phases(trainer, step.begin)
        trainer.train()
    if step.measured is None:
        raise UserError(f"the optimizer made no step in {MAX_STEPS}: no gradient was finite")
    return step.measured


@contextmanager
def random_trainer(
    plan: Plan,
    config: PreTrainedConfig,
    processor: Processor,
    batch: Mapping[str, torch.Tensor],
    *,
    num_steps: int,
) -> Iterator[RecipeTrainer]:
    """The plan's trainer on a model of random weights, to which every micro-batch of `num_steps` steps is this one.

    Raises UserError where the loss would not run the kernels that are predicted.
    """
    if plan.device.kind == "cuda" and prepare_fused_loss(plan.device) != "triton":
        raise UserError("the loss would run without Triton, for the reason above; predictions are for Triton's kernels")
    model = random_model(plan, config)
    gc.collect()
    if plan.device.kind == "cuda":
        torch.cuda.empty_cache()  # a real model comes weight by weight, and never lies there unquantized
    adapted = apply_recipe(model, plan.parts, plan.lora, plan.full_targets)
    schedule = replace(plan.schedule, num_steps=num_steps, train_samples=plan.schedule.effective_batch * num_steps)
    with tempfile.TemporaryDirectory() as scratch_dir:
        plan = replace(plan, trainable={}, schedule=schedule)
        yield one_batch_trainer(plan, adapted, processor, batch, Path(scratch_dir))


def random_model(plan: Plan, config: PreTrainedConfig) -> PreTrainedModel:
    """The plan's base, never trained, on its device, without a file."""
    with torch.device(plan.device.kind):
        model = new_model(config, precision=plan.precision, attn=plan.attn)
    if plan.quantization == "nf4":
        from stages.kit.memory.quantized import quantize_nf4

        model = quantize_nf4(model, plan.precision, fake=False)
    return model


def with_contents(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A stand-in batch that can be computed with: pixels between 0 and 1, and in texts different tokens.

    The same token everywhere would send every token to the same experts.
    """
    filled = {name: torch.rand_like(tensor) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    if "pixel_values" not in batch:
        ids = batch["input_ids"]
        filled["input_ids"] = torch.arange(ids.numel()).view(ids.shape) % 256
    return filled


class Meter(Protocol):
    def start(self) -> None: ...

    def begin(self, phase: Phase) -> None: ...

    def stop(self) -> Measured: ...


class CudaMeter:
    """By torch's allocator, phase by phase."""

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._started = time.monotonic()
        self._phase: Phase = "forward"
        self._phases: dict[Phase, int] = {}
        self._reserved_bytes = 0

    def begin(self, phase: Phase) -> None:
        torch.cuda.synchronize()
        reached = max(self._phases.get(self._phase, 0), torch.cuda.max_memory_allocated())
        self._phases[self._phase] = reached
        self._reserved_bytes = max(self._reserved_bytes, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        self._phase = phase

    def stop(self) -> Measured:
        self.begin(self._phase)
        seconds = time.monotonic() - self._started
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        beside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
        return Measured(
            allocated_bytes=max(self._phases.values()),
            reserved_bytes=self._reserved_bytes,
            total_bytes=self._reserved_bytes + beside_bytes,
            phases=self._phases,
            num_retries=torch.cuda.memory_stats().get("num_alloc_retries", 0),
            step_s=round(seconds, 3),
        )


class CpuMeter:
    """By torch's profiler, which knows of no phases."""

    def __init__(self, trainer: RecipeTrainer, batch: Mapping[str, torch.Tensor]) -> None:
        self._trainer = trainer
        self._batch = batch
        self._measuring = ExitStack()

    def start(self) -> None:
        self._started = time.monotonic()
        self._peak = self._measuring.enter_context(cpu_peak((*self._batch.values(), *held_tensors(self._trainer))))

    def begin(self, phase: Phase) -> None:
        pass

    def stop(self) -> Measured:
        self._measuring.close()
        size = self._peak.size_bytes
        seconds = round(time.monotonic() - self._started, 3)
        return Measured(
            allocated_bytes=size, reserved_bytes=size, total_bytes=size, phases={}, num_retries=0, step_s=seconds
        )


class MeasuredStep(TrainerCallback):
    """Measures the first step that finds the optimizer's state, and ends the training after it."""

    def __init__(self, trainer: RecipeTrainer, meter: Meter) -> None:
        self._trainer = trainer
        self._meter = meter
        self._running = False
        self.measured: Measured | None = None

    def begin(self, phase: Phase) -> None:
        if self._running:
            self._meter.begin(phase)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer.optimizer.state:
            self._meter.start()
            self._running = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._running:
            self.measured = self._meter.stop()
            self._running = False
            control.should_training_stop = True


def device_facts(kind: str) -> DeviceFacts:
    """Of this CPU, or of the first CUDA device in a process that has not used it yet."""
    if kind == "cpu":
        return DeviceFacts(
            name="CPU",
            capability=(0, 0),
            versions=library_versions(),
            total_bytes=0,
            context_bytes=0,
            workspace_bytes=0,
            workspaces=0,
            attention=chosen_kernels(torch.device("cpu")),
        )
    device = torch.device("cuda", 0)
    x, weight, bias = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
        for shape in ((4096, 4096), (4096, 4096), (4096,))
    )
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        F.linear(x, weight, bias)
        F.linear(x, weight)
    torch.cuda.synchronize()
    forward_bytes = torch.cuda.memory_allocated() - before
    (F.linear(x, weight, bias) @ weight).float().square().mean().backward()
    for tensor in (x, weight, bias):
        tensor.grad = None
    torch.cuda.synchronize()
    gc.collect()
    backward_bytes = torch.cuda.memory_allocated() - before
    attention = chosen_kernels(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return DeviceFacts(
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        versions=library_versions(),
        total_bytes=total_bytes,
        context_bytes=total_bytes - free_bytes - torch.cuda.memory_reserved(),
        workspace_bytes=forward_bytes,
        workspaces=round(backward_bytes / forward_bytes) if forward_bytes else 0,
        attention=attention,
    )


def library_versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "bitsandbytes"))


def chosen_kernels(device: torch.device) -> dict[str, str]:
    """What scaled_dot_product_attention takes there for what cuda.chosen_kernel predicts: (query heads, key heads,
    tokens, width, whether there is a mask)."""
    from torch.nn.attention import SDPBackend

    cases = {
        "text": (28, 4, 2048, 128, False),
        "vision": (16, 16, 4096, 80, False),
        "text, masked": (28, 28, 2048, 128, True),
    }
    names = {value.value: name for name, value in SDPBackend.__members__.items()}
    chosen = {}
    for case, (heads, key_heads, tokens, width, masked) in cases.items():
        query = torch.zeros(1, heads, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        key = torch.zeros(1, key_heads, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(1, 1, tokens, tokens, device=device, dtype=torch.bool) if masked else None
        causal = case == "text"
        number = torch._fused_sdp_choice(query, key, key, mask, 0.0, causal, enable_gqa=heads != key_heads)  # noqa: SLF001
        chosen[case] = names.get(int(number), str(number))
    return chosen
