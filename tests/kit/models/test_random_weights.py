import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.models import random_weights
from stages.kit.models.folders import check_model_folder, geometry_config_path
from stages.kit.models.load import auto_class, load_config, load_model
from stages.kit.models.random_weights import TOKEN_IDS, build_random_model, write_random_weights
from tests import ROOT

TOKENIZER_DIR = ROOT / "data/tiny/qwen2-vl"
TINY = ("qwen2-vl-tiny", "qwen2.5-tiny", "qwen1.5-moe-tiny")
"""Of each family one."""


def build(geometry: str, folder: Path, **options: int) -> Path:
    folder.mkdir(exist_ok=True)
    build_random_model(geometry, folder, tokenizer_dir=TOKENIZER_DIR, **options)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_loads_whole(folder: Path) -> None:
    check_model_folder(folder)
    load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32")
    _, loaded = auto_class(load_config(folder)).from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values()), loaded  # missing, unexpected or mismatched


@pytest.mark.parametrize("geometry", TINY)
def test_a_random_model_loads_with_no_weight_missing_or_left_over(geometry: str, tmp_path: Path) -> None:
    assert_loads_whole(build(geometry, tmp_path))


@pytest.mark.parametrize("geometry", TINY)
def test_it_holds_what_save_pretrained_would_write(geometry: str, tmp_path: Path) -> None:
    streamed = build(geometry, tmp_path / "streamed")
    model = auto_class(config := load_config(streamed)).from_config(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")

    def layout(folder: Path) -> dict[str, Any]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in weights_of(folder).items()}

    assert layout(streamed) == layout(tmp_path / "saved")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (streamed, tmp_path / "saved")]
    assert configs[0] == configs[1]


def test_the_same_seed_gives_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

    assert digest(build("qwen2.5-tiny", tmp_path / "a")).startswith("ad66e37935869b41")
    assert digest(build("qwen2.5-tiny", tmp_path / "b", seed=1)) != digest(tmp_path / "a")


def test_weights_are_as_initialised(tmp_path: Path) -> None:
    weights = weights_of(build("qwen1.5-moe-tiny", tmp_path))
    for name, tensor in weights.items():
        if "norm" in name:
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif tensor.numel() > 10_000:
            assert tensor.float().std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(tensor.float().mean().item()) < 1e-3, name
            assert len(tensor.unique(dim=0)) == len(tensor), name
    beginnings = {tuple(tensor.flatten()[:8].tolist()) for tensor in weights.values() if tensor.ndim > 1}
    assert len(beginnings) == sum(tensor.ndim > 1 for tensor in weights.values())


def test_a_tensor_larger_than_the_block_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "BLOCK_WEIGHTS", 1009)
    weights = weights_of(build("qwen2.5-tiny", tmp_path))["lm_head.weight"].flatten()
    assert torch.equal(weights[1009:], weights[:-1009])
    assert len(weights[:1009].unique()) > 200


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    folder = build("qwen2-vl-tiny", tmp_path)
    assert not [name for name in weights_of(folder) if "lm_head" in name]
    model = load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32")
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_large_model_is_written_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_of(build("qwen1.5-moe-tiny", tmp_path / "whole"))
    monkeypatch.setattr("stages.kit.models.shards.MAX_SHARD_SIZE", "500KB")
    folder = build("qwen1.5-moe-tiny", tmp_path / "shards")
    shards = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, 6)]
    assert all(path.stat().st_size < 510_000 for path in shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: path.name for path in shards for name in load_file(path)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights_of(folder).items())
    assert_loads_whole(folder)


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "BLOCK_WEIGHTS", 10_007)
    config = load_config(geometry_config_path("qwen2.5-tiny").parent)
    config.hidden_size, config.vocab_size = 1024, 8000
    write_random_weights(config, tmp_path, seed=0)  # what is imported or kept on first use
    tracemalloc.start()
    try:
        write_random_weights(config, tmp_path, seed=0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = max(tensor.nbytes for tensor in weights_of(tmp_path).values())
    assert largest == 8000 * 1024 * 2
    assert peak_bytes < largest / 8


@pytest.mark.parametrize("geometry", TINY)
def test_model_and_tokenizer_agree_on_the_special_tokens(geometry: str, tmp_path: Path) -> None:
    folder = build(geometry, tmp_path)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), load_config(folder)
    text = config.get_text_config()
    assert (text.eos_token_id, text.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert len(tokenizer) <= text.vocab_size
    assert tokenizer.chat_template
    assert hasattr(config, "image_token_id") == (folder / "processor_config.json").exists() == ("vl" in geometry)
    for name, token in TOKEN_IDS.items():
        assert getattr(config, name, None) in (None, tokenizer.convert_tokens_to_ids(token)), name


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UserError, match=r"random weights need 4\.42 GB, .* has 3\.00 GB left"):
        build("qwen2-vl-2b", tmp_path / "vlm")
    assert not list((tmp_path / "vlm").glob("*.safetensors"))
    build("qwen2.5-tiny", tmp_path / "vlm")
