"""Nested values with tensors in them as a safetensors file: nothing to unpickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stages.kit.models.load import local

_TENSOR, _SHAPE = "<tensor>", "<shape>"


def save_state(state: Any, path: Path) -> None:
    """Write one safetensors file: the tensors, and as JSON in a tensor of bytes what is around them.

    state: dicts, lists, tensors, and what JSON has, floats that are no numbers included. As in JSON, tuples come back
    as lists and keys as texts. One tensor in several places is written once; a DTensor's is this process's share.
    Raises OSError where that fails, as on a full disk.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[Any, str] = {}

    def put_aside(value: torch.Tensor) -> dict[str, str]:
        value = local(value.detach())
        # bitsandbytes keeps one table for the states of all parameters.
        same = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if same not in names:
            names[same] = str(len(names))
            shares = value.untyped_storage().nbytes() > value.nbytes  # which safetensors refuses
            tensors[names[same]] = value.clone(memory_format=torch.contiguous_format) if shares else value.contiguous()
        return {_TENSOR: names[same]}

    shape = json.dumps(state, default=put_aside).encode()
    try:
        save_file({**tensors, _SHAPE: torch.frombuffer(bytearray(shape), dtype=torch.uint8)}, path)
    except SafetensorError as error:
        if "I/O error" in str(error):
            raise OSError(str(error)) from error
        raise


def load_state(path: Path) -> Any:
    """The state that `save_state` wrote, its tensors on the CPU."""
    tensors = load_file(path)
    shape = tensors.pop(_SHAPE).numpy().tobytes()
    return json.loads(shape, object_hook=lambda found: tensors[found[_TENSOR]] if _TENSOR in found else found)
