"""A base of random weights in a known geometry, streamed to disk: as large and as fast as the real one.

Memory and speed do not depend on the values of weights, so both can be measured without the real ones.
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
from transformers import PreTrainedConfig

from stages.kit.models.folders import geometry_config_path
from stages.kit.models.load import load_config, meta_model
from stages.kit.models.shards import write_shards

log = logging.getLogger(__name__)

SEED = 0

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
    keeps the geometry's size; the tokenizer leaves most of it idle.
    Raises UserError for an unknown geometry, and where the disk has no room.
    """
    config = load_config(geometry_config_path(geometry).parent)
    for name in (*TOKENIZER_FILES, *([PROCESSOR_FILE] if hasattr(config, "vision_config") else [])):
        shutil.copyfile(tokenizer_dir / name, folder / name)
    take_token_ids(config, tokenizer_dir)
    write_random_weights(config, folder, seed=seed)
    config.save_pretrained(folder)


def write_random_weights(config: PreTrainedConfig, folder: Path, *, seed: int) -> None:
    """Write the safetensors of a model, bfloat16, in shards with their index, in the names that the hub has them in.

    Norms are ones, biases zeros, and all else is about normal with the config's initializer_range: a stretch of one
    block of random weights that starts where seed and name say. The same seed gives the same bytes everywhere.
    Raises UserError where the disk has no room for it.
    """
    block = _random_block(config.get_text_config().initializer_range, seed)
    started = time.monotonic()
    total_bytes = write_shards(
        meta_model(config).to(torch.bfloat16),
        folder,
        lambda name, tensor: _pieces(name, tensor, block, seed),
        what="random weights",
    )
    seconds = time.monotonic() - started
    log.info("random weights: %.1f MB in %.1f s, %.2f GB/s", total_bytes / 1e6, seconds, total_bytes / 1e9 / seconds)


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
    own normal distribution they give the same bytes on every machine: numpy promises the bits of PCG64 alone.
    """
    drawn = np.random.PCG64(seed).random_raw(BLOCK_WEIGHTS).view(np.uint16).reshape(-1, 4)
    centred = drawn.sum(axis=1, dtype=np.int32) - 2 * (2**16 - 1)
    scale = np.float32(std / math.sqrt((2**32 - 1) / 3))  # four times the variance of 0..65535
    rounded = torch.from_numpy(centred.astype(np.float32) * scale).to(torch.bfloat16)
    return memoryview(rounded.view(torch.uint8).numpy().tobytes())


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
