"""Likelihood of given answers under a model, and the routing of their tokens in a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.data.conversation import Conversation
from stages.evaluation.generate import Progress, TextGenerator
from stages.mixture.certificate import Routing
from stages.mixture.routing import outputs_of, routers_of, routing_by_row
from stages.models.forward import forward_from
from stages.planning.ladder import LOGIT_ROWS


@dataclass(frozen=True)
class AnswerLikelihood:
    sum_logprob: float
    """Natural logarithm of the probability of the whole answer, the end of its turn included."""
    num_tokens: int
    """Tokens of the answer, the end of its turn included."""


@torch.no_grad()  # in inference mode nothing that it caches could be used in training
def answer_log_likelihoods(generator: TextGenerator, conversations: Sequence[Conversation]) -> list[AnswerLikelihood]:
    """Likelihood of the answers in each answered conversation, in order.

    Results are the same in batches as one by one, but for rounding. Log-probabilities are computed in fp32 whatever the
    model's precision, and only for tokens of the answers, LOGIT_ROWS at a time.
    """
    likelihoods: dict[int, AnswerLikelihood] = {}
    progress = Progress("scored %d/%d completions  %.1f/s", len(conversations))
    for indices, inputs in generator.batches(conversations, mark_answers=True):
        in_answer = inputs.pop("answers")
        sums = _sums(generator.model, inputs, in_answer)
        for index, total, tokens in zip(indices, sums, in_answer.sum(dim=1).tolist(), strict=True):
            likelihoods[index] = AnswerLikelihood(total, tokens)
        progress(len(likelihoods))
    return finite([likelihoods[index] for index in range(len(conversations))])


def finite(likelihoods: list[AnswerLikelihood]) -> list[AnswerLikelihood]:
    """These likelihoods. Raises UserError if one is not a number."""
    if broken := sum(not isfinite(each.sum_logprob) for each in likelihoods):
        raise UserError(
            f"{broken} of {len(likelihoods)} answers have no likelihood, as the model's figures are not finite: they "
            "overflow, or its weights are not"
        )
    return likelihoods


def _sums(model: PreTrainedModel, inputs: dict[str, torch.Tensor], in_answer: torch.Tensor) -> list[float]:
    """Log-probabilities of the answers' tokens, summed by row. in_answer: (B, T) bool."""
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state  # (B, T, width)
    rows, columns = in_answer[:, 1:].nonzero(as_tuple=True)  # token t is predicted at t - 1
    sums = torch.zeros(len(in_answer), dtype=torch.float64, device=in_answer.device)
    for row, column in zip(rows.split(LOGIT_ROWS), columns.split(LOGIT_ROWS), strict=True):
        logits = forward_from(model, hidden[row, column][None]).logits[0].float()  # (rows, vocabulary)
        tokens = inputs["input_ids"][row, column + 1]
        chosen = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        sums.index_add_(0, row, chosen.double())
    return sums.tolist()


@torch.no_grad()  # in inference mode nothing that it caches could be used in training
def routing(generator: TextGenerator, conversations: Sequence[Conversation]) -> list[Routing] | None:
    """Routing of each conversation, in order, without its padding; None for a model without routers."""
    routers = routers_of(generator.model)
    if not routers:
        return None
    by_index: dict[int, Routing] = {}
    for indices, inputs in generator.batches(conversations):
        with outputs_of(routers) as outputs:
            generator.model.base_model(**inputs, use_cache=False)
        by_index |= zip(indices, routing_by_row(outputs, inputs["attention_mask"]), strict=True)
    return [by_index[index] for index in range(len(conversations))]
