"""The pieces, as far as a CPU can run them."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerControl

from stages.core.errors import UserError
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from stages.kit.training.seed import seed_everything
from tests import ROOT
from tools.gpu import flops, recipes
from tools.gpu.flops import model_flops, peak_tflops
from tools.gpu.models import (
    ACCUMULATION,
    batch_of,
    config_of,
    plan_of,
    random_model,
    random_trainer,
    with_contents,
)
from tools.gpu.pieces import SPEED, Setting
from tools.gpu.training import StepMeter, kind_of, measure_speed


@pytest.mark.parametrize(
    ("geometry", "recipe"),
    [
        *(("qwen2-vl-tiny", recipe) for recipe in ("r1", "r2", "r4")),
        *(("qwen2.5-tiny", recipe) for recipe in ("lora", "full")),
        ("qwen1.5-moe-tiny", "full"),
    ],
)
def test_a_steps_arithmetic_is_what_torch_counts(geometry: str, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(
        geometry, recipe, precision="fp32", checkpointing=False, micro_batch=2, max_length=256, max_pixels=224 * 224
    )
    plan, config = plan_of(setting, "cpu"), config_of(geometry)
    seed_everything(plan.seed)
    batch = with_contents(batch_of(setting, config))
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


def test_attention_costs_the_square_of_its_length() -> None:
    config = config_of("qwen2-vl-tiny")
    text, vision = config.get_text_config(), config.vision_config
    pictures = vision.depth * 4 * (112 // vision.patch_size) ** 4 * vision.embed_dim
    for length in (128, 256):
        batch = batch_of(Setting("qwen2-vl-tiny", "r1", max_pixels=112 * 112, max_length=length), config)
        found = flops._attention_flops(config, batch, {"vision": 1, "projector": 1, "llm": 2})
        assert found == 3 * text.num_hidden_layers * 2 * length**2 * text.hidden_size + pictures


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 9999", None),
    ],
)
def test_a_devices_peak_is_known_or_it_is_not(name: str, peak: float | None) -> None:
    found = peak_tflops(name)
    assert (found and found[0]) == peak


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "matmul": [
            *("nvjet_tst_128x24_64x11_2x1_v_bz_TNT", "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn"),
            *("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "aten::addmm", "aten::mm"),
        ],
        "attention": [
            *("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "fmha_cutlassF_bf16"),
            "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
        ],
        "dequantization": ["void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, ...)"],
        "optimizer": [
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "void kOptimizerStatic8bit2StateBlockwise<float, 1, 256, 1>",
        ],
        "loss (Triton)": ["_forward_kernel", "_backward_kernel"],
        "copies": [
            *("Memcpy HtoD (Pageable -> Device)", "Memset (Device)"),
            "void at::native::elementwise_kernel<..., at::native::direct_copy_kernel_cuda(...)>",
        ],
        "elementwise": [
            "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>",
            *("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "aten::silu"),
        ],
        "other": ["ncclDevKernel_AllReduce"],
    }.items(),
)
def test_kernels_are_told_apart_by_their_names(kind: str, names: list[str]) -> None:
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """torch.cuda's functions of memory as they behave; what the allocator saw since the last reset is the test's."""
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
    return peak


def test_a_gpus_peak_is_that_of_the_step_that_finds_the_optimizers_state(fake_cuda: dict[str, int]) -> None:
    trainer: Any = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    meter, control = StepMeter(trainer, {}, "cuda", timed_steps=0), TrainerControl()
    for allocated, state in ((900, {}), (800, {"weight": 1}), (70, {"weight": 1})):
        fake_cuda.update(allocated=allocated, reserved=2 * allocated)
        trainer.optimizer.state = state
        assert not meter.memory
        meter.on_step_end(None, None, control)
    assert meter.memory == {"allocated": 70, "reserved": 140, "total": 140 + (170 - 120), "retries": 3}
    assert control.should_training_stop


def test_a_batch_can_be_computed_with() -> None:
    text = with_contents({"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    assert len(text["input_ids"].unique()) == 16
    with_picture = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "pixel_values": torch.full((4, 3), torch.nan)}
    filled = with_contents(with_picture)
    assert filled["pixel_values"].isfinite().all()
    assert filled["input_ids"].equal(with_picture["input_ids"])  # it says where the picture is


def test_weights_in_4_bits_are_real_ones() -> None:
    """bitsandbytes quantizes on a CPU too."""
    config = config_of("qwen2.5-tiny")
    model = random_model(plan_of(Setting("qwen2.5-tiny", "lora", quantization="nf4"), "cpu"), config)
    packed = [weight for weight in model.parameters() if weight.dtype == torch.uint8]
    assert len(packed) == 7 * config.num_hidden_layers
    for weight in packed:
        unpacked = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert unpacked.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert model(torch.arange(8).view(1, 8)).logits.isfinite().all()


def test_a_steps_time_is_split() -> None:
    setting = next(each for each in SPEED["cpu"] if each.geometry == "qwen2.5-tiny")
    found = measure_speed("cpu", setting=asdict(setting))
    assert found["tokens_per_s"] == pytest.approx(8 * 96 / found["step_s"], rel=0.01)
    assert found["tflops_per_s"] > 0
    assert found["share_of_peak"] is None  # nobody says what this CPU could do
    assert found["launches"] > 1000
    assert sum(found["spent"].values()) == pytest.approx(1, abs=0.01)
    assert all(found["spent"][kind] for kind in ("matmul", "attention", "elementwise", "copies", "optimizer"))


STAGES = declared_stages(ROOT)


def test_a_recipe_goes_all_the_way_with_all_that_it_starts_from() -> None:
    names = [stage.name for stage in recipes.needed(STAGES, "evaluate@moe-finetune")]
    assert names[-1] == "evaluate@moe-finetune"
    before = {"build@moe": "merge@moe-expert-qmsum", "plan@moe-gate-labels": "build@moe"}
    before |= {"train@moe-finetune": "merge@moe-gate", "mix@finetune-mix": "prepare@qmsum"}
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
def test_what_a_recipe_came_to_is_read_from_what_its_stages_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_ended", in_this_process)
    params = {"profiles.tiny.memory.optimizer": "adamw_torch"}
    found = recipes.run_all_stages("cpu", recipe="r2-vision-only", params=params, launched=False)
    assert found["answers"] == 4
    assert abs(found["error"]) < 0.01
    assert found["all_s"] > found["train_s"] > 0


@pytest.mark.parametrize(
    ("weights", "twice", "resumed"),
    [
        (lambda resumes, attempt: b"same", True, True),
        (lambda resumes, attempt: b"later" if resumes else b"same", True, False),
        (lambda resumes, attempt: bytes([attempt]), False, False),
    ],
)
def test_bytes_are_compared_after_a_second_training_and_after_a_kill(
    weights: Callable[[bool, int], bytes], twice: bool, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def pretended(stage: DeclaredStage, folder: Path, *, before: str = "", **_: Any) -> Any:
        if not stage.name.startswith("train@"):
            return subprocess.CompletedProcess([], 0, "")
        checkpoint = folder / ".bakeoff/checkpoints/r1-llm-only/1/step-1"
        goes_on = checkpoint.exists()
        checkpoint.mkdir(parents=True, exist_ok=True)
        if before:
            assert not goes_on
            return subprocess.CompletedProcess([], 9, "")
        attempts.append(stage.name)
        run_dir = folder / "data/runs/r1-llm-only"
        shutil.rmtree(run_dir, ignore_errors=True)
        (run_dir / "trained").mkdir(parents=True)
        (run_dir / "training").mkdir()
        (run_dir / "trained/adapter.safetensors").write_bytes(weights(goes_on, len(attempts)))
        (run_dir / "training/trace.csv").write_text("step")
        return subprocess.CompletedProcess([], 0, "")

    monkeypatch.setattr(recipes, "_ended", pretended)
    assert recipes.repeat("cpu", recipe="r1-llm-only", params={}, exhausted=False) == {
        "twice": twice,
        "resumed": resumed,
    }


def test_a_stage_that_fails_says_so_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.CompletedProcess([], 1, "17:00:00 train r1\nError: no bf16; take fp16\n")
    monkeypatch.setattr(recipes, "_ended", lambda *_, **__: said)
    with pytest.raises(UserError, match=r"^train@r1-llm-only: no bf16; take fp16$"):
        recipes.run(next(stage for stage in STAGES if stage.name == "train@r1-llm-only"), tmp_path)
