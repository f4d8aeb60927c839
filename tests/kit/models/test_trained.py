import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, LoraParams, PartsParams
from stages.kit.data.conversation import Conversation
from stages.kit.models.adapters import (
    WEIGHTS_FILE,
    apply_recipe,
    load_trained,
    save_trained,
    trained_modules,
    trained_tensors,
)
from stages.kit.models.certificate import TOLERANCE
from stages.kit.models.load import DTYPES, load_model
from stages.kit.models.merge import changed_modules, merge_trained, probe_logits, relative_deviation, weight_digests
from stages.kit.models.prompts import load_processor

LLM = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WAYS: dict[str, tuple[PartsParams, LoraParams | None]] = {
    "lora": (PartsParams(llm="lora"), LoraParams(rank=4, alpha=8, targets={"llm": LLM})),
    "full": (PartsParams(vision="full", projector="full"), None),
    "joint": (
        PartsParams(vision="lora", llm="lora"),
        LoraParams(rank=4, alpha=8, targets={"llm": LLM, "vision": ("attn.qkv", "attn.proj", "mlp.fc1")}),
    ),
    "mixed": (PartsParams(vision="full", llm="lora"), LoraParams(rank=4, alpha=8, targets={"llm": LLM})),
}


def load(folder: Path) -> Any:
    return load_model(folder, device=DeviceParams(kind="cpu"), precision="fp32").eval()


@pytest.fixture
def trained(tiny_vlm: Path, tmp_path: Path) -> Callable[[str], Any]:
    """A model whose trained weights were moved at random (LoRA's B starts at zero), saved into tmp_path."""

    def make(way: str) -> Any:
        torch.manual_seed(0)
        model = apply_recipe(load(tiny_vlm), *WAYS[way]).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        save_trained(model, tmp_path, base_dir="data/bases/vlm", tensors=trained_tensors(model))
        return model

    return make


@pytest.mark.parametrize("way", WAYS)
def test_what_was_saved_is_what_was_trained(
    trained: Callable[[str], Any], way: str, tiny_vlm: Path, tmp_path: Path, probes: list[Conversation]
) -> None:
    processor = load_processor(tiny_vlm, None)
    before = probe_logits(load(tiny_vlm), processor, probes)
    wanted = probe_logits(trained(way), processor, probes)
    found = probe_logits(load_trained(load(tiny_vlm), tmp_path).eval(), processor, probes)
    assert relative_deviation(found, wanted, before) == 0


@pytest.mark.parametrize("way", WAYS)
def test_merged_model_equals_adapter_model(
    trained: Callable[[str], Any], way: str, tiny_vlm: Path, tmp_path: Path, probes: list[Conversation]
) -> None:
    processor = load_processor(tiny_vlm, None)
    expected = trained_modules(trained(way))
    base = load(tiny_vlm)
    before = probe_logits(base, processor, probes)
    digests = weight_digests(base)
    adapted = load_trained(base, tmp_path).eval()
    wanted = probe_logits(adapted, processor, probes)
    merge_trained(adapted).save_pretrained(tmp_path / "merged")
    merged = load(tmp_path / "merged")
    assert relative_deviation(probe_logits(merged, processor, probes), wanted, before) < 1e-4
    assert changed_modules(digests, weight_digests(merged)) == expected


def test_the_adapter_names_its_base_relative_to_the_workspace(trained: Callable[[str], Any], tmp_path: Path) -> None:
    trained("lora")
    config = (tmp_path / "adapter/adapter_config.json").read_text()
    assert '"base_model_name_or_path": "data/bases/vlm"' in config
    assert str(tmp_path) not in config


@pytest.mark.parametrize("way", ["lora", "joint"])
def test_the_adapters_targets_are_in_order(trained: Callable[[str], Any], way: str, tmp_path: Path) -> None:
    """PEFT keeps them in a set, whose order is another in each process."""
    trained(way)
    targets = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)


def test_only_what_was_trained_is_saved(trained: Callable[[str], Any], tmp_path: Path) -> None:
    trained("full")
    assert not (tmp_path / "adapter").exists()
    assert all(name.startswith("model.visual.") for name in load_file(tmp_path / WEIGHTS_FILE))


def test_an_empty_folder_and_strange_weights_are_refused(tiny_vlm: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds neither"):
        load_trained(load(tiny_vlm), tmp_path)
    save_file({"model.visual.nothing": torch.zeros(2)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(UserError, match=r"model.visual.nothing, which .* does not have"):
        load_trained(load(tiny_vlm), tmp_path)
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(UserError, match=r"lm_head.weight as \(2,\)"):
        load_trained(load(tiny_vlm), tmp_path)


@pytest.mark.parametrize("scale", [0.002, 0.02])
def test_in_bf16_a_good_merge_is_told_from_a_lost_one(
    scale: float, tiny_vlm: Path, tmp_path: Path, probes: list[Conversation]
) -> None:
    processor, cpu = load_processor(tiny_vlm, None), DeviceParams(kind="cpu")
    torch.manual_seed(0)
    model = apply_recipe(load(tiny_vlm), *WAYS["lora"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * scale
    save_trained(model, tmp_path, base_dir="", tensors=trained_tensors(model))
    base = load_model(tiny_vlm, device=cpu, precision="bf16").eval()
    before = probe_logits(base, processor, probes)
    adapted = load_trained(base, tmp_path).eval()
    wanted = probe_logits(adapted, processor, probes)
    merged = probe_logits(merge_trained(adapted), processor, probes)
    assert relative_deviation(merged, wanted, before) < TOLERANCE["bf16"]
    assert relative_deviation(before, wanted, before) > TOLERANCE["bf16"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("way", ["lora", "full"])
def test_a_16_bit_base_is_merged_into_16_bits(
    trained: Callable[[str], Any], precision: str, way: str, tiny_vlm: Path, tmp_path: Path
) -> None:
    """What was trained has 32 bits, and must not make the whole model twice as large."""
    cpu = DeviceParams(kind="cpu")
    load_model(tiny_vlm, device=cpu, precision="bf16").save_pretrained(tmp_path / "base")
    trained(way)
    base = load_model(tmp_path / "base", device=cpu, precision=precision)
    merge_trained(load_trained(base, tmp_path)).save_pretrained(tmp_path / "merged", safe_serialization=True)
    sizes = [
        path.stat().st_size for path in (tmp_path / "base/model.safetensors", tmp_path / "merged/model.safetensors")
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    tensors = load_file(tmp_path / "merged/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {DTYPES[precision]}
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == str(DTYPES[precision])[6:]
