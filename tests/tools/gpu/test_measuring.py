"""The pieces, as far as a CPU can run them."""

import shutil
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from stages.core.errors import UserError
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from stages.kit.training.seed import seed_everything
from tests import ROOT
from tools.calibrate.measured import random_trainer, with_contents
from tools.calibrate.settings import ACCUMULATION, Setting
from tools.gpu import flops, recipes
from tools.gpu.flops import model_flops, peak_tflops
from tools.gpu.pieces import TIMED
from tools.gpu.speed import kind_of, train


@pytest.mark.parametrize(
    ("geometry", "recipe"),
    [
        *(("qwen2-vl-tiny", recipe) for recipe in ("r1", "r2", "r4")),
        *(("qwen2.5-tiny", recipe) for recipe in ("lora", "full")),
        ("qwen1.5-moe-tiny", "full"),
    ],
)
def test_a_steps_arithmetic_is_what_torch_counts(geometry: str, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small: Any = {"micro_batch": 2, "max_length": 256, "max_pixels": 224 * 224}
    setting = Setting(geometry=geometry, recipe=recipe, precision="fp32", checkpointing=False, **small)
    plan, config = setting.plan("cpu"), setting.config()
    seed_everything(plan.seed)
    batch = with_contents(setting.batch(config))
    batch["labels"][:] = 1  # on a CPU TRL's head takes all tokens
    counter = FlopCounterMode(display=False)
    with random_trainer(plan, config, setting.processor(), batch, num_steps=1) as trainer, counter:
        trainer.train()
    # It counts neither attention on a CPU nor the head's forward pass, which writes into a buffer.
    monkeypatch.setattr(flops, "_attention_flops", lambda *_: 0.0)
    text = config.get_text_config()
    head = 2 * text.vocab_size * text.hidden_size * batch["labels"][:, 1:].numel()
    expected = ACCUMULATION * (model_flops(plan, config, batch) - head)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_attention_costs_the_square_of_its_length() -> None:
    def attention(length: int) -> float:
        setting = Setting(geometry="qwen2-vl-tiny", recipe="r1", max_pixels=112 * 112, max_length=length)
        config = setting.config()
        return flops._attention_flops(config, setting.batch(config), {"vision": 1, "projector": 1, "llm": 2})

    config = Setting(geometry="qwen2-vl-tiny", recipe="r1").config()
    layers, width = config.get_text_config().num_hidden_layers, config.get_text_config().hidden_size
    vision = config.vision_config
    patches = (112 // vision.patch_size) ** 2
    pictures = vision.depth * 4 * patches**2 * vision.embed_dim
    assert attention(128) == 3 * layers * 2 * 128**2 * width + pictures
    assert attention(256) == 3 * layers * 2 * 256**2 * width + pictures


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
    [
        (
            "matmul",
            ("nvjet_tst_128x24_64x11_2x1_v_bz_TNT", "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn"),
        ),
        ("matmul", ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "aten::addmm", "aten::mm")),
        ("attention", ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "fmha_cutlassF_bf16")),
        ("attention", ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>",)),
        ("attention", ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",)),
        ("dequantization", ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, ...)",)),
        ("optimizer", ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",)),
        ("optimizer", ("void kOptimizerStatic8bit2StateBlockwise<float, 1, 256, 1>",)),
        ("loss (Triton)", ("_forward_kernel", "_backward_kernel")),
        ("copies", ("Memcpy HtoD (Pageable -> Device)", "Memset (Device)")),
        ("copies", ("void at::native::elementwise_kernel<..., at::native::direct_copy_kernel_cuda(...)>",)),
        ("elementwise", ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>",)),
        ("elementwise", ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "aten::silu")),
        ("other", ("ncclDevKernel_AllReduce",)),
    ],
)
def test_kernels_are_told_apart_by_their_names(kind: str, names: tuple[str, ...]) -> None:
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)


def test_a_steps_time_is_split() -> None:
    setting = next(each for each in TIMED["cpu"] if each["geometry"] == "qwen2.5-tiny")
    found = train("cpu", **setting)
    assert found["tokens_per_s"] == pytest.approx(8 * 96 / found["step_s"], rel=0.01)
    assert found["tflops_per_s"] > 0
    assert found["share_of_peak"] is None  # nobody says what this CPU could do
    assert found["launches"] > 1000
    assert {"matmul", "attention", "elementwise", "copies", "optimizer"} <= found["spent_s"].keys()
    assert all(found["spent_s"].values())


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
    settings = {"profiles.tiny.memory.optimizer": "adamw_torch"}
    found = recipes.go_all_the_way("cpu", "r2-vision-only", settings, launched=False)
    (training,) = found["trainings"]
    assert training["recipe"] == "r2-vision-only"
    assert training["predicted_bytes"] == pytest.approx(training["peak_bytes"], rel=0.01)
    assert found["answered"] == 4
    assert set(found["seconds"]) == {"check", "base", "prepare", "plan", "train", "merge", "evaluate"}


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
    assert recipes.repeat("cpu", "r1-llm-only", {}) == {"twice": twice, "resumed": resumed}


def test_a_training_that_was_not_killed_says_nothing_of_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_trained", lambda *_: "digest")
    monkeypatch.setattr(recipes, "_forget", lambda _: None)
    monkeypatch.setattr(recipes, "_ended", lambda *_, **__: subprocess.CompletedProcess([], 0, ""))
    with pytest.raises(UserError, match="was to be killed after its first checkpoint, and ended with 0"):
        recipes.repeat("cpu", "r1-llm-only", {})


def test_a_stage_that_fails_says_so_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.CompletedProcess([], 1, "17:00:00 train r1\nError: no bf16; take fp16\n")
    monkeypatch.setattr(recipes, "_ended", lambda *_, **__: said)
    with pytest.raises(UserError, match=r"^train@r1-llm-only: no bf16; take fp16$"):
        recipes.run(next(stage for stage in STAGES if stage.name == "train@r1-llm-only"), tmp_path)
