"""Weights written as safetensors piece by piece, in shards with their index: memory does not depend on their size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from stages.core.errors import UserError
from stages.kit.models.folders import INDEX_FILE

MAX_SHARD_SIZE = "2GB"
"""Of one file; a larger tensor is a shard of its own."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By safetensors' names."""

Pieces = Callable[[str, torch.Tensor], Iterable[bytes | memoryview]]
"""From a weight's name, and a meta tensor of its shape and dtype, its bytes one after the other, little endian."""


def write_shards(model: PreTrainedModel, folder: Path, pieces: Pieces, *, what: str) -> int:
    """Write a model's safetensors, and where they are several their index, in names and files as save_pretrained does.

    model: on the meta device. what: named in messages.
    Returns the bytes of all weights. Raises UserError where the disk has no room for them.
    """
    # Tied weights are one parameter, under its first name; save_pretrained leaves out the same ones.
    named = revert_weight_conversion(model, dict(model.named_parameters()))
    # Each on its own: experts are views of one tensor, and would each be counted at the size of all.
    tensors = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < total_bytes:
        raise UserError(
            f"{what} need {total_bytes / 1e9:.2f} GB, but the disk of {folder.absolute().parent} has "
            f"{free_bytes / 1e9:.2f} GB left; free some, or choose a smaller geometry"
        )
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_SHARD_SIZE
    )
    # disable=None shows it on a terminal only.
    with tqdm(desc="weights", total=total_bytes, unit="B", unit_scale=True, leave=False, disable=None) as progress:
        for name, inside in split.filename_to_tensors.items():
            _write_shard(folder / name, {key: tensors[key] for key in inside}, pieces, progress)
    if split.is_sharded:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return total_bytes


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor], pieces: Pieces, progress: tqdm[None]) -> None:
    """One safetensors file: length of the header (8 bytes, little endian), header, data without gaps.

    By hand, as safetensors itself wants all tensors of a file at once. Source: its README, "Format".
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as safetensors aligns the data
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            written = 0
            for piece in pieces(name, tensor):
                written += file.write(piece)
                progress.update(len(piece))
            assert written == tensor.nbytes, (name, written, tensor.nbytes)
