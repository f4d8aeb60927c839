import json
import multiprocessing
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.internals.torch_internals import expand_segments
from stages.kit.models.load import (
    load_config,
    load_model,
    meta_model,
    resolve_attention,
    see_only,
)
from stages.kit.models.prompts import load_processor
from tests import ROOT
from tests.damage import damaged_tree, quick

CPU, TWO_GPUS = DeviceParams(kind="cpu"), DeviceParams(kind="cuda", count=2)


@given(data=st.data())
@quick(25)
def test_a_configuration_that_makes_no_sense_is_refused_in_words(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source, folder = ROOT / "data/tiny/qwen2", tmp_path_factory.mktemp("model")
    config = data.draw(damaged_tree(json.loads((source / "config.json").read_text())))
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(UserError):
        meta_model(load_config(folder))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[1, 2]", "[" * 200_000, "{", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_is_none_is_refused_in_words(file: str, content: str, tmp_path: Path) -> None:
    for path in (ROOT / "data/tiny/qwen2").glob("*.json*"):
        shutil.copy(path, tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match="is no model that can be loaded"):
        load_processor(tmp_path, None)


@pytest.mark.parametrize(
    ("device", "allowed", "seen"),
    [
        (TWO_GPUS, None, "0,1"),
        (TWO_GPUS, "5,3,7", "5,3"),
        (DeviceParams(kind="cuda"), "GPU-aa,GPU-bb", "GPU-aa"),
        (CPU, "5,3,7", "5,3,7"),
    ],
)
def test_a_run_sees_no_more_gpus_than_its_profile_names(
    device: DeviceParams, allowed: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    see_only(device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("installed", "capability", "precision", "found"),
    [
        (True, (8, 0), "bf16", "flash_attention_2"),
        (True, (9, 0), "fp16", "flash_attention_2"),
        (True, (7, 5), "fp16", "sdpa"),
        (True, (8, 0), "fp32", "sdpa"),
        (False, (8, 0), "bf16", "sdpa"),
    ],
)
def test_flash_attention_is_taken_where_it_runs(
    installed: bool, capability: tuple[int, int], precision: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.kit.models.load.is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert resolve_attention("auto", TWO_GPUS, precision) == found
    assert resolve_attention("auto", CPU, precision) == "sdpa"
    assert resolve_attention("eager", TWO_GPUS, precision) == "eager"
    if found == "sdpa":
        with pytest.raises(UserError, match=r"memory.attn is flash_attention_2, which needs"):
            resolve_attention("flash_attention_2", TWO_GPUS, precision)


def test_segments_expand_once_asked_to() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as fresh:  # it is for the whole process
        assert "expandable_segments:True" not in fresh.apply(torch._C._accelerator_getAllocatorSettings)
        fresh.apply(expand_segments)
        assert "expandable_segments:True" in fresh.apply(torch._C._accelerator_getAllocatorSettings)


def test_a_gpu_profile_on_a_machine_without_is_refused(tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"wants 2 CUDA device\(s\), but 1 can be seen"):
        load_model(tiny_vlm, device=TWO_GPUS, precision="bf16")


def test_emulated_bf16_is_refused(tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a Turing card")
    with pytest.raises(UserError, match=r"a Turing card has no bf16; set memory.precision to fp16"):
        load_model(tiny_vlm, device=TWO_GPUS, precision="bf16")


def test_weights_that_are_missing_are_not_made_up(tiny_vlm: Path, tmp_path: Path) -> None:
    for path in tiny_vlm.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    left_out = sorted(weights)[3]
    save_file({name: tensor for name, tensor in weights.items() if name != left_out}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lacks 1 weights of Qwen2VLForConditionalGeneration, among them"):
        load_model(tmp_path, device=CPU, precision="fp32")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no model folder: config.json is missing"):
        load_model(tmp_path, device=CPU, precision="fp32")
