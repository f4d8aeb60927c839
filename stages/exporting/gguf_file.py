"""A model folder as a GGUF file, tensor by tensor: weights, settings, tokenizer and chat template.

Written by `gguf`, the package of llama.cpp's authors. Names, settings and the order of rows are those that llama.cpp's
own convert_hf_to_gguf.py gives them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, LlamaFileType
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stages.core.errors import UserError
from stages.core.families import family_of
from stages.exporting.gguf_tokenizer import CONVERTER, add_tokenizer
from stages.models.folders import Checkpoint, read_config

BLOCK = 2**18
"""Weights in memory at a time."""

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3": MODEL_ARCH.QWEN3,
}
"""llama.cpp's name of a family, by the model_type of config.json."""
INTERLEAVED = {"llama"}
"""Families in which llama.cpp's rotary positions turn neighbouring rows of a head, and not rows of its two halves."""
UNTIED = {"qwen2_moe"}
"""Families of which llama.cpp wants the output matrix in the file, also if it is the embeddings."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of the file, and those of the folder that it is made of. `GGUFWriter` takes it for an array in fp32, of
    which a block is in memory at a time."""

    dtype: ClassVar = np.dtype(np.float32)
    weights: Checkpoint
    name: str
    sources: tuple[str, ...]
    """One, or those of all experts, in their order."""
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    head_rows: int = 0
    """Rows of each head, which are interleaved; 0 for none."""
    is_idle: bool = False
    """Whether it is the gate of a shared expert that is all zero. llama.cpp divides by the gate's output: the file has
    ones in it, and what they gate is still zero."""

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def blocks(self) -> Iterator[slice]:
        """Rows of each source, some BLOCK weights at a time, in whole heads."""
        num_rows, *width = self.shape[len(self.sources) > 1 :]
        unit = self.head_rows or 1
        step = max(BLOCK // math.prod(width) // unit, 1) * unit
        return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))

    def tofile(self, file: BinaryIO) -> None:
        blocks = ((source, rows) for source in self.sources for rows in self.blocks())
        file.writelines(packed(self, self.weights.rows(*block)).tobytes() for block in blocks)


def architecture_of(config: Mapping[str, Any]) -> MODEL_ARCH:
    """Raises UserError for a model that is not known to come out the same in llama.cpp. config: of config.json."""
    model_type = config["model_type"]
    problem = ""
    if family_of(model_type).vision is not None:
        problem = "it sees images, and llama.cpp keeps a vision tower in a second file"
    elif model_type not in ARCHITECTURES:
        problem = f"there are {', '.join(ARCHITECTURES)}"
    elif config.get("use_sliding_window"):
        problem = "it uses sliding window attention"
    elif (rope := config["rope_parameters"]["rope_type"]) not in ("default", "llama3"):
        problem = f"its rotary positions are of type {rope}"
    elif config.get("norm_topk_prob") and config["num_experts_per_tok"] < config["num_experts"]:
        problem = "llama.cpp does not scale the weights of a token's experts to a sum of 1 (norm_topk_prob)"
    if problem:
        raise UserError(f"{model_type} is not exported to GGUF here: {problem}; {CONVERTER}")
    return ARCHITECTURES[model_type]


def write_gguf(model_dir: Path, path: Path, quantization: str, *, name: str) -> list[Entry]:
    """Write a model folder as one file, a block of a tensor after the other; returns the file's tensors.

    name: of the model, in the file. Raises UserError for a model or a tokenizer that is not known.
    """
    config = read_config(model_dir)
    architecture, weights = architecture_of(config), Checkpoint(model_dir)
    entries = list(entries_of(config, weights, quantization))
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(name)
    add_settings(writer, config)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{quantization.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, model_dir, config["vocab_size"])
    factors = rope_factors(config, model_dir)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for entry in entries:
        writer.add_tensor(entry.name, cast("Any", entry), raw_dtype=entry.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=sys.stderr.isatty())
    writer.close()
    return entries


def entries_of(config: Mapping[str, Any], weights: Checkpoint, quantization: str) -> Iterator[Entry]:
    """The tensors of the file, in an order that depends on their names alone. Raises UserError for an unknown one."""
    names = gguf.get_tensor_name_map(architecture_of(config), config["num_hidden_layers"])
    experts = config.get("num_experts", 0)
    for source in sorted(weights.path_of):
        before, is_expert, after = source.partition(".mlp.experts.")
        number, _, matrix = after.partition(".")
        if is_expert and number != "0":
            continue  # a part of expert 0's entry
        found = names.get_name(f"{before}{is_expert}{matrix}" if is_expert else source, (".weight", ".bias"))
        if found is None:
            raise UserError(f"{source} has no name in GGUF; {CONVERTER}")
        shape = weights.shape(source)
        sources = tuple(f"{before}.mlp.experts.{each}.{matrix}" for each in range(experts)) if is_expert else (source,)
        is_interleaved = config["model_type"] in INTERLEAVED and source.split(".")[-2] in ("q_proj", "k_proj")
        entry = Entry(
            weights=weights,
            name=found,
            sources=sources,
            shape=(experts, *shape) if is_expert else shape,
            kind=kind_of(found, shape, quantization),
            head_rows=head_dim(config) if is_interleaved else 0,
            is_idle=source.endswith(".mlp.shared_expert_gate.weight") and config.get("neutral_shared_expert", False),
        )
        yield entry
        is_tied = found == "token_embd.weight" and "lm_head.weight" not in weights.path_of
        if is_tied and config["model_type"] in UNTIED:
            yield replace(entry, name="output.weight")


def kind_of(name: str, shape: tuple[int, ...], quantization: str) -> GGMLQuantizationType:
    """Vectors and routers stay in fp32, as in llama.cpp's own files. Embeddings and output matrix have at least 8 bits
    (llama.cpp gives the output matrix 6, which the package does not write). Rows of no whole blocks get f16."""
    kind = GGMLQuantizationType[quantization.upper()]
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return GGMLQuantizationType.F32
    if quantization == "q4_0" and name.startswith(("token_embd.", "output.")):
        kind = GGMLQuantizationType.Q8_0
    return kind if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.F16


def packed(entry: Entry, rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """Rows of one of an entry's sources, as the file has them."""
    if entry.is_idle:
        rows = torch.ones_like(rows)
    if entry.head_rows:
        rows = interleaved(rows, entry.head_rows)
    with np.errstate(over="ignore"):  # the certificate says so
        return gguf.quants.quantize(rows.float().numpy(), entry.kind)


def interleaved(rows: torch.Tensor, head_rows: int) -> torch.Tensor:
    """Rows of each head's halves in turn: 0, n/2, 1, n/2 + 1, and so on. rows: (heads x n, ...)."""
    return rows.unflatten(0, (-1, 2, head_rows // 2)).transpose(1, 2).flatten(0, 2)


def add_settings(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_factors(config: Mapping[str, Any], model_dir: Path) -> np.ndarray[Any, Any] | None:
    """Divisors of the rotary frequencies of Llama 3.1 and later, (head_dim / 2,); None for a model without."""
    if config["rope_parameters"]["rope_type"] != "llama3":
        return None
    plain = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, head_dim(config), 2) / head_dim(config))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(model_dir), torch.device("cpu"))
    return (plain / scaled).numpy()
