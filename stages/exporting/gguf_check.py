"""A written GGUF file against the model folder that it was made from: every tensor read back and dequantized.

It puts rows and experts back in their places by arithmetic of its own, not by undoing what the writer did.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

from stages.exporting.gguf_file import IDLE_GATE, Entry, architecture_of
from stages.models.folders import Checkpoint, read_config

Array: TypeAlias = np.ndarray[Any, Any]

LEVELS = {GGMLQuantizationType.Q8_0: 127, GGMLQuantizationType.Q4_0: 8}
"""Steps from zero to the largest weight of a block."""
SMALLEST_SCALE = 2.0**-14
"""A block's step is an f16: below this one its rounding counts for more than a small part of a step."""


def largest_deviations(model_dir: Path, path: Path, entries: Sequence[Entry]) -> dict[str, float]:
    """The largest deviation of each tensor of the folder, in steps; infinite for one that is missing or of another
    shape, and for a tensor of the file that nothing in the folder is made into. entries: as they were written."""
    config, weights = read_config(model_dir), Checkpoint(model_dir)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    is_interleaved = architecture_of(config).interleaved
    is_neutral = config.get("neutral_shared_expert", False)
    unknown = tensors.keys() - {entry.name for entry in entries} - {"rope_freqs.weight"}
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    left_out = weights.path_of.keys() - {source for entry in entries for source in entry.sources} - tied
    found = dict.fromkeys(unknown | left_out, np.inf)
    for entry in entries:
        for expert, source in enumerate(sorted(entry.sources, key=_expert_of)):
            original = weights[source].float().numpy()
            if is_neutral and source.endswith(IDLE_GATE):
                original = np.ones_like(original)
            values = _values(path, tensors.get(entry.name), expert, len(entry.sources))
            if values.shape != original.shape:
                found[source] = np.inf
                continue
            if is_interleaved and (of := heads.get(source.split(".")[-2])):
                values = values[_places(len(values), of)]
            found[source] = float((np.abs(values - original) / step(original, entry.kind)).max())
    return found


def _values(path: Path, tensor: ReaderTensor | None, part: int, parts: int) -> Array:
    """One of equal parts of a tensor of the file, in fp32; empty if it is not there. It is read, and not mapped: mapped
    pages stay in memory."""
    if tensor is None:
        return np.empty(0)
    kind, shape, size = tensor.data.dtype, tensor.data.shape[parts > 1 :], tensor.data.size // parts
    data = np.fromfile(path, kind, count=size, offset=tensor.data_offset + part * size * kind.itemsize)
    return gguf.quants.dequantize(data.reshape(shape), tensor.tensor_type)


def step(values: Array, kind: GGMLQuantizationType) -> Array:
    """The step of the quantization at each of these weights: the distance of two neighbours that it can tell apart."""
    if kind not in LEVELS:
        return np.maximum(np.abs(values) * 2.0**-10, 2.0**-24)
    blocks = np.abs(values).reshape(-1, gguf.GGML_QUANT_SIZES[kind][0])
    scale = np.maximum(blocks.max(axis=1, keepdims=True) / LEVELS[kind], SMALLEST_SCALE)
    return np.broadcast_to(scale, blocks.shape).reshape(values.shape)


def _expert_of(source: str) -> int:
    """The number in the name of an expert's weight; 0 for another weight."""
    return int(source.partition(".experts.")[2].partition(".")[0] or 0)


def _places(rows: int, heads: int) -> Array:
    """The place in the file of each row of the folder, where a head's rows j and j + n/2 lie beside each other."""
    row = np.arange(rows)
    n = rows // heads
    return row // n * n + row % n % (n // 2) * 2 + row % n // (n // 2)
