"""Weights written as safetensors piece by piece, in shards with their index: memory does not depend on their size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from tqdm import tqdm

from stages.core.errors import UserError

INDEX_FILE = "model.safetensors.index.json"

MAX_SHARD_SIZE = "2GB"

Piece = bytes | memoryview

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""As safetensors names them."""


def write_shards(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    pieces: Callable[[str, torch.Tensor], Iterable[Piece]],
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    what: str = "weights",
) -> int:
    """Write the safetensors of a model, and where they are several their index, as save_pretrained lays them out.

    tensors: by name, each with a storage of its own, of which shape and dtype count alone: meta tensors.
    pieces: of a name and its tensor, the bytes to write one after the other, little endian.
    max_shard_size: bytes, or a size like "2GB"; a larger tensor is a shard of its own. what: named in messages.
    Returns the bytes of all tensors. Raises UserError where the disk has no room for them.
    """
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    require_space(folder, total_bytes, what)
    split = split_torch_state_dict_into_shards(
        dict(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    # disable=None shows it on a terminal only.
    with tqdm(desc="weights", total=total_bytes, unit="B", unit_scale=True, leave=False, disable=None) as progress:
        for name, inside in split.filename_to_tensors.items():
            _write_shard(folder / name, {key: tensors[key] for key in inside}, pieces, progress)
    if split.is_sharded:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return total_bytes


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises UserError where the disk that `folder` is on has less left."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"{what} need {needed_bytes / 1e9:.2f} GB, but the disk of {folder.absolute().parent} has "
            f"{free_bytes / 1e9:.2f} GB left; free some, or choose a smaller geometry"
        )


def _write_shard(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    pieces: Callable[[str, torch.Tensor], Iterable[Piece]],
    progress: tqdm[None],
) -> None:
    """One safetensors file: length of the header (8 bytes, little endian), header, data without gaps.

    By hand, as safetensors itself wants all tensors of a file at once. Source: its README, "Format".
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
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
