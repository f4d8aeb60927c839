"""Tiny dense Qwen2 models as stages leave them: a base, and what recipes made of it."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from stages.core.lineage import read_lineage, write_lineage
from stages.core.params.schema import DeviceParams
from stages.data.conversation import Conversation, message
from stages.mixture.build import merge_experts
from stages.models.load import load_model
from tests import ROOT

TOKENIZER_DIR = ROOT / "data/tiny/qwen2-vl"
TOKENIZER_FILES = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def tiny_config(**changes: object) -> Qwen2Config:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 448, "eos_token_id": 408, "pad_token_id": 409}  # as the tokenizer numbers them
    return Qwen2Config(**{**sizes, **tokens, "num_key_value_heads": 2, "max_position_embeddings": 256, **changes})


def save_base(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """Random weights, large enough that layers and biases matter."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(initializer_range=0.2, **changes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER_DIR / name, folder / name)
    write_lineage(folder, kind="base", name=folder.name, source={"folder": "here"})
    return folder


def save_expert(
    folder: Path,
    base_dir: Path,
    *,
    seed: int = 1,
    outside: float = 0.0,
    dtype: torch.dtype = torch.float32,
    shard: str = "5GB",
) -> Path:
    """The base with its MLPs moved, and all else by `outside`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data += (0.1 if ".mlp." in name else outside) * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    for name in TOKENIZER_FILES:
        shutil.copyfile(base_dir / name, folder / name)
    write_lineage(folder, kind="merged", name=folder.name, parents={"base": (base_dir, read_lineage(base_dir))})
    return folder


def merged(base_dir: Path, experts: dict[str, Path], folder: Path, *, top_k: int = 2) -> Path:
    folder.mkdir()
    merge_experts(base_dir, experts, folder, top_k=top_k)
    return folder


def load(folder: Path, precision: str = "fp32", **options: Any) -> PreTrainedModel:
    return load_model(folder, device=DeviceParams(kind="cpu"), precision=precision, **options)


def conversation(question: str, answer: str = "It is so.") -> Conversation:
    return Conversation(sample_id=question, messages=[message("user", question), message("assistant", answer)])


def set_routers(folder: Path, router: torch.Tensor) -> None:
    """Give a mixture that is one file these weights of its routers, (layers, experts, hidden)."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer, weights in enumerate(router):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = weights.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
