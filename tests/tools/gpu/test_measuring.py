"""The pieces, as far as a CPU can run them."""

import os
import subprocess
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerControl

from stages.core.errors import UserError
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from stages.kit.models import kernels
from stages.kit.training.batches import FEATURES
from stages.kit.training.resume import seed_everything
from tests import ROOT
from tools.gpu import facts, flops, recipes
from tools.gpu.device import Kind
from tools.gpu.flops import model_flops, peak_tflops
from tools.gpu.kernels import kind_of
from tools.gpu.models import ACCUMULATION, batch_of, config_of, plan_of, random_trainer, with_contents
from tools.gpu.pieces import ANSWERS, SETTINGS, Setting
from tools.gpu.training import StepMeter, measure_answers


@pytest.mark.parametrize(
    ("geometry", "recipe", "features", "padding_free"),
    [
        *(("qwen2-vl-tiny", recipe, False, False) for recipe in ("r1", "r2", "r4")),
        *(("qwen2.5-tiny", "lora", False, False), ("qwen1.5-moe-tiny", "full", False, False)),
        *(("qwen2-vl-tiny", "r1", True, True), ("qwen2.5-tiny", "lora", False, True)),
    ],
)
def test_a_steps_arithmetic_is_what_torch_counts(
    geometry: str, recipe: Any, features: bool, padding_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: Any = {"micro_batch": 2, "max_length": 256, "max_pixels": 224 * 224}
    setting = Setting(geometry, recipe, precision="fp32", checkpointing=False, features=features, **small)
    plan, config = replace(plan_of(setting, "cpu"), padding_free=padding_free), config_of(geometry)
    seed_everything(plan.seed)
    batch = with_contents(batch_of(plan, config, max_pixels=setting.max_pixels))
    assert (FEATURES in batch, "attention_mask" in batch) == (features, not padding_free)
    batch["labels"][:] = 1  # on a CPU TRL's head takes all tokens
    counter = FlopCounterMode(display=False)
    with random_trainer(plan, config, batch, num_steps=1) as trainer, counter:
        trainer.train()
    # It counts neither attention on a CPU nor the head's forward pass, which writes into a buffer.
    monkeypatch.setattr(flops, "_attention_flops", lambda *_: 0.0)
    text = config.get_text_config()
    head = 2 * text.vocab_size * text.hidden_size * batch["labels"][:, 1:].numel()
    expected = ACCUMULATION * (model_flops(plan, config, batch) - head)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_a_gpus_step_is_that_of_its_profiles() -> None:
    """Without padding and by Liger's kernels where planning chooses them, and from features where they are kept."""
    small: Any = {"micro_batch": 2, "max_length": 256, "max_pixels": 112 * 112}

    def chosen(device: Any, **settings: Any) -> tuple[bool, bool]:
        plan = plan_of(Setting("qwen2-vl-tiny", "r1", **small, **settings), device)
        return plan.padding_free, plan.fused_kernels

    assert chosen("cuda") == (True, True)
    assert chosen("cpu") == (False, False)
    assert [chosen("cuda", precision=precision) for precision in ("fp16", "fp32")] == [(False, True)] * 2
    assert chosen("cuda", padding_free=False, fused_kernels=False) == (False, False)
    plan, config = plan_of(Setting("qwen2-vl-tiny", "r1", **small, features=True), "cuda"), config_of("qwen2-vl-tiny")
    batch = batch_of(plan, config, max_pixels=small["max_pixels"])
    assert batch["input_ids"].shape == (1, 512)
    assert batch[FEATURES].dtype == torch.bfloat16
    assert any(setting.features for setting in SETTINGS["cuda"])


def test_attention_without_padding_is_compared_with_that_of_one_sample_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert facts.attends_by_sample("cpu").startswith("forward and backward sample by sample, ")
    monkeypatch.setattr(kernels, "takes_variable_lengths", lambda query: query.dtype == torch.bfloat16)
    monkeypatch.setattr(kernels, "varlen_attn", lambda query, key, value, *_, **__: query + (key + value).mean())
    assert facts.tried(partial(facts.attends_by_sample, "cpu")).startswith("does not work: AssertionError")


def test_triton_is_tried_by_the_kernels_of_trainings_from_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    monkeypatch.setattr(facts, "find_spec", lambda _: object())

    def refuse(device: str) -> None:
        assert not list(Path(os.environ["TRITON_CACHE_DIR"]).iterdir())
        raise UserError(f"off on {device}")

    monkeypatch.setattr(facts, "refuse_wrong_kernels", refuse)
    assert facts.tried(partial(facts.compiles_triton, "cuda")) == "does not work: UserError: off on cuda"
    monkeypatch.setattr(facts, "refuse_wrong_kernels", lambda _: None)
    assert facts.compiles_triton("cuda").startswith("compiles Liger's kernels, which compute what torch does")


def test_attention_costs_the_square_of_its_length() -> None:
    config = config_of("qwen2-vl-tiny")
    text, vision = config.get_text_config(), config.vision_config
    pictures = vision.depth * 4 * (112 // vision.patch_size) ** 4 * vision.embed_dim
    for length in (128, 256):
        setting = Setting("qwen2-vl-tiny", "r1", max_pixels=112 * 112, max_length=length, micro_batch=2)
        devices: tuple[Kind, ...] = ("cpu", "cuda")
        for device, features in product(devices, (False, True)):
            plan = plan_of(replace(setting, features=features), device)
            batch = batch_of(plan, config, max_pixels=setting.max_pixels)
            found = flops._attention_flops(config, batch, {"vision": 1, "projector": 1, "llm": 2})
            assert found == 2 * 3 * text.num_hidden_layers * 2 * length**2 * text.hidden_size + (
                0 if features else 2 * pictures
            )


def test_a_devices_peak_is_known_or_it_is_not() -> None:
    peaks = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.5, "NVIDIA L4": 121, "NVIDIA L40S": 362.05}
    for name, peak in {**peaks, "NVIDIA A10G": None, "NVIDIA GeForce RTX 9999": None}.items():
        found = peak_tflops(name)
        assert (found and found[0]) == peak


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x24_64x11_2x1_v_bz_TNT", "matmul"),
        ("aten::addmm", "matmul"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, ...)", "dequantization"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_forward_kernel", "loss (Triton)"),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
        ("void at::native::elementwise_kernel<..., at::native::direct_copy_kernel_cuda(...)>", "copies"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "elementwise"),
        ("aten::silu", "elementwise"),
        ("ncclDevKernel_AllReduce", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_gpus_peak_is_that_of_the_step_that_finds_the_optimizers_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's functions as they behave; `peak` is what the allocator saw since the last reset."""
    peak = {"allocated": 0, "reserved": 0}
    for name, function in {
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: peak.update(allocated=10, reserved=100),
        "max_memory_allocated": lambda: peak["allocated"],
        "max_memory_reserved": lambda: peak["reserved"],
        "memory_reserved": lambda: 120,
        "mem_get_info": lambda: (1000 - 170, 1000),
        "memory_stats": lambda: {"num_alloc_retries": 3},
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    trainer: Any = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    meter = StepMeter(trainer, {}, "cuda")
    for allocated, state in ((900, {}), (800, {"weight": 1}), (70, {"weight": 1}), (600, {"weight": 1})):
        peak.update(allocated=allocated, reserved=2 * allocated)
        trainer.optimizer.state = state
        meter.on_step_end(None, None, TrainerControl())
    total = 140 + (170 - 120)
    assert meter.memory == {"allocated_bytes": 70, "reserved_bytes": 140, "total_bytes": total, "retries": 3}


@pytest.mark.parametrize("task", ANSWERS["cpu"], ids=lambda task: task["geometry"])
def test_answers_are_those_of_evaluation_and_take_the_memory_that_is_predicted(task: dict[str, Any]) -> None:
    found = measure_answers("cpu", **{**task, "batch_size": 16}, facts={"workspaces_bytes": 0}, precision="fp32")
    assert abs(found["error"]) < 0.01
    assert found["samples_per_s"] > 0


STAGES = declared_stages(ROOT)


def test_a_recipe_goes_all_the_way_with_all_that_it_starts_from() -> None:
    names = [stage.name for stage in recipes.needed(STAGES, "evaluate@moe-finetune")]
    assert names[-1] == "evaluate@moe-finetune"
    before = {"build@moe": "merge@moe-expert-qmsum", "plan@moe-gate-labels": "build@moe"}
    before |= {"train@moe-finetune": "merge@moe-gate", "prepare@finetune-mix": "prepare@qmsum"}
    for later, earlier in before.items():
        assert names.index(earlier) < names.index(later)
    assert "evaluate@moe-gate" not in names


def in_this_process(stage: DeclaredStage, folder: Path, **ignored: Any) -> "subprocess.CompletedProcess[str]":
    _, name, *arguments = stage.command.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = CliRunner().invoke(import_module(f"stages.{name}").main, arguments)
    return subprocess.CompletedProcess(arguments, ended.exit_code, ended.output)


@pytest.mark.pipeline
def test_figures_of_a_recipe_are_read_from_what_its_stages_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_ended", in_this_process)
    memory = {"optimizer": "adamw_torch"}
    found = recipes.run_all_stages("cpu", recipe="r2-vision-only", memory=memory, launched=False, repeated=False)
    assert found["answers"] == 4
    assert abs(found["error"]) < 0.01
    assert found["all_s"] > found["train_s"] > 0


@pytest.mark.parametrize(
    ("digests", "twice", "resumed"), [("aaa", True, True), ("aab", True, False), ("aba", False, True)]
)
def test_bytes_are_compared_after_a_second_training_and_after_a_kill(
    digests: str, twice: bool, resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(train: DeclaredStage, folder: Path, *, before: str) -> "subprocess.CompletedProcess[str]":
        if "MemoryError" in before:
            return subprocess.CompletedProcess([], 79)
        assert "os._exit(9)" in before
        (folder / ".bakeoff/checkpoints/r1-llm-only/1/step-1").mkdir(parents=True)
        return subprocess.CompletedProcess([], 9)

    pending = iter(digests)
    monkeypatch.setattr(recipes, "_ended", ended)
    monkeypatch.setattr(recipes, "_trained", lambda *_: next(pending))
    found = recipes.repeat(STAGES[0], tmp_path, "cpu")
    assert found == {"twice": twice, "resumed": resumed, "recognised": True}


def test_a_digest_covers_weights_and_trace_and_the_next_training_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = next(stage for stage in STAGES if stage.name == "train@r1-llm-only")
    monkeypatch.setattr(recipes, "run", lambda *_: 0.0)
    weights, trace = (
        tmp_path / "data/runs/r1-llm-only" / name for name in ("trained/a.safetensors", "training/trace.csv")
    )
    for path in (weights, trace, tmp_path / ".bakeoff/checkpoints/step-1"):
        path.parent.mkdir(parents=True)
        path.touch()
    digests = [recipes._trained(train, tmp_path)]
    assert not (tmp_path / ".bakeoff").exists()
    for path in (weights, trace):
        (tmp_path / ".bakeoff").mkdir()
        path.write_text("other")
        digests.append(recipes._trained(train, tmp_path))
    assert len(set(digests)) == 3


def test_a_stage_that_fails_says_so_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = subprocess.CompletedProcess([], 1, "17:00:00 train r1\nError: no bf16; take fp16\n")
    monkeypatch.setattr(recipes, "_ended", lambda *_, **__: output)
    with pytest.raises(UserError, match=r"^train@r1-llm-only: no bf16; take fp16$"):
        recipes.run(next(stage for stage in STAGES if stage.name == "train@r1-llm-only"), tmp_path)
