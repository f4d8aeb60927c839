"""Model folders on disk: which files belong to one, and which are never let in."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stages.kit.errors import UserError

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model")
"""Configuration, weights, tokenizer and chat template. No pickles, no code."""

_NOT_OURS = ("lineage.json", "provenance.json")


def copy_model_files(source: Path, folder: Path, *, weights: bool = True) -> None:
    """Copy the files of a model. Raises UserError where `source` is no folder.

    weights: False leaves them and the index of them out.
    """
    if not source.is_dir():
        raise UserError(f"base folder {source} does not exist")

    def copy(path: Path, target: Path) -> None:
        if weights or not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copyfile(path, target)

    _each_file(source, folder, copy)


def link_model_files(source: Path, folder: Path) -> None:
    """Hard links where the file system allows it, copies elsewhere; for files that nobody edits, such as a cache's."""

    def link(path: Path, target: Path) -> None:
        try:
            os.link(path.resolve(), target)
        except OSError:
            shutil.copyfile(path, target)

    _each_file(source, folder, link)


def check_model_folder(folder: Path) -> None:
    """Raises UserError unless this is a loadable model: configuration, whole safetensors, no code of its own."""
    config = _read_json(folder / "config.json")
    if "auto_map" in config:
        raise UserError(f"{folder}/config.json wants to run code of its own (auto_map), which is never allowed")
    index_path = folder / "model.safetensors.index.json"
    index = set(_read_json(index_path)["weight_map"].values()) if index_path.exists() else set()
    names = {path.name for path in folder.glob("*.safetensors")}
    if missing := (index or {"model.safetensors"}) - names:
        raise UserError(
            f"{folder} lacks {', '.join(sorted(missing))}; weights are read from safetensors only: convert others with "
            "transformers' save_pretrained"
        )
    for name in sorted(names):
        try:
            with safe_open(folder / name, framework="numpy") as file:
                file.keys()
        except SafetensorError as error:
            raise UserError(f"{folder / name} is damaged: {error}") from None


def has_weights(folder: Path) -> bool:
    return next(folder.glob("*.safetensors"), None) is not None


def remove_weights(folder: Path) -> None:
    """Leave what is light: configuration, tokenizer, chat template."""
    for pattern in ("*.safetensors", "*.safetensors.index.json"):
        for path in folder.glob(pattern):
            path.unlink()


def require_weights(folder: Path) -> None:
    """Raises UserError for a recipe's merged folder of which only the certificate was kept."""
    if folder.name == "merged" and folder.is_dir() and not has_weights(folder):
        stage = f"merge@{folder.parent.name}"
        raise UserError(
            f"{folder} has no weights: models.keep_merged is false, and nothing started from them when {stage} ran; "
            f"have it leave them with: dvc repro -f -s {stage}"
        )


def _each_file(source: Path, folder: Path, put: Callable[[Path, Path], Any]) -> None:
    for pattern in MODEL_FILES:
        for path in sorted(source.glob(pattern)):
            if path.name not in _NOT_OURS:
                put(path, folder / path.name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no model folder: {path.name} is missing") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return dict(found)
