"""Layers over several GPUs: one map for the plan of memory and for the load."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers.integrations.accelerate as their_maps
from accelerate.utils import modeling as accelerate_modeling
from transformers import AutoModelForImageTextToText, modeling_utils

from stages.core.params.schema import DeviceParams
from stages.kit.models.folders import geometry_config_path
from stages.kit.models.load import balanced_gpus, gpu_of, load_config, load_model, meta_model, nf4_config
from stages.kit.planning.plan import Plan
from tests.kit.memory.small import R1, plan_of

GIB = 2**30


def spread_plan(count: int, **settings: Any) -> Plan:
    device = DeviceParams(kind="cuda", count=count)
    return plan_of(**{**R1, "precision": "bf16", "placement": "balanced", **settings, "device": device})


def geometry_map(geometry: str, count: int, **settings: Any) -> dict[str, int]:
    gpus = balanced_gpus(spread_plan(count, **settings), load_config(geometry_config_path(geometry).parent))
    assert gpus is not None
    return gpus


class Decided(Exception):
    """from_pretrained has its map, and needs no more."""


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_map_is_what_from_pretrained_makes_of_empty_gpus(
    count: int, quantization: str, tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: dict[int | str, int] = dict.fromkeys([*range(count), "cpu"], 80 * GIB)
    decide, found = their_maps._get_device_map, []

    def decided(*args: Any, **kwargs: Any) -> Any:
        found.append(decide(*args, **kwargs))
        raise Decided

    with monkeypatch.context() as patch:
        patch.setattr(their_maps, "accelerate_max_memory", lambda given: dict(given or free))
        patch.setattr(modeling_utils, "_get_device_map", decided)
        options = {"quantization_config": nf4_config("bf16")} if quantization == "nf4" else {}
        with pytest.raises(Decided):
            AutoModelForImageTextToText.from_pretrained(
                tiny_vlm, device_map="balanced", dtype=torch.bfloat16, local_files_only=True, **options
            )
    ours = balanced_gpus(spread_plan(count, quantization=quantization), load_config(tiny_vlm))
    assert [ours] == found


@pytest.mark.parametrize("geometry", ["qwen2-vl-2b", "qwen2-vl-7b", "qwen2.5-7b", "qwen1.5-moe-a2.7b"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_every_weight_has_one_gpu_layers_stay_whole_and_what_is_tied_together(geometry: str, quantization: str) -> None:
    gpus = geometry_map(geometry, 2, quantization=quantization)
    model = meta_model(load_config(geometry_config_path(geometry).parent))
    placed = {name: gpu_of(name, gpus) for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert set(placed.values()) == {0, 1}
    for name, module in model.named_modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            assert gpu_of(name, gpus) is not None, name
    embeddings = model.get_input_embeddings()
    tied = embeddings.weight is model.get_output_embeddings().weight
    assert tied == (geometry == "qwen2-vl-2b")
    if tied:
        name = next(name for name, module in model.named_modules() if module is embeddings)
        assert gpu_of("lm_head", gpus) == gpu_of(name, gpus)


def test_quantized_layers_count_as_small_as_they_are() -> None:
    """The embeddings, which stay in bf16, weigh as much as a dozen layers then."""
    plain, nf4 = geometry_map("qwen2-vl-7b", 2), geometry_map("qwen2-vl-7b", 2, quantization="nf4")
    num_layers = [
        sum(gpu == 0 for name, gpu in gpus.items() if ".language_model.layers." in name) for gpus in (plain, nf4)
    ]
    assert num_layers[0] > num_layers[1]


def test_how_large_the_gpus_are_changes_nothing_and_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    config = load_config(geometry_config_path("qwen2.5-7b").parent)
    plan = spread_plan(2)
    small = replace(plan, device=replace(plan.device, memory_gb=4.0))
    assert balanced_gpus(small, config) == balanced_gpus(plan, config)
    assert not caplog.records


@pytest.mark.parametrize("placement", ["single", "ddp", "sharded"])
def test_other_placements_have_no_map(placement: Any, tiny_vlm: Path) -> None:
    assert balanced_gpus(spread_plan(2, placement=placement), load_config(tiny_vlm)) is None


def test_a_model_loaded_by_the_map_computes_as_one_that_is_not(tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names of a CPU stand for two GPUs, and accelerate puts its hooks between them."""
    cpu = DeviceParams(kind="cpu")
    config = load_config(tiny_vlm)
    gpus = balanced_gpus(spread_plan(2), config)
    assert gpus is not None
    names = (torch.device("cpu"), torch.device("cpu", 0))
    monkeypatch.setattr(accelerate_modeling, "check_device_same", lambda first, second: first.type == second.type)
    stand_ins = {name: names[gpu] for name, gpu in gpus.items()}
    spread = load_model(
        tiny_vlm, device=cpu, precision="fp32", placement="balanced", gpus=cast(Mapping[str, int], stand_ins)
    )
    assert spread.hf_device_map == stand_ins
    for name, gpu in gpus.items():
        if name in dict(spread.named_modules()):
            assert spread.get_submodule(name)._hf_hook.execution_device == names[gpu]
    ids = torch.arange(1, 9)[None]
    plain = load_model(tiny_vlm, device=cpu, precision="fp32")
    assert torch.equal(spread(input_ids=ids).logits, plain(input_ids=ids).logits)
