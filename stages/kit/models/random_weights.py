"""A base of random weights in a known geometry, streamed to disk: as large and as fast as the real one, and as stupid.

Memory and speed do not depend on what weights say, so that both can be measured where the real ones cannot be had.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from tqdm import tqdm
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from stages.kit.errors import UserError
from stages.kit.models.geometries import geometry_config_path
from stages.kit.models.load import load_config, meta_model

log = logging.getLogger(__name__)

SEED = 0

MAX_SHARD_SIZE = "2GB"

BLOCK_WEIGHTS = 2**19 - 1
"""Random weights that are drawn once and repeated. A prime, so that no two rows of a matrix start at the same one; and
1 MiB, which a CPU's cache holds: 8 MiB were written at two thirds of the speed."""

TOKENIZER_FILES = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PROCESSOR_FILE = "processor_config.json"

TOKEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "vision_token_id": "<|vision_pad|>",
}
"""Of a vision-language model, as Qwen2-VL's config.json names them."""

_ONE = np.array(1.0, dtype="<f4").tobytes()[2:]
"""bfloat16 is the upper half of float32."""


def build_random_model(geometry: str, folder: Path, *, tokenizer_dir: Path, seed: int = SEED) -> None:
    """Write a Hugging Face folder as if `geometry` had been initialised and never trained.

    tokenizer_dir: a small Qwen2-VL folder to take tokenizer, chat template and image processing from. The vocabulary
    keeps the geometry's size; what the tokenizer does not use of it is idle.
    Raises UserError for an unknown geometry, and where the disk has no room.
    """
    config = load_config(geometry_config_path(geometry).parent)
    files = [*TOKENIZER_FILES, *([PROCESSOR_FILE] if hasattr(config, "vision_config") else [])]
    for name in files:
        shutil.copyfile(tokenizer_dir / name, folder / name)
    take_token_ids(config, tokenizer_dir)
    write_random_weights(config, folder, seed=seed)
    config.save_pretrained(folder)


def write_random_weights(config: PreTrainedConfig, folder: Path, *, seed: int) -> None:
    """Write the safetensors of a model, bfloat16, in shards with their index, in the names that the hub has them in.

    Norms are ones, biases zeros, and all else is about normal with the config's initializer_range, a stretch of one
    block of random weights that starts where seed and name say. It is written piece by piece from that block, so that
    memory does not depend on the model's size. The same seed gives the same bytes everywhere.
    Raises UserError where the disk has no room for it.
    """
    model = meta_model(config).to(torch.bfloat16)
    # Tied weights are one parameter, under its first name; save_pretrained leaves out the same ones.
    named = revert_weight_conversion(model, dict(model.named_parameters()))
    # Each on its own: experts are views of one tensor, and would each be counted at the size of all.
    tensors = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    require_space(folder, total_bytes)
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_SHARD_SIZE
    )
    block = _random_block(config.get_text_config().initializer_range, seed)
    started = time.monotonic()
    # disable=None shows it on a terminal only.
    with tqdm(desc="weights", total=total_bytes, unit="B", unit_scale=True, leave=False, disable=None) as progress:
        for name, inside in split.filename_to_tensors.items():
            _write_shard(folder / name, {key: tensors[key] for key in inside}, block, seed, progress)
    if split.is_sharded:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    seconds = time.monotonic() - started
    log.info("random weights: %.1f MB in %.1f s, %.2f GB/s", total_bytes / 1e6, seconds, total_bytes / 1e9 / seconds)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises UserError where the disk that `folder` is on has less left."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"random weights need {needed_bytes / 1e9:.2f} GB, but the disk of {folder.absolute().parent} has "
            f"{free_bytes / 1e9:.2f} GB left; free some, or choose a smaller geometry"
        )


def take_token_ids(config: PreTrainedConfig, tokenizer_dir: Path) -> None:
    """Special tokens as the tokenizer numbers them, or the model would look for pictures where there are none."""
    added = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    text = config.get_text_config()
    text.eos_token_id = ids["<|im_end|>"]
    text.bos_token_id = text.pad_token_id = ids["<|endoftext|>"]
    for name, token in TOKEN_IDS.items():
        if hasattr(config, name):
            setattr(config, name, ids[token])


def _random_block(std: float, seed: int) -> memoryview:
    """BLOCK_WEIGHTS bfloat16 weights as bytes, of mean 0 and this standard deviation.

    Sums of four uniform 16-bit integers, which reach 3.5 standard deviations and are close to normal. Unlike numpy's
    own normal distribution they need no logarithm, which the C libraries of two machines round differently, and numpy
    promises the bits of PCG64 for all times, not what it makes of them.
    """
    drawn = np.random.PCG64(seed).random_raw(BLOCK_WEIGHTS).view(np.uint16).reshape(-1, 4)
    centred = drawn.sum(axis=1, dtype=np.int32) - 2 * (2**16 - 1)
    scale = np.float32(std / math.sqrt((2**32 - 1) / 3))  # four times the variance of 0..65535
    rounded = torch.from_numpy(centred.astype(np.float32) * scale).to(torch.bfloat16)
    return memoryview(rounded.view(torch.uint8).numpy().tobytes())


def _write_shard(
    path: Path, tensors: dict[str, torch.Tensor], block: memoryview, seed: int, progress: tqdm[None]
) -> None:
    """One safetensors file: length of the header (8 bytes, little endian), header, data without gaps.

    By hand, as safetensors itself wants all tensors of a file at once. Source: its README, "Format".
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as safetensors aligns the data
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            for piece in _pieces(name, tensor, block, seed):
                progress.update(file.write(piece))


def _pieces(name: str, tensor: torch.Tensor, block: memoryview, seed: int) -> Iterator[bytes | memoryview]:
    """A tensor's bytes, in pieces no longer than the block."""
    if name.endswith(".bias"):
        yield bytes(tensor.nbytes)
    elif tensor.ndim == 1:  # nothing but a norm has a weight of one dimension
        yield _ONE * tensor.numel()
    else:
        first = int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little") % BLOCK_WEIGHTS
        position, left = 2 * first, tensor.nbytes
        while left:
            piece = block[position : position + left]
            yield piece
            position, left = 0, left - len(piece)
