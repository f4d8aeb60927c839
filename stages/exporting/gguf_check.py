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

from stages.exporting.gguf_file import Entry
from stages.models.folders import Checkpoint

Array: TypeAlias = np.ndarray[Any, Any]

LEVELS = {GGMLQuantizationType.Q8_0: 127, GGMLQuantizationType.Q4_0: 8}
"""Steps from zero to the largest weight of a block."""
SMALLEST_SCALE = 2.0**-14
"""A block's step is an f16: below this one its rounding counts for more than a small part of a step."""


def largest_deviations(model_dir: Path, path: Path, entries: Sequence[Entry]) -> dict[str, float]:
    """The largest deviation of each tensor of the folder, in steps; infinite for one that is missing or of another
    shape, and for a tensor of the file that nothing in the folder is made into. entries: as they were written."""
    weights = Checkpoint(model_dir)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    unknown = tensors.keys() - {entry.name for entry in entries} - {"rope_freqs.weight"}
    left_out = weights.path_of.keys() - {source for entry in entries for source in entry.sources}
    found = dict.fromkeys(unknown | left_out, np.inf)
    for entry in entries:
        tensor = tensors.get(entry.name)
        for expert, source in enumerate(sorted(entry.sources, key=_expert_of)):
            num_rows, *width = weights.shape(source)
            shape = [len(entry.sources), num_rows, *width][len(entry.sources) == 1 :]
            if tensor is None or tensor.shape[::-1].tolist() != shape:
                found[source] = np.inf
                continue
            off = [found.get(source, 0.0)]  # tied embeddings may be in the file twice
            for rows in entry.blocks():
                original = weights.rows(source, rows).float().numpy()
                if entry.is_idle:
                    original = np.ones_like(original)
                values = _rows(path, tensor, expert * num_rows + rows.start, len(original)).reshape(original.shape)
                if entry.head_rows:
                    values = values[_places(len(values), entry.head_rows)]
                off.append((np.abs(values - original) / step(original, entry.kind)).max())
            found[source] = float(np.max(off))
    return found


def _rows(path: Path, tensor: ReaderTensor, first: int, count: int) -> Array:
    """Rows of a tensor of the file, of all experts in turn, in fp32: (count, ...). They are read, and not mapped, as
    mapped pages stay in memory."""
    kind, width = tensor.data.dtype, tensor.data.shape[-1] if tensor.data.ndim > 1 else 1
    data = np.fromfile(path, kind, count=count * width, offset=tensor.data_offset + first * width * kind.itemsize)
    return gguf.quants.dequantize(data.reshape(count, width), tensor.tensor_type)


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


def _places(rows: int, head_rows: int) -> Array:
    """The place in the file of each row of the folder, where a head's rows j and j + n/2 lie beside each other."""
    row, n = np.arange(rows), head_rows
    return row // n * n + row % n % (n // 2) * 2 + row % n // (n // 2)
