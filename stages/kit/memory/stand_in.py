"""What stands in for a base's tokenizer and for data, where they are not there yet."""

from __future__ import annotations

from math import isqrt

import torch
from transformers import PreTrainedConfig

from stages.core.params.schema import ImageParams
from stages.kit.models.folders import STAND_IN_DIR
from stages.kit.models.prompts import Processor, load_processor, tokenizer_of


def stand_in_processor(config: PreTrainedConfig, images: ImageParams | None) -> Processor:
    """A processor for a vision-language model, a tokenizer for a text model."""
    processor = load_processor(STAND_IN_DIR, images)
    return processor if hasattr(config, "vision_config") else tokenizer_of(processor)


def stand_in_batch(
    config: PreTrainedConfig, *, micro_batch: int, max_length: int, max_pixels: int | None
) -> dict[str, torch.Tensor]:
    """The largest micro-batch that a plan's limits allow, where there is no data yet to take one from.

    Every sample has max_length tokens; with pictures, one of max_pixels among them, or of as many as max_length has
    room for, as Qwen2-VL's processor cuts it into patches. All text counts in the loss.
    """
    ids = torch.zeros((micro_batch, max_length), dtype=torch.long)
    batch: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labels = torch.ones_like(ids)
    vision = getattr(config, "vision_config", None)
    if vision is not None and max_pixels is not None:
        side = vision.patch_size * vision.spatial_merge_size
        tokens = min(max_pixels // side**2, max_length - 2)  # one before it, and one to be learnt
        patches = tokens * vision.spatial_merge_size**2
        start, stop = 1, 1 + tokens
        ids[:, 0], ids[:, start:stop] = config.vision_start_token_id, config.image_token_id
        labels[:, :stop] = -100
        features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        rows = max(rows for rows in range(1, isqrt(tokens) + 1) if tokens % rows == 0)  # few windows, as a real one has
        grid = [1, rows * vision.spatial_merge_size, tokens // rows * vision.spatial_merge_size]
        batch |= {
            "pixel_values": torch.empty(micro_batch * patches, features),
            "image_grid_thw": torch.tensor([grid] * micro_batch),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }
    return batch | {"labels": labels}
