"""Nested values with tensors in them as files: JSON for the shape, safetensors for the tensors, nothing to unpickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stages.kit.models.sharding import local

SUFFIXES = (".json", ".safetensors")
"""Of the files of one state."""

_TENSOR, _ITEMS = "<tensor>", "<items>"


def save_state(state: Any, stem: Path) -> None:
    """Write STEM.json and STEM.safetensors.

    state: dicts, lists, tuples, tensors, and what JSON has, floats that are no numbers included. A tuple comes back as
    a list; one tensor in several places is written once, and is one again; of a DTensor it is this process's share.
    Raises OSError where that fails, as on a full disk.
    """
    tensors: dict[str, torch.Tensor] = {}
    shape = _packed(state, "", tensors, {})
    try:
        save_file(tensors, stem.with_suffix(".safetensors"))
    except SafetensorError as error:
        if "I/O error" in str(error):
            raise OSError(str(error)) from error
        raise
    stem.with_suffix(".json").write_text(json.dumps(shape), encoding="utf-8")


def load_state(stem: Path) -> Any:
    """What `save_state` wrote, its tensors on the CPU."""
    tensors = load_file(stem.with_suffix(".safetensors"))
    return _unpacked(json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")), tensors)


def _packed(value: Any, path: str, tensors: dict[str, torch.Tensor], seen: dict[Any, str]) -> Any:
    if isinstance(value, torch.Tensor):
        value = local(value.detach())
        # bitsandbytes keeps one table for the states of all parameters.
        same = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if same not in seen:
            seen[same] = path
            shares = value.untyped_storage().nbytes() > value.nbytes  # which safetensors refuses
            tensors[path] = value.clone(memory_format=torch.contiguous_format) if shares else value.contiguous()
        return {_TENSOR: seen[same]}
    if isinstance(value, dict):
        items = [[key, _packed(inner, f"{path}/{key}", tensors, seen)] for key, inner in value.items()]
        plain = all(isinstance(key, str) for key in value)
        return dict(items) if plain else {_ITEMS: items}
    if isinstance(value, list | tuple):
        return [_packed(inner, f"{path}/{index}", tensors, seen) for index, inner in enumerate(value)]
    assert value is None or isinstance(value, str | int | float), f"{path}: {type(value)}"
    return value


def _unpacked(shape: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(shape, list):
        return [_unpacked(inner, tensors) for inner in shape]
    if isinstance(shape, dict):
        if _TENSOR in shape:
            return tensors[shape[_TENSOR]]
        if _ITEMS in shape:
            return {key: _unpacked(inner, tensors) for key, inner in shape[_ITEMS]}
        return {key: _unpacked(inner, tensors) for key, inner in shape.items()}
    return shape
