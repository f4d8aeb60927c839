"""A prediction is that of the whole model, adds up, and says what each placement does to it."""

from __future__ import annotations

from typing import Any

import pytest

from stages.core.params.schema import DeviceParams
from stages.memory import predict as predictor
from stages.memory.calibration import load_calibration
from stages.memory.predict import Depth, depth_of, sample_depths
from stages.memory.preview import emulation_words
from stages.models.load import meta_model
from tests.memory.small import (
    CUDA,
    FULL,
    R1,
    R2,
    R4,
    batch_of,
    config_of,
    plan_of,
    predicted,
    processor_of,
)
from tests.plans import changed

MIB, GIB = 2**20, 2**30
CALIBRATION = load_calibration()
FOUR_GPUS: dict[str, Any] = {
    **CUDA,
    "device": DeviceParams(kind="cuda", count=4),
    "placement": "sharded",
    "gradient_checkpointing": True,
}


@pytest.mark.parametrize(
    ("model", "settings"),
    [("detection", {**R4, **CUDA}), ("text", {**FULL, **FOUR_GPUS}), ("moe", {**FULL, "precision": "bf16"})],
    ids=["r4 on cuda", "text, sharded", "moe"],
)
def test_a_few_layers_say_what_all_of_them_take(
    model: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(**settings, grad_accumulation=1)
    scaled_up = predicted(model, plan, depth=(4, 4))
    monkeypatch.setattr(predictor, "sample_depths", lambda config: [depth_of(config)])
    config = config_of(model, (4, 4))
    exact = predictor.predict(plan, config, processor_of(model), batch_of(plan, config))
    assert scaled_up.allocated_bytes == pytest.approx(exact.allocated_bytes, rel=0.005)
    assert scaled_up.phases == pytest.approx(exact.phases, rel=0.001)
    assert (scaled_up.peak_phase, scaled_up.budget.keys()) == (exact.peak_phase, exact.budget.keys())
    assert scaled_up.flops == pytest.approx(exact.flops, rel=1e-6)
    # Gaps are no matter of layers, and the larger, the smaller a model is.
    assert scaled_up.total_bytes == pytest.approx(exact.total_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("model", "depth", "uneven", "expected"),
    [
        ("text", (28, 0), {}, [(2, 0), (3, 0)]),
        ("text", (2, 0), {}, [(2, 0)]),
        ("text", (1, 0), {}, [(1, 0)]),
        ("detection", (28, 32), {}, [(2, 2), (3, 2), (2, 3)]),
        ("detection", (2, 32), {}, [(2, 32)]),
        ("detection", (28, 1), {}, [(28, 1)]),
        ("moe", (6, 0), {"layer_types": ["full_attention", "sliding_attention"] * 3}, [(6, 0)]),
        ("moe", (6, 0), {"mlp_only_layers": [1]}, [(6, 0)]),
    ],
)
def test_alike_layers_are_sampled_and_few_or_unlike_ones_are_all_recorded(
    model: str, depth: Depth, uneven: dict[str, Any], expected: list[Depth]
) -> None:
    config = config_of(model, depth)
    assert depth_of(config) == depth
    for name, value in uneven.items():
        setattr(config, name, value)
    assert sample_depths(config) == expected


@pytest.mark.parametrize("settings", [R1, FULL, {**FULL, **CUDA}, {**R1, **CUDA, "optimizer": "paged_adamw_8bit"}])
def test_the_budget_adds_up_to_the_total_and_nothing_in_it_is_negative(settings: dict[str, Any]) -> None:
    prediction = predicted("text", plan_of(**settings))
    assert sum(prediction.budget.values()) == prediction.total_bytes
    assert min(prediction.budget.values()) >= 0
    assert prediction.phases[prediction.peak_phase] == max(prediction.phases.values())


def test_the_budget_names_what_it_is_spent_on() -> None:
    """Full training in fp32 on a CPU, by hand: as many gradients as weights, and twice as much optimizer state."""
    trained = sum(parameter.numel() for parameter in meta_model(config_of("text")).parameters()) * 4
    budget = predicted("text", plan_of(**FULL)).budget
    assert budget["weights"] == pytest.approx(trained, rel=0.001)
    assert budget["gradients"] == trained
    assert budget["optimizer"] == pytest.approx(2 * trained, rel=0.001)
    assert "adapters" not in budget
    # TRL's loss takes a tile of 16384 logits a token, here in fp32 and several times over.
    assert budget["logits"] >= 2 * 95 * 16384 * 4
    lora = predicted("text", plan_of(**R1))
    assert lora.budget["adapters"] == lora.budget["gradients"] == 4 * 2 * 8 * (2 * 128 + 128 + 64)
    # Neither optimizer nor batch is there while weights load.
    assert lora.phases["load"] == lora.budget["weights"] + lora.budget["adapters"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_full_training_takes_six_operations_a_weight_and_token_and_eight_if_it_is_checkpointed(kind: str) -> None:
    """A product takes 2, and backward has two of them. TRL's loss multiplies by the head once more in backward, and
    checkpointing repeats all but a layer's last product."""
    settings = {**FULL, "precision": "bf16", "kind": kind, "attn": "eager", "max_length": 64}
    model = meta_model(config_of("text"))
    layers = sum(weight.numel() for name, weight in model.named_parameters() if "layers" in name and weight.ndim > 1)
    last = sum(layer.mlp.down_proj.weight.numel() for layer in model.get_decoder().layers)
    head, text, tokens = model.get_output_embeddings().weight.numel(), model.config, 2 * 64
    attention = 4 * 2 * 64**2 * text.hidden_size * text.num_hidden_layers  # both products of every head
    for checkpointed in (False, True):
        found = predicted("text", plan_of(**settings, gradient_checkpointing=checkpointed)).flops
        expected = 3 * (2 * layers * tokens + attention) + 4 * 2 * head * tokens
        expected += checkpointed * (2 * (layers - last) * tokens + attention)
        assert found == pytest.approx(expected, rel=0.01), checkpointed


def test_ddp_keeps_its_gradients_twice_and_has_buffers_of_its_own() -> None:
    plan = plan_of(**FULL, **CUDA)
    alone = predicted("text", plan)
    trainable = {"total": alone.budget["gradients"] // 4}
    plan = changed(plan, placement="ddp", device=DeviceParams(kind="cuda", count=2), trainable=trainable)
    shared = predicted("text", plan)
    assert shared.budget["gradients"] == pytest.approx(2 * alone.budget["gradients"])
    assert shared.total_bytes - alone.total_bytes == pytest.approx(
        CALIBRATION.nccl_buffers_mib.num_bytes + alone.budget["gradients"], rel=0.01
    )
    assert (alone.calibration, predicted("text", plan_of(**FULL)).calibration) == (
        CALIBRATION.label(several=False),
        "this CPU",
    )


def test_balanced_gpus_share_the_layers_and_the_interval_reaches_to_all_that_is_trained_on_one() -> None:
    alone = plan_of(**R2, **CUDA)
    spread = changed(alone, placement="balanced", device=DeviceParams(kind="cuda", count=2))
    one, each = predicted("detection", alone), predicted("detection", spread)
    assert each.budget["weights"] == one.budget["weights"] // 2
    assert each.budget["activations"] == pytest.approx(one.budget["activations"] / 2, abs=1)
    assert each.budget["temporaries"] == one.budget["temporaries"]
    # Vision tower and projector, which r2 trains, are on one of the two.
    assert each.high_bytes >= one.total_bytes - one.budget["weights"] // 2
    assert one.total_bytes > each.total_bytes > each.low_bytes


def test_a_gpu_holds_a_context_and_workspaces_too_and_a_cpu_nothing() -> None:
    on_cpu, on_gpu = predicted("text", plan_of(**FULL)), predicted("text", plan_of(**FULL, **CUDA))
    assert on_cpu.allocated_bytes == on_cpu.reserved_bytes == on_cpu.total_bytes
    assert on_gpu.total_bytes - on_gpu.reserved_bytes == CALIBRATION.context_mib.num_bytes
    assert on_gpu.allocated_bytes - max(on_gpu.phases.values()) >= 64 * MIB  # two workspaces of cuBLAS
    # The interval lies around the total as calibrated.
    assert on_gpu.low_bytes == round(on_gpu.total_bytes * (1 + CALIBRATION.reserved_error_low.value))
    assert on_gpu.high_bytes == round(on_gpu.total_bytes * (1 + CALIBRATION.reserved_error_high.value))
    assert on_cpu.high_bytes == round(on_cpu.total_bytes * (1 + predictor.CPU_ERRORS[1]))


@pytest.mark.parametrize(
    ("changes", "emulated"),
    [
        ({"precision": "bf16", "instructions": "avx2"}, True),
        ({"precision": "fp16", "instructions": "avx2, MKL_CBWR=COMPATIBLE"}, True),
        ({"precision": "bf16", "instructions": "x86_64"}, False),
        ({"precision": "bf16", "instructions": None}, False),
        ({"precision": "fp32", "instructions": "avx2"}, False),
        ({"precision": "bf16", "instructions": "avx2", "device": DeviceParams(kind="cuda")}, False),
    ],
)
def test_a_plan_says_that_a_cpu_emulates_its_precision(changes: dict[str, Any], emulated: bool) -> None:
    words = emulation_words(changed(plan_of(**FULL), **changes))
    assert bool(words) == emulated
    assert not emulated or words.startswith(changes["precision"])
