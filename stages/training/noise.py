"""Noise on embeddings while a model trains (NEFTune, arXiv 2310.05914)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def noisy_embeddings(model: Any, inputs: Mapping[str, torch.Tensor], alpha: float) -> Iterator[None]:
    """Within the block, each embedding of a token has noise: uniform within alpha / sqrt(tokens of its sample x width).

    transformers' own hook takes the length of the row instead, with its padding or with all samples that are packed in
    it. Drawn from torch's random numbers, which checkpoints hold. inputs: a micro-batch, padded or packed.
    """
    if (mask := inputs.get("attention_mask")) is not None:
        tokens = mask.sum(1)[:, None, None]
    else:
        lengths = inputs["cu_seq_lens_q"].diff()
        tokens = lengths.repeat_interleave(lengths, output_size=inputs["input_ids"].shape[1])[None, :, None]

    def add(_table: Any, _ids: Any, embedded: torch.Tensor) -> torch.Tensor:
        bounds = alpha / (tokens.to(embedded.device) * embedded.shape[-1]).sqrt()
        return embedded + torch.empty_like(embedded).uniform_(-1, 1) * bounds.to(embedded.dtype)

    with model.get_input_embeddings().register_forward_hook(add):
        yield
