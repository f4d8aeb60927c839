"""Model folders on disk: which files belong to one, which are refused, and the configurations of known geometries.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from stages.core.errors import UserError
from stages.core.given_files import given_files, read_plain
from stages.core.records import parse_json, rebuild, shown

if TYPE_CHECKING:
    import torch

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model")
"""Configuration, weights, tokenizer and chat template. No pickles, no code."""

GGUF_FILE = "model.gguf"
"""A whole model for llama.cpp, as an export has it."""

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
ADAPTER_CONFIG = "adapter_config.json"
"""With this file transformers loads the base that it names, and attaches the adapter (integrations/peft.py)."""

OWN_CODE = ("auto_map", "custom_pipelines")
"""Settings that name classes in a file of code, wherever they stand."""

LAYER_COUNTS = ("num_hidden_layers", "num_layers", "depth")
MAX_LAYERS = 2_000
"""Limit of one part of a model; the deepest published ones have some 200. Even a layer without weights is a module."""

GEOMETRIES_DIR = Path(__file__).parent / "geometries"
"""OWNER/NAME/config.json as the hub has it, without weights; qwen2.5-tiny runs on a CPU."""

FAKE_PROCESSOR_DIR = Path("data/tiny/qwen2-vl")
"""A model folder with a tokenizer and image processor for every geometry: no memory depends on their contents."""


def copy_model_files(source: Path, folder: Path, *, weights: bool = True, link: bool = False) -> None:
    """Copy the files of a model; weights: False leaves out the weights and their index.

    link: hard links where the file system allows it, for files that nobody edits, such as a cache's.
    Raises UserError if `source` is no folder.
    """
    if not source.is_dir():
        raise UserError(f"base folder {source} {'is a file' if source.exists() else 'does not exist'}")
    used = {*weight_files(source), INDEX_FILE} if weights else set()
    for path in given_files(source, *MODEL_FILES):
        is_left_out = any(map(path.match, WEIGHTS)) and path.name not in used
        if not is_left_out and path.name not in ("lineage.json", "provenance.json"):
            (_link if link else shutil.copyfile)(path, folder / path.name)


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path.resolve(), target)
    except OSError:
        shutil.copyfile(path, target)


def check_model_folder(folder: Path, *, may_be_quantized: bool = False) -> None:
    """Raises UserError unless this is a loadable model: configuration, whole safetensors, no code of its own, and no
    adapter, and unless it may be, no quantization that transformers would apply unasked."""
    if (folder / ADAPTER_CONFIG).exists():
        raise UserError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}), which transformers would apply without a warning; merge it "
            "into the weights of its base (PEFT's merge_and_unload), or remove it and its weights"
        )
    config = read_config(folder)
    for path in sorted(folder.glob("*.json")):
        found = read_json(path)
        _refuse_code(path, found)
        if path.name == INDEX_FILE and not _is_index(found):
            raise UserError(f"{path} is damaged: expected a weight_map, from weights to file names")
    is_quantized = any(key == "quantization_config" and value is not None for key, value in _settings(config))
    if is_quantized and not may_be_quantized:
        raise UserError(
            f"{folder} holds weights that are quantized already (quantization_config); recipes quantize a base "
            "themselves: give the unquantized weights"
        )
    names = {path.name for path in folder.glob("*.safetensors")}
    if missing := weight_files(folder) - names:
        raise UserError(
            f"{folder} lacks {', '.join(sorted(missing))}; weights are read from safetensors only: convert others with "
            "transformers' save_pretrained"
        )
    for path in sorted(folder / name for name in names):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            pointer = ", a pointer of Git LFS (git lfs pull fetches it)" * (path.stat().st_size < 200)
            raise UserError(f"{path} is damaged{pointer}: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, before a library acts on it.

    Raises UserError if it is missing or damaged, wants to run code from the hub (a kernel by the name of its
    repository, transformers/integrations/hub_kernels.py), or has more than MAX_LAYERS layers.
    """
    path = folder / "config.json"
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: expected the settings of a model")
    _refuse_code(path, config)
    for key, value in _settings(config):
        if key in LAYER_COUNTS and isinstance(value, int | float) and value > MAX_LAYERS:
            raise UserError(f"{path} is damaged: {key} is {shown(value)}, expected at most {MAX_LAYERS:,}")
    return config


def _refuse_code(path: Path, content: Any) -> None:
    for key, value in _settings(content):
        if key in OWN_CODE and isinstance(value, dict | list | str):
            raise UserError(f"{path} wants to run code of its own ({key}), which is never allowed")
        if key.endswith("_implementation") and "/" in str(value):
            raise UserError(f"{path} wants to run code from the hub ({key}: {shown(value)}), which is never allowed")


def _settings(content: Any) -> Iterator[tuple[str, Any]]:
    """The settings of a file, and of all objects inside it, those in lists too."""
    waiting = [content]
    while waiting:
        here = waiting.pop()
        if isinstance(here, dict):
            yield from here.items()
        if isinstance(here, dict | list):
            inside = here.values() if isinstance(here, dict) else here
            waiting += [each for each in inside if isinstance(each, dict | list)]


def weight_files(folder: Path) -> set[str]:
    """Names of the files that transformers reads weights from; a damaged index names nothing."""
    index = read_json(folder / INDEX_FILE) if (folder / INDEX_FILE).exists() else {}
    return set(index["weight_map"].values() if _is_index(index) else ()) or {"model.safetensors"}


def _is_index(found: Any) -> bool:
    names = found.get("weight_map") if isinstance(found, dict) else None
    return isinstance(names, dict) and all(isinstance(name, str) for name in names.values())


class Checkpoint:
    """The weights of a model folder, in one file or several, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.path_of: dict[str, Path] = {}
        for path in (folder / name for name in sorted(weight_files(folder))):
            with safe_open(path, framework="pt") as file:
                self.path_of |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor in its own dtype, mapped from its file, which is closed with the last tensor of it."""
        with safe_open(self.path_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Rows of a tensor, mapped in the same way."""
        with safe_open(self.path_of[name], framework="pt") as file:
            return file.get_slice(name)[rows]

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.path_of[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())


def has_weights(folder: Path) -> bool:
    return next(folder.glob("*.safetensors"), None) is not None


def remove_weights(folder: Path) -> None:
    for path in [path for pattern in WEIGHTS for path in folder.glob(pattern)]:
        path.unlink()


def require_weights(folder: Path) -> None:
    """Raises UserError for a recipe's merged folder of which only the certificate was kept."""
    if folder.name == "merged" and folder.is_dir() and not has_weights(folder):
        stage = f"merge@{folder.parent.name}"
        raise UserError(
            f"{folder} has no weights: models.keep_merged is false, and nothing started from them when {stage} ran; "
            f"write them with: {rebuild(stage)}"
        )


def read_json(path: Path) -> Any:
    """A file of a model. Raises UserError if it is missing or damaged."""
    try:
        return parse_json(read_plain(path))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no model folder: {path.name} is missing") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
