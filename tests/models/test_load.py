import json
import multiprocessing
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.accelerate as their_maps
from bitsandbytes.nn import Linear4bit
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.exporting.quantized_folder import write_quantized
from stages.internals.torch_internals import expand_segments
from stages.memory.step import record_step
from stages.models.folders import read_config
from stages.models.kernels import PACKED
from stages.models.load import (
    limit_visible_gpus,
    load_base,
    load_config,
    load_model,
    meta_model,
    require_readable,
    resolve_attention,
)
from stages.planning.plan import Plan
from tests import ROOT
from tests.damage import damaged_tree, quick
from tests.memory.small import R1, batch_of, plan_of, processor_of
from tests.tiny_families import save_tiny_family

CPU, TWO_GPUS = DeviceParams(kind="cpu"), DeviceParams(kind="cuda", count=2)


@given(data=st.data())
@quick(25)
def test_a_damaged_configuration_is_refused_in_words(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source, folder = ROOT / "data/tiny/qwen2", tmp_path_factory.mktemp("model")
    config = data.draw(damaged_tree(json.loads((source / "config.json").read_text())))
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(UserError):
        meta_model(load_config(folder))


@pytest.mark.parametrize(
    ("device", "allowed", "seen"),
    [
        (TWO_GPUS, None, "0,1"),
        (TWO_GPUS, "5,3,7", "5,3"),
        (DeviceParams(kind="cuda"), "GPU-aa,GPU-bb", "GPU-aa"),
        (CPU, "5,3,7", "5,3,7"),
    ],
)
def test_a_process_sees_only_its_profiles_gpus(
    device: DeviceParams, allowed: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    limit_visible_gpus(device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("installed", "capability", "precision", "runs"),
    [
        (True, (8, 0), "bf16", True),
        (True, (7, 5), "fp16", False),
        (True, (8, 0), "fp32", False),
        (False, (8, 0), "bf16", False),
    ],
)
def test_flash_attn_is_taken_only_if_asked_for_and_refused_if_it_cannot_run(
    installed: bool, capability: tuple[int, int], precision: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.models.load.is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for device in (TWO_GPUS, CPU):
        assert resolve_attention("auto", device, precision) == "sdpa"
        assert resolve_attention("auto", device, precision, padding_free=True) == PACKED
    with nullcontext() if runs else pytest.raises(UserError, match=r"memory.attn is flash_attention_2, which needs"):
        assert resolve_attention("flash_attention_2", TWO_GPUS, precision, padding_free=True) == "flash_attention_2"


def test_expand_segments_reaches_the_allocator() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as fresh:  # it is for the whole process
        assert "expandable_segments:True" not in fresh.apply(torch._C._accelerator_getAllocatorSettings)
        fresh.apply(expand_segments)
        assert "expandable_segments:True" in fresh.apply(torch._C._accelerator_getAllocatorSettings)


@pytest.mark.parametrize(
    ("count", "reason"),
    [(1, r"wants 2 CUDA device\(s\), but 1 can be seen"), (2, "a Turing card has no bf16; .* fp16")],
)
def test_a_gpu_that_does_not_do_is_refused(
    count: int, reason: str, tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a Turing card")
    with pytest.raises(UserError, match=reason):
        load_model(tiny_vlm, device=TWO_GPUS, precision="bf16")


def test_missing_weights_are_not_initialized(tiny_vlm: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no model folder: config.json is missing"):
        load_model(tmp_path, device=CPU, precision="fp32")
    for path in tiny_vlm.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    left_out = sorted(weights)[3]
    save_file({name: tensor for name, tensor in weights.items() if name != left_out}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lacks 1 weights of Qwen2VLForConditionalGeneration, among them"):
        load_model(tmp_path, device=CPU, precision="fp32")


def test_4_bit_weights_that_bitsandbytes_reads_wrongly_on_a_cpu_are_refused(tmp_path: Path) -> None:
    folder, refused = save_tiny_family("qwen2_5_vl", tmp_path), "layers with 32, 48, 96 inputs, .*quantization: none"
    with pytest.raises(UserError, match=refused):
        load_model(folder, device=CPU, precision="fp32", quantization="nf4")
    plan = plan_of(**R1, quantization="nf4")
    with pytest.raises(UserError, match=refused):  # before there are weights
        record_step(plan, config := load_config(folder), processor_of("qwen2_5_vl"), batch_of(plan, config))
    load_model(ROOT / "data/tiny/qwen2-vl", device=CPU, precision="fp32", quantization="nf4")


def test_no_other_rows_are_read_wrongly() -> None:
    layers = {inputs: Linear4bit(inputs, 8, bias=False, quant_type="nf4") for inputs in (*range(2, 130, 2), 1200, 3420)}
    read_wrongly, refused = set(), set()
    for inputs, layer in layers.items():
        weight = layer.weight.detach().clone()
        read = layer.to("cpu")(torch.eye(inputs)).T
        # Neighbours in nf4 are at most .31 of a block's largest weight apart.
        if (read - weight).abs().max() > 0.16 * weight.abs().max():
            read_wrongly.add(inputs)
        try:
            require_readable(layer, CPU)
        except UserError:
            refused.add(inputs)
    assert read_wrongly <= refused == {16, 32, 48, 80, 96, 112, 1200}


def spread_plan(count: int, **settings: Any) -> Plan:
    device = DeviceParams(kind="cuda", count=count)
    return plan_of(**{**R1, "precision": "bf16", "placement": "balanced", **settings, "device": device})


class Decided(Exception):
    """from_pretrained has its map."""


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("count", [2, 3])
def test_layers_are_spread_over_gpus_as_by_from_pretrained_on_empty_ones(
    count: int, quantization: str, tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: dict[int | str, int] = dict.fromkeys([*range(count), "cpu"], 80 * 2**30)
    decide, maps = their_maps._get_device_map, list[dict[str, int]]()

    def decided(model: Any, kind: str, limits: dict[int, int], quantizer: Any) -> Any:
        assert kind == "balanced"
        maps.extend(decide(model, kind, each, quantizer) for each in (limits, dict(free)))
        raise Decided

    monkeypatch.setattr("stages.models.load.check_device", lambda *_: None)
    monkeypatch.setattr(modeling_utils, "_get_device_map", decided)
    plan = spread_plan(count, quantization=quantization)
    with pytest.raises(Decided):
        load_base(replace(plan, base_dir=str(tiny_vlm)))
    ours, theirs = maps
    assert ours == theirs
    assert set(ours.values()) <= set(range(count))


def test_an_export_in_4_bits_is_as_a_training_loads_its_base_but_for_exact_scales(tmp_path: Path) -> None:
    folder = ROOT / "data/tiny/qwen2"
    write_quantized(folder, tmp_path, "nf4")
    (trained, nested), (exported, exact) = (
        (settings, settings.pop("bnb_4bit_use_double_quant"))
        for settings in (
            load_model(folder, device=CPU, precision="bf16", quantization="nf4").config.quantization_config.to_dict(),
            read_config(tmp_path)["quantization_config"],
        )
    )
    assert (nested, exact) == (True, False)
    assert exported == trained
