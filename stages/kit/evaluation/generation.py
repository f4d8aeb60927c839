"""Greedy answers in batches, the same as one by one.

A batch shrinks as its answers end: what is left of it goes on alone. The loop is transformers' own but for that, so it
works for every model that generates with a DynamicCache.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from stages.core.errors import counted
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.batches import longest_first, prepared_ahead
from stages.kit.models.processors import Processor, encode, tokenizer_of

log = logging.getLogger(__name__)


@torch.inference_mode()
def generate_answers(
    model: PreTrainedModel,
    processor: Processor,
    questions: Sequence[Conversation],
    *,
    batch_size: int,
    max_new_tokens: int,
    max_length: int | None = None,
    complete: Callable[[str], bool] | None = None,
) -> list[str]:
    """The answer to each of these unanswered conversations, in order.

    max_new_tokens: where an answer is cut; how many were is said.
    max_length: tokens of question and answer together, to which a text of the question that may be cut is cut.
    complete: says of an answer so far that nothing is to follow, where not only the end of the turn does.
    Special tokens are kept; the end of the turn and padding are cut off. Padded on the left, so that every answer
    starts right after its question.
    """
    # One of its own: a fast tokenizer may not encode in one thread while it decodes in another.
    tokenizer = copy.deepcopy(tokenizer_of(processor))
    ends = _end_tokens(model, tokenizer)
    room = room_for_questions(max_length, max_new_tokens)

    def prepare(indices: list[int]) -> dict[str, torch.Tensor]:
        return encode(processor, [questions[index] for index in indices], padding_side="left", max_length=room)

    started = time.monotonic()
    answers: dict[int, str] = {}
    num_cut = 0
    for indices, inputs in prepared_ahead(longest_first(questions, batch_size), prepare):
        stops = [_WhenComplete(complete, tokenizer, inputs["input_ids"].shape[1])] if complete else []
        rows = model.generate(
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
            custom_generate=generate_shrinking,
        )
        for index, row in zip(indices, rows, strict=True):
            answers[index] = _decode(tokenizer, row, ends)
            num_cut += ends.isdisjoint(row) and not (complete and complete(answers[index]))
        rate = len(answers) / (time.monotonic() - started)
        log.info("answered %d/%d  %.1f samples/s", len(answers), len(questions), rate)
    if num_cut:
        log.warning("%s cut at max_new_tokens %d", counted(num_cut, "answer"), max_new_tokens)
    return [answers[index] for index in range(len(questions))]


def room_for_questions(max_length: int | None, max_new_tokens: int) -> int | None:
    """Tokens that a question may have, where question and answer together may have so many."""
    return None if max_length is None else max_length - max_new_tokens


def generate_shrinking(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    stopping_criteria: StoppingCriteriaList,
    logits_processor: object,  # noqa: ARG001 - both say nothing to a greedy choice
    generation_config: object,  # noqa: ARG001
    **inputs: Any,
) -> list[list[int]]:
    """A greedy decoding loop for `generate(custom_generate=...)`: rows leave the batch as soon as they have ended.

    input_ids: (B, T). inputs: the model's other ones, as `generate` prepares them, an empty cache among them.
    Returns the new tokens of each row.
    """
    batch, length = input_ids.shape
    answers: dict[int, list[int]] = {}
    rows = torch.arange(batch)  # of the whole batch, those that are left
    while len(rows):
        is_first = input_ids.shape[1] == length
        step = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=None if is_first else 1, is_first_iteration=is_first, **inputs
        )
        output = model(**step, return_dict=True)
        inputs = model._update_model_kwargs_for_generation(output, inputs)  # noqa: SLF001 - for loops like this one
        tokens = output.logits[:, -1].float().argmax(dim=-1)
        del output, step  # the first logits may be large
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        ended = stopping_criteria(input_ids, None)
        if ended.any():
            answers |= dict(zip(rows[ended.cpu()].tolist(), input_ids[ended, length:].tolist(), strict=True))
            going = (~ended).nonzero()[:, 0]
            rows, input_ids = rows[going.cpu()], input_ids[going]
            for name in ("attention_mask", "position_ids", "mm_token_type_ids"):  # (B, T), or (axes, B, T)
                if inputs.get(name) is not None:
                    inputs[name] = inputs[name].index_select(-2, going)
            inputs["past_key_values"].batch_select_indices(going)
    return [answers[row] for row in range(batch)]


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
