"""How likely a model finds answers that are given to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.batches import longest_first, prepared_ahead
from stages.kit.models.prompts import Processor, encode

log = logging.getLogger(__name__)

LOGIT_ROWS = 256
"""Tokens whose logits are held at once: 150 MiB in fp32 for a vocabulary of 152 thousand."""


@dataclass(frozen=True)
class AnswerLikelihood:
    sum_logprob: float
    """Natural logarithm of the probability of the whole answer, the end of its turn included."""
    num_tokens: int
    """Of the answer, the end of its turn included."""


@torch.inference_mode()
def answer_log_likelihoods(
    model: PreTrainedModel,
    processor: Processor,
    conversations: Sequence[Conversation],
    *,
    batch_size: int,
    max_length: int | None = None,
) -> list[AnswerLikelihood]:
    """How likely the model, in `eval` mode, finds the assistant's words in each answered conversation, in order.

    max_length: tokens of a conversation, to which a text of it that may be cut is cut; its answer never is.
    The same in batches as one by one, but for rounding. Log-probabilities are computed in fp32 whatever the model's
    precision, and only for tokens of the answers, LOGIT_ROWS at a time.
    """

    def prepare(indices: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        asked = [conversations[index] for index in indices]
        inputs = encode(processor, asked, padding_side="right", max_length=max_length, mark_answers=True)
        return inputs, inputs.pop("answers")

    likelihoods: dict[int, AnswerLikelihood] = {}
    started = time.monotonic()
    for indices, (inputs, counted) in prepared_ahead(longest_first(conversations, batch_size), prepare):
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        sums = _sums(model, inputs, counted.to(model.device))
        for index, total, tokens in zip(indices, sums, counted.sum(dim=1).tolist(), strict=True):
            likelihoods[index] = AnswerLikelihood(total, tokens)
        rate = len(likelihoods) / (time.monotonic() - started)
        log.info("weighed %d/%d answers  %.1f answers/s", len(likelihoods), len(conversations), rate)
    return [likelihoods[index] for index in range(len(conversations))]


def _sums(model: PreTrainedModel, inputs: dict[str, torch.Tensor], counted: torch.Tensor) -> list[float]:
    """The log-probabilities of the counted tokens, summed by row. counted: (B, T)."""
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state  # (B, T, width)
    rows, columns = counted[:, 1:].nonzero(as_tuple=True)  # what stands at t is predicted at t - 1
    sums = torch.zeros(len(counted), dtype=torch.float64, device=counted.device)
    for row, column in zip(rows.split(LOGIT_ROWS), columns.split(LOGIT_ROWS), strict=True):
        logits = model.get_output_embeddings()(hidden[row, column]).float()  # (rows, vocabulary)
        tokens = inputs["input_ids"][row, column + 1]
        chosen = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        sums.index_add_(0, row, chosen.double())
    return sums.tolist()
