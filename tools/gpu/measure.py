"""One measurement of `make gpu`, in a process of its own: facts, a training, its prediction, generation, a recipe.

Run  python -m tools.gpu.measure JOB DEVICE TASK_JSON ANSWER_PATH   (tools/gpu does)
"""

from __future__ import annotations

import gc
import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
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
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback

from stages.core.errors import UserError, configure_logging
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams
from stages.kit.evaluation.answer import answered_tokens
from stages.kit.internals.torch_internals import chosen_attention, cpu_peak
from stages.kit.launcher.gpus import driver_version
from stages.kit.memory.calibration import load_calibration
from stages.kit.memory.predict import MemoryPredictor, depth_of, predict_generation, with_depth
from stages.kit.memory.stand_in import quantize_nf4, stand_in_batch, stand_in_processor
from stages.kit.memory.step import Inference, from_features, one_batch_trainer
from stages.kit.models.adapters import apply_recipe
from stages.kit.models.folders import STAND_IN_DIR
from stages.kit.models.kernels import fused_kernels, packed_attention, turn_off_cudnn_attention
from stages.kit.models.load import check_device, new_model, resolve_attention
from stages.kit.planning.cards import card_of
from stages.kit.planning.ladder import prefill_batch_size
from stages.kit.planning.memory_use import recognised_out_of_memory
from stages.kit.planning.plan import Plan, resolve_plan
from stages.kit.training.batches import FEATURES, packed
from stages.kit.training.kernels import compiler_problem, prepare_kernels, refuse_wrong_kernels
from stages.kit.training.resume import seed_everything
from stages.kit.training.trainer import RecipeTrainer, lasting_tensors
from tools.gpu.recipe import run_recipe
from tools.plan import available_inputs, config_of_base

ACCUMULATION = 4
"""Micro-batches per step. Trainer holds all of them on the device at once, so it matters; recipes have 8 or 16."""
SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the language model's layers: the first that is predicted to fit is measured."""
MAX_STEPS, TIMED_STEPS = 24, 4
"""fp16 skips the first steps until the scale of its gradients suits."""

KINDS: tuple[tuple[str, str], ...] = (
    ("copies", r"memcpy|memset|direct_copy|catarray|aten::(copy_|fill_|cat\b)|fillfunctor"),
    ("dequantization", r"quantize|bitsandbytes::"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("optimizer", r"adam|multi_tensor_apply|koptimizer|_foreach_"),
    ("Triton", r"^_(forward|backward)_kernel|^_?(triton_rope|rms_norm|swiglu|geglu)"),
    ("matmul", r"gemm|gemv|nvjet|cutlass|cublas|splitk|wgmma|convol|dgrad|wgrad|fprop|aten::(add|b|_grouped_)?mm\b"),
    ("elementwise", r"elementwise|reduce_kernel|norm|softmax|index|gather|scatter|sort|scan|dropout|at::native|aten::"),
    ("communication", r"nccl"),
    ("other", ""),
)
"""Kinds of kernel by a part of their names, lower case; the first that matches. On a CPU the names are operators."""


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name.lower()))


# --- Facts about the device and its software

ATTENTION = {
    "text": (28, 4, 2048, 128, True, False),
    "vision": (16, 16, 4096, 80, False, False),
    "text, masked": (28, 28, 2048, 128, False, True),
}
"""Attention whose kernel memory predictions assume: query heads, key heads, tokens, width, causal, masked."""


def facts(device: str) -> dict[str, Any]:
    """In a process that has not used CUDA yet. Each probe is a line: it works, or why not."""
    on_gpu = device == "cuda"
    free_bytes, total_bytes = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    card = card_of(name)
    with_triton = find_spec("triton") is not None and on_gpu
    turn_off_cudnn_attention()  # as loading a model does
    probes = {f"SDPA in evaluation, {case}": chosen_kernel(device, *shape) for case, shape in ATTENTION.items()}
    seed_everything(42)  # from here on kernels without a deterministic form are refused, as in every training
    probes |= {f"SDPA in training, {case}": chosen_kernel(device, *shape) for case, shape in ATTENTION.items()}
    return {
        "name": name,
        "capability": torch.cuda.get_device_capability() if on_gpu else (0, 0),
        "memory_bytes": total_bytes,
        "context_bytes": total_bytes - free_bytes,
        "versions": ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "bitsandbytes")),
        "driver, CUDA, cuDNN": f"{driver_version()}, {torch.version.cuda}, {torch.backends.cudnn.version()}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "peak, dense 16-bit": f"{card.tflops:g} TFLOP/s" if card else "unknown: no such card in planning/cards.py",
        "usable, as planned": f"{card.usable_gib} GiB" if card else None,
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
    return chosen_attention(query, key, mask, causal=causal)


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
"""profile, recipe, and the changes of the plan; micro_batch is the schedule's."""


def planned(setting: Setting, device: str) -> tuple[Plan, MemoryPredictor]:
    """The plan of a setting for one step on one device, and what predicts its memory."""
    changes = dict(setting)
    params, recipe = load_params().on(changes.pop("profile")), changes.pop("recipe")
    inputs = available_inputs(params, recipe)
    config = config_of_base(inputs)
    take_token_ids(config)
    plan = resolve_plan(params, recipe, train_samples=params.recipe(recipe).effective_batch)
    micro_batch = changes.pop("micro_batch", plan.schedule.micro_batch)
    schedule = {"micro_batch": micro_batch, "grad_accumulation": ACCUMULATION, "num_steps": 1, "warmup_steps": 0}
    samples = micro_batch * ACCUMULATION
    plan = replace(
        plan,
        base_dir=str(inputs.config_dir),
        device=DeviceParams(kind="cuda" if device == "cuda" else "cpu"),
        placement="single",
        dataloader_workers=0,
        loss="all-tokens",
        domains=(),
        schedule=replace(plan.schedule, **schedule, effective_batch=samples, train_samples=samples),
    )
    last = ("fused_kernels", "padding_free", "features_bytes")  # what the predictor chooses otherwise
    chosen = {name: changes.pop(name) for name in last if name in changes}
    plan = replace(plan, **changes)
    pixels = plan.images.max_pixels if plan.images else None
    batch_of = partial(stand_in_batch, config, max_length=plan.max_length, max_pixels=pixels)
    predictor = MemoryPredictor(config=config, processor=stand_in_processor(config, None), batch_of=batch_of)
    plan, _ = predictor.completed(plan, params.active.memory)
    return replace(plan, **chosen), predictor


def take_token_ids(config: PreTrainedConfig) -> None:
    """Number special tokens as the stand-in's tokenizer does: else a model looks for images among its text."""
    added = json.loads((STAND_IN_DIR / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    text = config.get_text_config()
    text.eos_token_id, text.bos_token_id, text.pad_token_id = ids["<|im_end|>"], *[ids["<|endoftext|>"]] * 2
    for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start")):
        if hasattr(config, f"{name}_token_id"):
            setattr(config, f"{name}_token_id", ids[f"<|{token}|>"])
    if hasattr(config, "vision_end_token_id"):
        config.vision_end_token_id = ids["<|vision_end|>"]


def random_model(plan: Plan, config: PreTrainedConfig) -> PreTrainedModel:
    """The plan's base with random weights, on its device, without a file."""
    with torch.device(plan.device.kind):
        attn = resolve_attention(plan.attn, plan.device, plan.precision, padding_free=plan.padding_free)
        model = new_model(config, precision=plan.precision, attn=attn)
    if plan.is_quantized:
        model = quantize_nf4(model, plan.precision, fill=partial(_fill_randomly, device=model.device))
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


def training_batch(plan: Plan, predictor: MemoryPredictor) -> dict[str, torch.Tensor]:
    """A micro-batch without contents, as the plan's training takes it."""
    batch: Any = predictor.batch_of(micro_batch=plan.schedule.micro_batch)
    batch = from_features(batch, predictor.config, plan.precision) if plan.features_bytes else batch
    return packed(batch, predictor.config, plan.loss) if plan.padding_free else batch


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
    adapted = apply_recipe(model, plan.parts, plan.lora, plan.full_targets)
    samples = plan.schedule.effective_batch * num_steps
    plan = replace(plan, schedule=replace(plan.schedule, num_steps=num_steps, train_samples=samples))
    with fused_kernels(adapted, used=plan.fused_kernels):
        yield one_batch_trainer(plan, adapted, stand_in_processor(config, None), batch)


# --- Trainings


def predict_training(device: str, *, setting: Setting, facts: dict[str, Any]) -> dict[str, Any]:
    """The plan stage's prediction, of as many layers as fit the device. Raises UserError if not even the fewest do."""
    plan, whole = planned(setting, device)
    text, vision = depth_of(whole.config)
    for depth in [(max(1, round(text * share)), vision) for share in SHARES]:
        found = replace(whole, config=with_depth(whole.config, depth), made={})(plan)
        if device == "cpu" or found.verdict(facts["memory_bytes"]) == "fits":
            amounts = {name: getattr(found, name) for name in ("allocated_bytes", "reserved_bytes", "flops")}
            return {"layers": depth, **amounts}
    raise UserError(f"does not fit with {SHARES[-1]:.1%} of its layers")


def measure_training(device: str, *, setting: Setting, prediction: dict[str, Any]) -> dict[str, Any]:
    """Memory and time of a step of the layers that were predicted, and the time by kind of kernel.

    It takes the whole process: seeds and settings of torch and TRL stay changed. Raises UserError if too few steps had
    finite gradients, and as random_trainer does.
    """
    plan, predictor = planned(setting, device)
    predictor = replace(predictor, config=with_depth(predictor.config, tuple(prediction["layers"])))
    check_device(plan.device, plan.precision)
    seed_everything(plan.seed)
    batch = with_contents(training_batch(plan, predictor))
    if plan.on_gpu:  # a recipe's data loader has workers for that
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    with random_trainer(plan, predictor.config, batch, num_steps=MAX_STEPS) as trainer:
        meter = StepMeter(trainer, batch, on_gpu=plan.on_gpu)
        trainer.add_callback(meter)
        trainer.train()
    if not meter.launches:
        raise UserError(f"the optimizer made too few steps in {MAX_STEPS}: no gradient was finite")
    step_s, busy_s = median(meter.seconds), sum(meter.spent.values())
    tflops = ACCUMULATION * prediction["flops"] / step_s / 1e12
    card = card_of(torch.cuda.get_device_name()) if plan.on_gpu else None
    return {
        **meter.memory,
        "samples": plan.samples_per_step,
        "step_s": round(step_s, 4),
        "tokens_per_s": round(ACCUMULATION * batch["input_ids"].numel() / step_s, 1),
        "tflops_per_s": round(tflops, 3),
        "share_of_peak": round(tflops / card.tflops, 4) if card else None,
        # Relative to an unprofiled step: profiling makes launches slower.
        "idle_share": round(max(0.0, 1 - busy_s / step_s), 4) if plan.on_gpu else None,
        "launches": meter.launches,
        **{kind: round(meter.spent.get(kind, 0.0) / busy_s, 4) for kind, _ in KINDS},
    }


class StepMeter(TrainerCallback):
    """Measures, once the optimizer has its state: memory of the next step; the time of TIMED_STEPS more, end to end;
    kernels of one more. The step after the first may still compile or choose kernels."""

    def __init__(self, trainer: RecipeTrainer, batch: Mapping[str, torch.Tensor], *, on_gpu: bool) -> None:
        self._trainer, self._batch, self._on_gpu = trainer, batch, on_gpu
        self._ends: list[float] = []
        self._measuring = ExitStack()
        self.memory: dict[str, int] = {}
        """Bytes allocated and reserved, as torch counts them, and in total, with all else in use on the device; the
        same on a CPU."""
        self.spent: dict[str, float] = {}
        """Seconds of one step by kind of kernel."""
        self.launches = 0
        """Kernels of one step; on a CPU, operators."""

    @property
    def seconds(self) -> list[float]:
        return [end - begin for begin, end in pairwise(self._ends[2 : 3 + TIMED_STEPS])]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._trainer.optimizer.state:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        num_steps = len(self._ends) - 1
        if num_steps == 0:
            self._begin_memory()
        elif num_steps == 1:
            self.memory = self._end_memory()
        elif num_steps == 2 + TIMED_STEPS:
            activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
            self._profile = self._measuring.enter_context(profile(activities=[activity]))
        elif num_steps == 3 + TIMED_STEPS:
            self._measuring.close()
            for name, seconds in _kernels(self._profile, on_gpu=self._on_gpu):
                self.spent[kind_of(name)] = self.spent.get(kind_of(name), 0.0) + seconds
                self.launches += not re.match(r"mem(cpy|set)", name.lower())
            control.should_training_stop = True

    def _begin_memory(self) -> None:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            existing = (*self._batch.values(), *lasting_tensors(self._trainer))
            self._cpu_peak = self._measuring.enter_context(cpu_peak(existing))

    def _end_memory(self) -> dict[str, int]:
        if not self._on_gpu:
            self._measuring.close()
            size = self._cpu_peak.size_bytes
            return {"allocated_bytes": size, "reserved_bytes": size, "total_bytes": size}
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        reserved_bytes = torch.cuda.max_memory_reserved()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": reserved_bytes,
            "total_bytes": reserved_bytes + total_bytes - free_bytes - torch.cuda.memory_reserved(),
        }


def _kernels(profiled: profile, *, on_gpu: bool) -> list[tuple[str, float]]:
    """Name and seconds of each kernel and copy on a GPU; of each operator on a CPU, without those that it calls."""
    if not on_gpu:
        return [(event.name, event.self_cpu_time_total / 1e6) for event in profiled.events()]
    return [
        (event.name, (event.time_range.end - event.time_range.start) / 1e6)
        for event in profiled.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]


# --- Generation


def measure_generation(device: str, *, setting: Setting, batch_size: int, new_tokens: int) -> dict[str, Any]:
    """Time of a batch of completions, all of full length, as evaluation makes them; memory against its prediction."""
    plan, predictor = planned({**setting, "quantization": "none"}, device)
    plan, config, size = replace(plan, padding_free=False), predictor.config, prefill_batch_size(batch_size)
    batch = with_contents(predictor.batch_of(micro_batch=size))
    del batch["labels"]
    attn = resolve_attention("auto", plan.device, plan.precision)
    inference = Inference(device=plan.device, precision=plan.precision, attn=attn)
    limits = {"batch_size": batch_size, "max_new_tokens": new_tokens}
    predicted = predict_generation(inference, config, batch, load_calibration(), **limits)
    model = random_model(replace(plan, attn="auto"), config).eval()

    @torch.inference_mode()
    def seconds(length: int) -> float:
        batches = ((list(range(first, first + size)), dict(batch)) for first in range(0, batch_size, size))
        began = time.perf_counter()
        for _ in answered_tokens(model, batches, lambda _: False, batch_size=batch_size, max_new_tokens=length):
            pass
        if plan.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    if plan.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    first_s, all_s = seconds(1), seconds(new_tokens)
    if plan.on_gpu:
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        with cpu_peak([*model.parameters(), *model.buffers(), *batch.values()]) as peak:
            seconds(new_tokens)
        peak_bytes = peak.size_bytes
    return {
        "attn": attn,
        "prompt": plan.max_length,
        "new_tokens": new_tokens,
        "samples_per_s": round(batch_size / all_s, 3),
        "first_token_s": round(first_s, 4),
        "further_token_s": round((all_s - first_s) / max(1, new_tokens - 1), 5),
        "peak_bytes": peak_bytes,
        "error": predicted.allocated_bytes / peak_bytes - 1,
    }


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": facts,
    "predictions": predict_training,
    "trainings": measure_training,
    "generation": measure_generation,
    "recipes": run_recipe,
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
