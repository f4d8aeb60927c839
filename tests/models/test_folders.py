import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.core.errors import UserError
from stages.core.params.schema import LoraParams
from stages.models.adapters import apply_recipe, count_trainable
from stages.models.folders import (
    GEOMETRIES_DIR,
    check_model_folder,
    copy_model_files,
)
from stages.models.load import load_config, meta_model
from tests.plans import recipe_of

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("link", [False, True])
def test_only_a_models_own_files_are_copied(link: bool, tiny_vlm: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for path in tiny_vlm.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    for stray in ("pytorch_model.bin", "modeling_own.py", "lineage.json", ".gitattributes", "README.md"):
        (source / stray).write_text("{}")
    for weights in ("adapter_model.safetensors", "extra.safetensors"):
        save_file({"a": np.zeros(1)}, source / weights)
    copy_model_files(source, target, link=link)
    assert {path.name for path in target.iterdir()} == {path.name for path in tiny_vlm.iterdir()}
    check_model_folder(target)
    (source / "vocab.txt").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"vocab\.txt leads out of .*source"):
        copy_model_files(source, target, link=link)
    assert not (target / "vocab.txt").exists()
    for given, problem in (("nowhere", "does not exist"), ("source/config.json", "is a file")):
        with pytest.raises(UserError, match=rf"{given} {problem}"):
            copy_model_files(tmp_path / given, target)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def text(name: str, content: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "is no model folder"),
        (text("config.json", "{"), "config.json is damaged"),
        (text("config.json", "[" * 200_000), "config.json is damaged: no JSON: recursion limit"),
        (text("config.json", {"text_config": {"num_hidden_layers": 3_000_000}}), "num_hidden_layers is 3000000"),
        (text("config.json", {"auto_map": {"AutoModel": "own.Model"}}), "wants to run code of its own"),
        (text("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.T", 0]}}), "wants to run code of its own"),
        (text("config.json", {"attn_implementation": "somebody/kernel"}), "wants to run code from the hub"),
        (text("config.json", {"quantization_config": {"quant_method": "gptq"}}), "quantized already"),
        (text("adapter_config.json", {"peft_type": "LORA"}), "holds an adapter"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08"), "model.safetensors is damaged"),
        (text("model.safetensors", "version https://git-lfs.github.com/spec/v1"), r"damaged, a pointer of Git LFS"),
        (text(INDEX, {"weight_map": {"a": "model-2-of-2.safetensors"}}), "lacks model-2-of-2.safetensors"),
    ],
)
def test_an_unsafe_or_damaged_model_is_refused(
    damage: Callable[[Path], object], message: str, tiny_vlm: Path, tmp_path: Path
) -> None:
    copy_model_files(tiny_vlm, tmp_path)
    check_model_folder(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "weights", "llm", "vision"),
    [
        ("Qwen/Qwen2-VL-2B-Instruct", 2_208_985_600, 9_232_384, 5_242_880),
        ("Qwen/Qwen2-VL-7B-Instruct", 8_291_375_616, 20_185_088, 5_242_880),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, 20_185_088, 0),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14_315_784_192, 7_962_816, 0),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656, 20_185_088, 5_575_680),
        ("Qwen/Qwen3-8B", 8_190_735_360, 21_823_488, 0),
        ("Qwen/Qwen3-VL-4B-Instruct", 4_437_815_808, 16_515_072, 3_145_728),
        ("Qwen/Qwen3-VL-8B-Instruct", 8_767_123_696, 21_823_488, 3_849_984),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 20_971_520, 0),
        ("google/gemma-3-1b-it", 999_885_952, 6_522_880, 0),
        ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, 12_582_912, 0),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, 2_442_240, 0),
    ],
)
def test_geometries_have_their_published_sizes(name: str, weights: int, llm: int, vision: int) -> None:
    """And all-linear LoRA of rank 8 trains 8 (inputs + outputs) of each linear layer."""
    warnings.simplefilter("ignore", FutureWarning)
    model = meta_model(load_config(GEOMETRIES_DIR / name))
    assert count_trainable(model)["all"] == weights
    parts = dict.fromkeys(("llm", "vision") if vision else ("llm",), "lora")
    lora = LoraParams(rank=8, alpha=8, targets=dict.fromkeys(parts, ("all-linear",)))  # type: ignore[arg-type]
    counts = count_trainable(apply_recipe(model, recipe_of(lora=lora, **parts)))
    assert (counts["llm"], counts["vision"], counts["projector"]) == (llm, vision, 0)
