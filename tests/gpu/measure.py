"""One measurement of `make gpu`, in a process of its own: facts, a training or its prediction, generation, a
recipe, a comparison of speed.

Run  python -m tests.gpu.measure JOB DEVICE TASK_JSON ANSWER_PATH   (test_gpu.py does)
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import click
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from transformers import TrainerCallback

from stages.core.atomic import atomic_write
from stages.core.errors import UserError, configure_logging
from stages.core.params import load_params
from stages.core.records import read_settings, yaml_text
from stages.core.signals import end_with_parent
from stages.evaluation.generate import generated_tokens
from stages.internals.torch_internals import cpu_peak, expand_segments
from stages.launcher.gpus import driver_version
from stages.memory.fakes import fake_batch, fake_processor
from stages.memory.predict import MemoryPredictor, predict_generation
from stages.models.kernels import packed_attention, turn_off_cudnn_attention
from stages.models.load import check_device
from stages.planning.cards import card_of
from stages.planning.ladder import prefill_batch_size
from stages.planning.memory_use import recognised_out_of_memory
from stages.planning.plan import Plan
from stages.planning.resolve import resolve_plan
from stages.training.kernels import compiler_problem, refuse_wrong_kernels
from stages.training.randomness import seed_everything
from stages.training.trainer import RecipeTrainer, lasting_tensors
from tests.benchmarks.speed import compare_speed
from tests.plans import changed
from tools.plan import available_inputs, config_of_base
from tools.timing import random_model, random_trainer, training_batch, with_contents
from tools.verify.rerun import unequal_files

AMOUNTS = ("allocated", "reserved", "total")
ACCUMULATION = 4
"""Micro-batches per step. Trainer holds all of them on the device at once, so it matters; recipes have 8 or 16."""
MAX_STEPS, TIMED_STEPS = 24, 4
"""fp16 skips the first steps until the scale of its gradients suits."""

# --- Facts about the device and its software

ATTENTION = {
    "text": (28, 4, 2048, 128, True, False),
    "vision": (16, 16, 4096, 80, False, False),
    "text, masked": (28, 28, 2048, 128, False, True),
}
"""Attention with kernel memory that predictions assume: query heads, key heads, tokens, width, causal, masked."""


def facts(device: str) -> dict[str, Any]:
    """In a process that has not used CUDA yet. Each probe is a line: it works, or why not."""
    on_gpu = device == "cuda"
    free_bytes, total_bytes = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    card = card_of(name)
    with_triton = find_spec("triton") is not None and on_gpu
    turn_off_cudnn_attention()  # as loading a model does
    seed_everything(42)  # from here on kernels without a deterministic form are refused, as in every training
    probes = {f"SDPA, {case}": chosen_kernel(device, *shape) for case, shape in ATTENTION.items()}
    return {
        "name": name,
        "capability": torch.cuda.get_device_capability() if on_gpu else (0, 0),
        "memory_bytes": total_bytes,
        "context_bytes": total_bytes - free_bytes,
        "versions": ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "bitsandbytes")),
        "driver, CUDA, cuDNN": f"{driver_version()}, {torch.version.cuda}, {torch.backends.cudnn.version()}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "usable, as planned": f"{card.usable_gib} GiB" if card else "unknown: no such card in planning/cards.py",
        "C compiler": compiler_problem() or "compiles against Python's headers",
        "Liger's kernels": tried(partial(refuse_wrong_kernels, device)) if with_triton else "no GPU, or no Triton",
        "flash-attn": "installed" if find_spec("flash_attn") else "not installed",
        "attention without padding": tried(partial(attends_by_sample, device)),
        **probes,
    }


def tried(probe: Callable[[], str | None]) -> str:
    try:
        return probe() or "as torch's"
    except Exception as error:  # noqa: BLE001 - any error is the answer
        first = str(error).strip().partition("\n")[0]
        return f"does not work: {type(error).__name__}: {first}"[:200]


def chosen_kernel(device: str, heads: int, key_heads: int, tokens: int, width: int, causal: bool, masked: bool) -> str:
    """The kernel that torch chooses for scaled_dot_product_attention, which memory/cuda.py predicts."""
    query, key = (
        torch.zeros(1, each, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for each in (heads, key_heads)
    )
    mask = torch.ones(1, 1, tokens, tokens, device=device, dtype=torch.bool) if masked else None
    number = int(torch._fused_sdp_choice(query, key, key, mask, 0.0, causal, enable_gqa=heads != key_heads))
    return next((name for name, value in SDPBackend.__members__.items() if value.value == number), str(number))


def attends_by_sample(device: str) -> str:
    """Attention over a row of several samples, on Qwen2-VL-7B's heads, in bf16 and in fp32: the relative difference."""
    lengths = (700, 1, 1000, 347) if device == "cuda" else (5, 1, 9)
    ends = F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).int()
    row: dict[str, Any] = {"cu_seq_lens_q": ends, "max_length_q": max(lengths), "scaling": 128**-0.5}
    decoder: Any = SimpleNamespace(is_causal=True, num_key_value_groups=7)
    drawn = [torch.randn(1, heads, sum(lengths), 128, device=device) for heads in (28, 4, 4)]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        query, key, value = (tensor.to(dtype).requires_grad_() for tensor in drawn)
        output, _ = packed_attention(decoder, query, key, value, None, **row)
        gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
        found.append([each.detach().float() for each in (output, *gradients)])
    apart = max(float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True))
    assert apart < 0.02, f"{apart:.1e} from fp32"
    return f"forward and backward, {apart:.1e} from fp32"


# --- Plans and models: a shipped recipe on a shipped profile, with changes, on random weights

Setting = dict[str, Any]
"""profile, recipe, gpu if it is to be another than an unknown one, and the changes of the plan; micro_batch is the
schedule's."""


def planned(setting: Setting, device: str) -> tuple[Plan, MemoryPredictor]:
    """The plan of a setting for one step on one device, and what predicts its memory."""
    changes = dict(setting)
    profile, recipe, gpu = changes.pop("profile"), changes.pop("recipe"), changes.pop("gpu", None)
    params = replace(load_params(), profile=profile, gpu=gpu)
    inputs = available_inputs(params, recipe)
    config = config_of_base(inputs)
    plan = resolve_plan(params, recipe, train_samples=params.recipe(recipe).effective_batch)
    micro_batch = changes.pop("micro_batch", plan.memory.micro_batch)
    schedule = {"grad_accumulation": ACCUMULATION, "num_steps": 1, "warmup_steps": 0}
    samples = micro_batch * ACCUMULATION
    plan = changed(
        plan,
        base_dir=str(inputs.config_dir),
        device=replace(plan.device, kind="cuda" if device == "cuda" else "cpu"),
        placement="single",
        dataloader_workers=0,
        loss="all-tokens",
        domains=(),
        micro_batch=micro_batch,
        effective_batch=samples,
        train_samples=samples,
        **schedule,
    )
    last = ("fused_kernels", "padding_free", "features_bytes")  # what the predictor chooses otherwise
    chosen = {name: changes.pop(name) for name in last if name in changes}
    plan = changed(plan, **changes)
    pixels = plan.images.max_pixels if plan.images else None
    batch_of = partial(fake_batch, config, max_length=plan.recipe.max_length, max_pixels=pixels)
    predictor = MemoryPredictor(config=config, processor=fake_processor(config, None), batch_of=batch_of)
    plan, _ = predictor.completed(plan, params.active.memory)
    return replace(plan, **chosen), predictor


# --- Trainings


def predict_training(device: str, *, setting: Setting) -> dict[str, Any]:
    """The plan stage's prediction."""
    plan, predictor = planned(setting, device)
    prediction = predictor(plan)
    names = (*(f"{amount}_bytes" for amount in AMOUNTS), "low_bytes", "high_bytes", "flops", "operators")
    return {"setting": setting, "predicted": {name: getattr(prediction, name) for name in names}}


def measure_training(device: str, *, setting: Setting, predicted: dict[str, Any]) -> dict[str, Any]:
    """Memory and time of a step.

    It takes the whole process: seeds and settings of torch and TRL stay changed. Raises UserError if too few steps had
    finite gradients, and as random_trainer does.
    """
    plan, predictor = planned(setting, device)
    if plan.on_gpu and plan.memory.expandable_segments:
        expand_segments()
    check_device(plan.device, plan.memory.precision)
    seed_everything(plan.seed)
    batch: dict[str, Any] = with_contents(training_batch(plan, predictor.config, predictor.batch_of))
    if plan.on_gpu:  # a recipe's data loader has workers for that; a padding-free batch has numbers too
        batch = {name: each.pin_memory() if torch.is_tensor(each) else each for name, each in batch.items()}
    with random_trainer(plan, predictor.config, batch, num_steps=MAX_STEPS) as trainer:
        trainer.add_callback(meter := StepMeter(trainer, batch))
        trainer.train()
    if len(meter.seconds) < TIMED_STEPS:
        raise UserError(f"the optimizer made too few steps in {MAX_STEPS}: no gradient was finite")
    step_s = median(meter.seconds)
    tflops = ACCUMULATION * predicted["flops"] / step_s / 1e12
    card = card_of(torch.cuda.get_device_name()) if plan.on_gpu else None
    return {
        "predicted": predicted,
        "samples": plan.samples_per_step,
        "step_s": round(step_s, 4),
        "tokens_per_s": round(ACCUMULATION * batch["input_ids"].numel() / step_s, 1),
        "tflops_per_s": round(tflops, 3),
        "share_of_peak": round(tflops / card.tflops, 4) if card else None,
        "operator_us": round(1e6 * step_s / ACCUMULATION / predicted["operators"], 1),
        **meter.memory,
    }


class StepMeter(TrainerCallback):
    """Measures, once the optimizer has its state, the memory of the next step, and the time of TIMED_STEPS more, end to
    end. The step between them may still compile or choose kernels."""

    def __init__(self, trainer: RecipeTrainer, batch: Mapping[str, torch.Tensor]) -> None:
        self._trainer, self._batch = trainer, batch
        self._ends: list[float] = []
        self._measuring = ExitStack()
        self.memory: dict[str, int] = {}

    @property
    def seconds(self) -> list[float]:
        return [end - begin for begin, end in pairwise(self._ends[2:])]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer.optimizer.state:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        if len(self._ends) == 1:
            existing = (*self._batch.values(), *lasting_tensors(self._trainer))
            self.memory = self._measuring.enter_context(measured_memory(existing))
        elif len(self._ends) == 2:
            self._measuring.close()
        control.should_training_stop = len(self._ends) == 3 + TIMED_STEPS


@contextmanager
def measured_memory(existing: Iterable[object]) -> Iterator[dict[str, int]]:
    """Peaks within the block, filled in at its end: bytes allocated and reserved, as torch counts them, and in total,
    with all else in use on the device. On a CPU the peak of its tensors for all three.

    existing: tensors from before that stay throughout.
    """
    found: dict[str, int] = {}
    if not torch.cuda.is_available():
        with cpu_peak(existing) as peak:
            yield found
        found |= {f"{amount}_bytes": peak.size_bytes for amount in AMOUNTS}
        return
    torch.cuda.reset_peak_memory_stats()
    yield found
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    reserved_bytes = torch.cuda.max_memory_reserved()
    beside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    amounts = (torch.cuda.max_memory_allocated(), reserved_bytes, reserved_bytes + beside_bytes)
    found |= {f"{amount}_bytes": size for amount, size in zip(AMOUNTS, amounts, strict=True)}


# --- Generation


def measure_generation(device: str, *, setting: Setting, batch_size: int, new_tokens: int) -> dict[str, Any]:
    """Time of a batch of completions, all of full length, as evaluation makes them; memory against its prediction."""
    plan, predictor = planned({**setting, "quantization": "none"}, device)
    plan, config = replace(plan.with_memory(attn="auto"), padding_free=False), predictor.config
    size = prefill_batch_size(batch_size)
    batch = with_contents(predictor.batch_of(micro_batch=size))
    del batch["labels"]
    limits = {"batch_size": batch_size, "max_new_tokens": new_tokens}
    predicted = predict_generation(plan, config, batch, **limits)
    model = random_model(plan, config).eval()

    @torch.inference_mode()
    def seconds(length: int) -> float:
        batches = ((list(range(first, first + size)), dict(batch)) for first in range(0, batch_size, size))
        began = time.perf_counter()
        for _ in generated_tokens(model, batches, lambda _: False, batch_size=batch_size, max_new_tokens=length):
            pass
        if plan.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    first_s, all_s = seconds(1), seconds(new_tokens)
    with measured_memory([*model.parameters(), *model.buffers(), *batch.values()]) as memory:
        seconds(new_tokens)
    return {
        "prompt": plan.recipe.max_length,
        "new_tokens": new_tokens,
        "samples_per_s": round(batch_size / all_s, 3),
        "first_token_s": round(first_s, 4),
        "further_token_s": round((all_s - first_s) / max(1, new_tokens - 1), 5),
        "allocated_bytes": memory["allocated_bytes"],
        "error": predicted.allocated_bytes / memory["allocated_bytes"] - 1,
    }


# --- A recipe at tiny size, by the stages themselves: all the way, twice, and killed and resumed

ROOT = Path(__file__).parents[2]
SMALL = (
    "profile=tiny",
    "tracking.to=[]",
    "checkpoints={every_minutes: null, every_steps: 1}",
    *(f"profiles.tiny.datasets.{name}.limit={{train: 8, val: 4}}" for name in ("nutrition-tables", "visempar")),
    "profiles.tiny.images={min_pixels: 3136, max_pixels: 12544}",
    "profiles.tiny.memory.micro_batch=2",
    "profiles.tiny.evaluation={batch_size: 4, max_new_tokens: 192, max_length: 1024}",
)
"""Changes of params.yaml."""


def run_recipe(device: str, *, recipe: str, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Run the stages of a recipe's evaluation in a small copy of this checkout; its training also a second time, and
    once more killed after its first checkpoint and resumed: the same bytes or not.

    memory: settings of the tiny profile. Raises UserError if a stage fails.
    """
    own = {"effective_batch": 4, "epochs": 3}
    changes = [f"recipes.{recipe}.{name}={value}" for name, value in own.items()]
    changes += [f"profiles.tiny.memory.{name}={json.dumps(value)}" for name, value in memory.items()]
    changes += [*SMALL, f"profiles.tiny.device={{kind: {device}, memory_gb: 16}}"]
    raw = read_settings(dict[str, Any], ROOT / "params.yaml", changes=changes)
    wanted, began = raw["recipes"][recipe], time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("stages", "data/metrics", "data/tiny"):
            shutil.copytree(ROOT / part, folder / part)
        atomic_write(yaml_text(raw), folder / "params.yaml")
        base = wanted["base"].removeprefix("bases/")
        for stage, item in (("base", base), ("prepare", wanted["data"]), ("plan", recipe)):
            _run(stage, item, folder)
        run_dir, once, again = folder / "data/runs" / recipe, folder / "once", folder / "again"
        for copy in (once, again):
            _run("train", recipe, folder)
            shutil.copytree(run_dir, copy)
            shutil.rmtree(folder / ".bakeoff")  # the next training would resume from its checkpoints
        _run("train", recipe, folder, kill=True)
        for stage in ("train", "merge", "evaluate"):
            _run(stage, recipe, folder)
        same = [not unequal_files(once, other, ("trained", "training")) for other in (again, run_dir)]
        read = {name: json.loads((run_dir / f"{name}.json").read_text()) for name in ("memory", "merge")}
        training = json.loads((run_dir / "training/training.json").read_text())
    return {
        "loss": training["final_loss"],
        "peak_bytes": training["peak_memory_bytes"],
        "error": read["memory"]["prediction"]["allocated_bytes"] / training["peak_memory_bytes"] - 1,
        "logit_deviation": read["merge"]["logit_deviation"],
        "all_s": round(time.monotonic() - began, 1),
        "same_bytes_twice": same[0],
        "same_bytes_after_a_kill": same[1],
    }


def _run(stage: str, item: str, folder: Path, *, kill: bool = False) -> None:
    """Run a stage in this environment; kill: until its first checkpoint. Raises UserError if it ends otherwise."""
    print(f"$ {stage} {item}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", f"stages.{stage}", item],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent(),
    )
    while process.poll() is None:
        if kill and any((folder / ".bakeoff/checkpoints").rglob("step-*")):
            process.kill()
        time.sleep(0.02)
    if process.returncode != (-signal.SIGKILL if kill else 0):
        raise UserError(f"{stage} {item} ended with {process.returncode}{' before it was killed' if kill else ''}")


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": facts,
    "predictions": predict_training,
    "trainings": measure_training,
    "generation": measure_generation,
    "recipes": run_recipe,
    "bench": compare_speed,
}


@click.command(help=__doc__)
@click.argument("job", type=click.Choice(list(JOBS)))
@click.argument("device")
@click.argument("task_json")
@click.argument("answer_path", type=click.Path(path_type=Path))
@recognised_out_of_memory()
def main(job: str, device: str, task_json: str, answer_path: Path) -> None:
    configure_logging(job)
    answer_path.write_text(json.dumps(JOBS[job](device, **json.loads(task_json)), allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()
