"""Greedy answers in batches, the same as one by one.

An answer leaves the batch as soon as it has ended, and the next questions take the places of those that have. Questions
are read an eighth of a batch at a time: reading takes the most memory a row, and on a CPU a small batch stays in the
caches.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from stages.core.errors import counted
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.batches import longest_first, prepared_ahead
from stages.kit.models.prompts import Processor, encode, tokenizer_of
from stages.kit.planning.ladder import read_at_once

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 2.0


def completion_of(samples: ModuleType, answer_format: str | None) -> Callable[[str], bool] | None:
    """What a task's `samples` have to say of whether an answer so far is complete; None where they leave that to the
    end of the turn."""
    return samples.completion(answer_format) if hasattr(samples, "completion") else None


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

    batch_size: answers at once.
    max_new_tokens: where an answer is cut; how many were is said.
    max_length: tokens of question and answer together, to which a text of the question that may be cut is cut.
    complete: says of an answer so far that nothing is to follow, where not only the end of the turn does.
    Special tokens are kept; the end of the turn is cut off.
    """
    # One of its own: a fast tokenizer may not encode in one thread while it decodes in another.
    tokenizer = copy.deepcopy(tokenizer_of(processor))
    ends = end_tokens(model.generation_config, tokenizer)
    room = room_for_questions(max_length, max_new_tokens)

    def prepare(indices: list[int]) -> dict[str, torch.Tensor]:
        return encode(processor, [questions[index] for index in indices], padding_side="left", max_length=room)

    def is_whole(tokens: list[int]) -> bool:
        return tokens[-1] in ends or (complete is not None and complete(decoded(tokenizer, tokens, ends)))

    batches = prepared_ahead(longest_first(questions, read_at_once(batch_size)), prepare)
    started = said = time.monotonic()
    answers: dict[int, str] = {}
    num_cut = 0
    for index, tokens in answered_tokens(
        model, batches, is_whole, batch_size=batch_size, max_new_tokens=max_new_tokens
    ):
        answers[index] = decoded(tokenizer, tokens, ends)
        num_cut += not is_whole(tokens)
        if (now := time.monotonic()) - said > LOG_INTERVAL_S or len(answers) == len(questions):
            said = now
            log.info("answered %d/%d  %.1f samples/s", len(answers), len(questions), len(answers) / (now - started))
    if num_cut:
        log.warning("%s cut at max_new_tokens %d", counted(num_cut, "answer"), max_new_tokens)
    return [answers[index] for index in range(len(questions))]


def room_for_questions(max_length: int | None, max_new_tokens: int) -> int | None:
    """Tokens that a question may have, where question and answer together may have so many."""
    return None if max_length is None else max_length - max_new_tokens


def answered_tokens(
    model: PreTrainedModel,
    batches: Iterable[tuple[list[int], dict[str, torch.Tensor]]],
    is_whole: Callable[[list[int]], bool],
    *,
    batch_size: int,
    max_new_tokens: int,
) -> Iterator[tuple[int, list[int]]]:
    """Each question's number and the tokens of its answer, in the order in which they end.

    batches: numbers of questions, and the model's inputs for them, padded on the left so that every answer starts right
    after its question. They are read as soon as there is room for all of them. is_whole: says whether nothing is to
    follow after these tokens.
    """
    waiting = iter(batches)
    following = next(waiting, None)
    rows: _Rows | None = None
    answers: dict[int, list[int]] = {}
    while following is not None or rows is not None:
        if following is not None and (rows is None or len(rows.numbers) + len(following[0]) <= batch_size):
            read = _read(model, *following)
            following = next(waiting, None)
            grown = read
            rows = read if rows is None else rows.joined(read)
        else:
            assert rows is not None
            rows.step(model)
            grown = rows
        for number, token in zip(grown.numbers, grown.tokens[:, 0].tolist(), strict=True):
            answers.setdefault(number, []).append(token)
        ended = {
            number for number in grown.numbers if len(answers[number]) == max_new_tokens or is_whole(answers[number])
        }
        if ended:
            yield from ((number, answers.pop(number)) for number in sorted(ended))
            rows = rows.without(ended)


@dataclass
class _Rows:
    """Answers under way, one a row."""

    numbers: list[int]
    """By row, the number of its question."""
    cache: DynamicCache
    mask: torch.Tensor
    """(B, T), 0 where a row is padded, on the left."""
    positions: torch.Tensor
    """Positions of the last tokens: (B, 1), or (axes, B, 1)."""
    tokens: torch.Tensor
    """(B, 1): the last ones, which are not in the cache yet."""

    def step(self, model: PreTrainedModel) -> None:
        """One more token for each."""
        self.mask, self.positions = pad(self.mask, (0, 1), value=1), self.positions + 1
        output = model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.tokens = _likeliest(output.logits)

    def joined(self, other: _Rows) -> _Rows:
        """These and the other rows, whose caches become one; no layer's is there twice but the one being copied."""
        length = max(self.mask.shape[1], other.mask.shape[1])
        ours, theirs = length - self.mask.shape[1], length - other.mask.shape[1]
        for layer, further in zip(self.cache.layers, other.cache.layers, strict=True):
            for name in ("keys", "values"):
                parts = pad(getattr(layer, name), (0, 0, ours, 0)), pad(getattr(further, name), (0, 0, theirs, 0))
                setattr(layer, name, torch.cat(parts))
                setattr(further, name, None)
        return _Rows(
            [*self.numbers, *other.numbers],
            self.cache,
            torch.cat([pad(self.mask, (ours, 0)), pad(other.mask, (theirs, 0))]),
            torch.cat([self.positions, other.positions], dim=-2),
            torch.cat([self.tokens, other.tokens]),
        )

    def without(self, ended: set[int]) -> _Rows | None:
        """The rows that are left, without the padding that only the others needed; None where none is."""
        kept = [row for row, number in enumerate(self.numbers) if number not in ended]
        if not kept:
            return None
        rows = torch.tensor(kept, device=self.mask.device)
        mask = self.mask[rows]
        start = int(mask.any(dim=0).int().argmax())
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[rows, :, start:], layer.values[rows, :, start:]
        positions = self.positions.index_select(-2, rows)
        return _Rows([self.numbers[row] for row in kept], self.cache, mask[:, start:], positions, self.tokens[rows])


def _read(model: PreTrainedModel, numbers: list[int], inputs: dict[str, torch.Tensor]) -> _Rows:
    """The questions, and the first token of each answer."""
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    # Sampling and penalties of a checkpoint's generation_config.json are ignored.
    greedy: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    # Layers of it keep all tokens, those of sliding attention too: only such rows can be joined.
    options: dict[str, Any] = {"past_key_values": DynamicCache(), "cache_implementation": None, "max_new_tokens": 1}
    output, prepared = model.generate(**inputs, **greedy, **options, pad_token_id=0, custom_generate=_first_pass)
    cache = prepared["past_key_values"]
    return _Rows(
        numbers, cache, inputs["attention_mask"], prepared["position_ids"][..., -1:], _likeliest(output.logits)
    )


def _first_pass(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    logits_processor: object,  # noqa: ARG001 - greedy answers need none of the three
    stopping_criteria: object,  # noqa: ARG001
    generation_config: object,  # noqa: ARG001
    **inputs: Any,
) -> tuple[Any, dict[str, Any]]:
    """For `generate(custom_generate=...)`, which prepares the inputs of every family: caches, positions, pictures."""
    step = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs)
    return model(**step, return_dict=True), inputs


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """logits: (B, T, vocabulary). Returns (B, 1): the next token of each row."""
    return logits[:, -1].float().argmax(dim=-1)[:, None]


def end_tokens(settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens after which nothing of an answer follows. settings: the model's generation_config.json."""
    configured = settings.eos_token_id
    ends = {configured} if isinstance(configured, int) else set(configured or ())
    return ends | {token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None}


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: set[int]) -> str:
    """The text of an answer, special tokens kept, up to the first token that ends it."""
    length = next((position for position, token in enumerate(ids) if token in ends), len(ids))
    return tokenizer.decode(ids[:length], skip_special_tokens=False, clean_up_tokenization_spaces=False)
