"""Greedy answers in batches, the same as one by one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from stages.core.errors import counted
from stages.kit.data.conversation import Conversation
from stages.kit.models.processors import Processor, encode, tokenizer_of

log = logging.getLogger(__name__)


@torch.inference_mode()
def generate_answers(
    model: PreTrainedModel,
    processor: Processor,
    ask: Callable[[int], Conversation],
    count: int,
    *,
    batch_size: int,
    max_new_tokens: int,
    max_length: int | None = None,
    complete: Callable[[str], bool] | None = None,
) -> list[str]:
    """The answer to each of `count` unanswered conversations, in order.

    max_new_tokens: where an answer is cut; how many were is said.
    max_length: tokens of question and answer together, to which a text of the question that may be cut is cut.
    complete: says of an answer so far that nothing is to follow, where not only the end of the turn does.
    Special tokens are kept; the end of the turn and padding are cut off. Padded on the left, so that every answer
    starts right after its question.
    """
    tokenizer = tokenizer_of(processor)
    ends = _end_tokens(model, tokenizer)
    started = time.monotonic()
    answers: list[str] = []
    num_cut = 0
    for first in range(0, count, batch_size):
        conversations = [ask(index) for index in range(first, min(first + batch_size, count))]
        room = None if max_length is None else max_length - max_new_tokens
        inputs = encode(processor, conversations, padding_side="left", max_length=room)
        prompt_length = inputs["input_ids"].shape[1]
        stops = [_WhenComplete(complete, tokenizer, prompt_length)] if complete else []
        output = model.generate(
            **{name: tensor.to(model.device) for name, tensor in inputs.items()},
            max_new_tokens=max_new_tokens,
            do_sample=False,
            # What a checkpoint's generation_config.json says about sampling or penalties plays no part.
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            eos_token_id=sorted(ends),
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList(stops),
        )
        for row in output[:, prompt_length:].tolist():
            answers.append(_decode(tokenizer, row, ends))
            num_cut += ends.isdisjoint(row) and not (complete and complete(answers[-1]))
        rate = len(answers) / (time.monotonic() - started)
        log.info("answered %d/%d  %.1f samples/s", len(answers), count, rate)
    if num_cut:
        log.warning("%s cut at max_new_tokens %d", counted(num_cut, "answer"), max_new_tokens)
    return answers


class _WhenComplete(StoppingCriteria):
    """Ends each answer of a batch by itself."""

    def __init__(self, complete: Callable[[str], bool], tokenizer: PreTrainedTokenizerBase, prompt_length: int) -> None:
        self.complete = complete
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.Tensor:
        """input_ids: (B, T), questions and answers so far. Returns (B,)."""
        answers = self.tokenizer.batch_decode(input_ids[:, self.prompt_length :], clean_up_tokenization_spaces=False)
        return torch.tensor([self.complete(answer) for answer in answers], device=input_ids.device)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = model.generation_config.eos_token_id
    ends = {configured} if isinstance(configured, int) else set(configured or ())
    return ends | {token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None}


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: set[int]) -> str:
    length = next((position for position, token in enumerate(ids) if token in ends), len(ids))
    return tokenizer.decode(ids[:length], skip_special_tokens=False, clean_up_tokenization_spaces=False)
