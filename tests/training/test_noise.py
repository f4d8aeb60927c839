"""The noise of NEFTune has the size of its paper, whatever samples a micro-batch has beside one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from stages.training.batches import packed
from stages.training.noise import noisy_embeddings

WIDTH, ALPHA, LENGTHS = 256, 5.0, (9, 4)
MASK = torch.tensor([[1] * length + [0] * (9 - length) for length in LENGTHS])
PADDED = {"input_ids": MASK.clone(), "attention_mask": MASK, "labels": MASK.clone()}


class Model(nn.Module):
    """A table of embeddings, all zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH)
        nn.init.zeros_(self.table.weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.table


@pytest.mark.parametrize("is_packed", [False, True])
def test_noise_is_uniform_within_a_bound_by_the_tokens_of_the_sample(is_packed: bool) -> None:
    model, batch = Model(), packed(PADDED, Qwen2Config(), "all-tokens") if is_packed else PADDED
    with noisy_embeddings(model, batch, ALPHA):
        noise = model.table(batch["input_ids"]).detach()
    samples = noise[0].split(LENGTHS) if is_packed else [noise[row, :length] for row, length in enumerate(LENGTHS)]
    for sample, length in zip(samples, LENGTHS, strict=True):
        bound = ALPHA / (length * WIDTH) ** 0.5
        assert 0.98 * bound < sample.abs().max() <= bound
        assert sample.std() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert abs(sample.mean()) < 0.05 * bound
    assert not model.table(batch["input_ids"]).any(), "none after the block"
