"""Generate completions with a loaded model: greedily and in batches, with the same text as one by one.

A completion leaves the batch as soon as it has ended, and the next questions take the free places. Questions are read
an eighth of a batch at a time: reading takes the most memory per row, and on a CPU a small batch stays in the caches.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from stages.core.errors import UserError, pluralize
from stages.core.params.schema import EvaluationParams, ProfileParams, TemplateOptions
from stages.data.conversation import Conversation
from stages.models.forward import has_plain_cache
from stages.models.load import gpus_in_use, limit_visible_gpus
from stages.models.merge import load_certified
from stages.models.prompts import NO_OPTIONS, Processor, encode, end_tokens, load_processor, samples_for, tokenizer_of
from stages.planning.ladder import lowered_batch_size, prefill_batch_size
from stages.planning.memory_use import MemoryLog

if TYPE_CHECKING:
    from stages.evaluation.likelihood import AnswerLikelihood
    from stages.mixture.certificate import Routing

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 2.0
GREEDY: Mapping[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""Sampling and penalties of a checkpoint's generation_config.json are ignored."""


class Progress:
    """Logs how many of a number are done, and how fast: every LOG_INTERVAL_S, and at the end."""

    def __init__(self, text: str, total: int) -> None:
        self.text, self.total = text, total
        self.started = self.logged = time.monotonic()

    def __call__(self, done: int) -> None:
        if (now := time.monotonic()) - self.logged > LOG_INTERVAL_S or done == self.total:
            self.logged = now
            log.info(self.text, done, self.total, done / (now - self.started))


class Completion(str):  # noqa: SLOT000 - it has an attribute
    """The text of a completion, special tokens kept, without the end of its turn."""

    is_cut = False
    """Whether max_new_tokens ended it."""


@dataclass(frozen=True)
class Ending:
    """Finds where completions of a task's questions end, and their text, in the tokens of any engine."""

    tokenizer: PreTrainedTokenizerBase
    ends: set[int]
    """Its end tokens."""
    complete: Callable[[str], bool] | None = None
    """The task's test of whether a partial completion is complete; None if only the end of the turn ends it."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, samples: ModuleType, answer_format: str | None) -> Ending:
        complete = partial(samples.complete, answer_format=answer_format) if hasattr(samples, "complete") else None
        return cls(tokenizer, end_tokens(tokenizer), complete)

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens up to the first end token, special tokens kept, without a lead (gpt-oss's channel)."""
        ids = ids[: self._length(ids)]
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.removeprefix(getattr(self.tokenizer, "answer_lead", ""))

    def is_whole(self, ids: Sequence[int]) -> bool:
        """Whether the completion ends after these tokens, the last of which is new."""
        return ids[-1] in self.ends or (self.complete is not None and self.complete(self.text(ids)))

    def whole(self, ids: list[int]) -> list[int]:
        """The tokens of another engine's completion up to where our own model would end it."""
        ids = ids[: self._length(ids) + 1]
        beginnings = (ids[:length] for length in range(1, len(ids))) if self.complete else ()
        return next(filter(self.is_whole, beginnings), ids)

    def completion(self, ids: Sequence[int]) -> Completion:
        """The completion of these tokens, the end of its turn among them unless it was cut."""
        completion = Completion(self.text(ids))
        completion.is_cut = ids[-1] not in self.ends and not (self.complete and self.complete(completion))
        return completion

    def _length(self, ids: Sequence[int]) -> int:
        """The number of tokens before the first end token."""
        return next((position for position, token in enumerate(ids) if token in self.ends), len(ids))


def warn_of_cuts(completions: Iterable[Completion], max_new_tokens: int) -> None:
    if num_cut := sum(completion.is_cut for completion in completions):
        log.warning("%s cut at max_new_tokens %d", pluralize(num_cut, "completion"), max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class TextGenerator:
    """A loaded model with what it takes to generate completions for a task's questions."""

    engine: ClassVar[str] = "transformers"
    model: PreTrainedModel
    processor: Processor
    samples: ModuleType
    """Module of the task."""
    answer_format: str | None
    batch_size: int
    """Generation batch size, from `batch_size_for`."""
    settings: EvaluationParams

    @property
    def model_samples(self) -> Any:
        """The task's samples for this model."""
        return samples_for(self.samples, self.model.config.model_type, self.processor)

    @torch.no_grad()  # in inference mode nothing that it caches could be used in training
    def completions(self, questions: Sequence[Conversation]) -> list[Completion]:
        """The completion of each of these conversations, which end with a question, in order. The log says how many
        were cut at max_new_tokens."""
        # A second tokenizer, as a fast one may not encode in one thread while it decodes in another.
        ending = Ending.of(copy.deepcopy(tokenizer_of(self.processor)), self.samples, self.answer_format)
        max_new_tokens = self.settings.max_new_tokens
        at_once, room = prefill_batch_size(self.batch_size), self.settings.room
        batches = encoded_batches(self.processor, questions, at_once, padding_side="left", max_length=room)
        progress = Progress("completions %d/%d  %.1f samples/s", len(questions))
        completions: dict[int, Completion] = {}
        for index, tokens in generated_tokens(
            self.model, batches, ending.is_whole, batch_size=self.batch_size, max_new_tokens=max_new_tokens
        ):
            completions[index] = ending.completion(tokens)
            progress(len(completions))
        warn_of_cuts(completions.values(), max_new_tokens)
        return [completions[index] for index in range(len(questions))]

    def likelihoods(self, conversations: Sequence[Conversation]) -> list[AnswerLikelihood]:
        """Likelihood of the answers in each answered conversation, in order."""
        from stages.evaluation.likelihood import answer_log_likelihoods

        return answer_log_likelihoods(self, conversations)

    def routing(self, conversations: Sequence[Conversation]) -> list[Routing] | None:
        """Routing of each answered conversation, in order; None for a model without routers."""
        from stages.evaluation.likelihood import routing

        return routing(self, conversations)

    def batches(
        self, conversations: Sequence[Conversation], **options: Any
    ) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
        """Batches of answered conversations as `encoded_batches` makes them, on the model's device. Only a shortenable
        text is cut at the settings' max_length. options: of `encode`."""
        at_once, options = prefill_batch_size(self.batch_size), options | {"max_length": self.settings.max_length}
        for indices, batch in encoded_batches(self.processor, conversations, at_once, padding_side="right", **options):
            yield indices, {name: tensor.to(self.model.device) for name, tensor in batch.items()}


def batch_size_for(settings: EvaluationParams, num_questions: int, *, largest: int, attempt: int) -> int:
    """The batch size of params.yaml, or with `auto` the largest, halved `attempt` times.

    largest: by the plan, or MAX_BATCH_SIZE. At most all questions at once, rounded up to a power of two.
    Raises UserError if the batch cannot be halved so often.
    """
    needed = 1 << (num_questions - 1).bit_length()
    batch_size = min(largest, needed) if settings.batch_size == "auto" else settings.batch_size
    lowered = lowered_batch_size(batch_size, attempt)
    if lowered is None:
        raise UserError(f"a batch of {batch_size} cannot be halved {attempt} times")
    return lowered


def load_generator(
    model_dir: Path,
    profile: ProfileParams,
    samples: ModuleType,
    *,
    answer_format: str | None,
    batch_size: int,
    template_options: TemplateOptions = NO_OPTIONS,
) -> tuple[TextGenerator, MemoryLog]:
    """The model of a folder on one device of the profile, ready to generate, and the memory that loading took.

    samples: of the task. template_options: of a baseline; a trained model's template has its own.
    Raises UserError for a model that the task does not have.
    """
    device, precision, attn = profile.device.one(), profile.memory.precision, profile.memory.attn
    limit_visible_gpus(device)
    memory = MemoryLog(gpus_in_use(device))
    model = load_certified(model_dir, device=device, precision=precision, attn=attn).eval()
    memory.loaded()
    samples.check(model.config.model_type)
    generator = TextGenerator(
        model=model,
        processor=load_processor(model_dir, profile.images, template_options),
        samples=samples,
        answer_format=answer_format,
        batch_size=batch_size,
        settings=profile.evaluation,
    )
    return generator, memory


def generated_tokens(
    model: PreTrainedModel,
    batches: Iterable[tuple[list[int], dict[str, torch.Tensor]]],
    is_whole: Callable[[list[int]], bool],
    *,
    batch_size: int,
    max_new_tokens: int,
) -> Iterator[tuple[int, list[int]]]:
    """Each question's number and the tokens of its completion, in the order in which they end.

    batches: numbers of questions, and the model's inputs for them, padded on the left so that every completion starts
    right after its question. A batch is read as soon as there is room for all of it. is_whole: whether a completion
    ends after these tokens.
    """
    if not has_plain_cache(model):
        yield from _generated(model, batches, is_whole, max_new_tokens=max_new_tokens)
        return
    waiting = iter(batches)
    following = next(waiting, None)
    rows: _Rows | None = None
    generated: dict[int, list[int]] = {}
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
            generated.setdefault(number, []).append(token)
        ended = {
            number
            for number in grown.numbers
            if len(generated[number]) == max_new_tokens or is_whole(generated[number])
        }
        if ended:
            yield from ((number, generated.pop(number)) for number in sorted(ended))
            rows = rows.without(ended)


def _generated(
    model: PreTrainedModel,
    batches: Iterable[tuple[list[int], dict[str, torch.Tensor]]],
    is_whole: Callable[[list[int]], bool],
    *,
    max_new_tokens: int,
) -> Iterator[tuple[int, list[int]]]:
    """`generated_tokens` for a cache of another kind: batch by batch, by the model's own `generate`."""
    for numbers, inputs in batches:
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        length = inputs["input_ids"].shape[1]
        wholes = [0] * len(numbers)  # the length of each completion that has ended

        def ended(ids: torch.Tensor, _scores: object, *, length: int = length, wholes: list[int] = wholes) -> Any:
            for row, tokens in enumerate(ids[:, length:].tolist()):
                wholes[row] = wholes[row] or (len(tokens) if is_whole(tokens) else 0)
            return torch.tensor(wholes, device=ids.device) > 0

        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stopping_criteria": [ended]}
        ids = model.generate(**inputs, **GREEDY, **options, pad_token_id=0)
        for number, tokens, whole in zip(numbers, ids[:, length:].tolist(), wholes, strict=True):
            yield number, tokens[: whole or max_new_tokens]


@dataclass
class _Rows:
    """Unfinished completions, one a row."""

    numbers: list[int]
    """Number of the question by row."""
    cache: DynamicCache
    mask: torch.Tensor
    """(B, T), 0 for padding, on the left."""
    positions: torch.Tensor
    """Positions of the last tokens: (B, 1), or (axes, B, 1)."""
    tokens: torch.Tensor
    """(B, 1): the last tokens, which are not in the cache yet."""

    def step(self, model: PreTrainedModel) -> None:
        """Generate one more token in each row."""
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
        """These and the other rows. Caches are joined layer by layer: only one layer's is ever in memory twice."""
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
        """The rows that are left, without padding that only the others needed; None if no row is left."""
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
    """Read the questions, and generate the first token of each completion."""
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    # A DynamicCache keeps all tokens, in layers of sliding attention too: only such rows can be joined.
    options: dict[str, Any] = {"past_key_values": DynamicCache(), "cache_implementation": None, "max_new_tokens": 1}
    output, prepared = model.generate(**inputs, **GREEDY, **options, pad_token_id=0, custom_generate=_first_pass)
    cache = prepared["past_key_values"]
    return _Rows(
        numbers, cache, inputs["attention_mask"], prepared["position_ids"][..., -1:], _likeliest(output.logits)
    )


def _first_pass(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    logits_processor: object,  # noqa: ARG001 - greedy decoding needs none of the three
    stopping_criteria: object,  # noqa: ARG001
    generation_config: object,  # noqa: ARG001
    **inputs: Any,
) -> tuple[Any, dict[str, Any]]:
    """For `generate(custom_generate=...)`, which prepares the inputs of every family: caches, positions, images."""
    step = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs)
    return model(**step, return_dict=True), inputs


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """logits: (B, T, vocabulary). Returns (B, 1): the next token of each row."""
    return logits[:, -1].float().argmax(dim=-1)[:, None]


def longest_first(conversations: Sequence[Conversation], batch_size: int) -> list[list[int]]:
    """Batches of indices. Within a batch there is little padding, and the first takes the most memory.

    Sorted by pixels, then by characters: nearly the order by tokens, without rendering or decoding anything.
    """

    def size(index: int) -> tuple[int, int]:
        conversation = conversations[index]
        parts = (part for message in conversation.messages for part in message["content"])
        num_pixels = sum(image.width * image.height for image in conversation.images)
        return num_pixels, sum(len(part.get("text", "")) for part in parts)

    order = sorted(range(len(conversations)), key=size, reverse=True)
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def encoded_batches(
    processor: Processor, conversations: Sequence[Conversation], batch_size: int, **options: Any
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Batches of conversations by their indices, as `longest_first` orders them, and the model's inputs for each.

    A thread encodes one batch ahead; an error of it is raised when its batch is due. options: of `encode`.
    """

    def prepare(indices: list[int]) -> dict[str, torch.Tensor]:
        return encode(processor, [conversations[index] for index in indices], **options)

    batches = longest_first(conversations, batch_size)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare") as thread:
        upcoming = [thread.submit(prepare, batch) for batch in batches[:1]]
        for batch, following in zip_longest(batches, batches[1:]):
            prepared = upcoming.pop().result()
            if following is not None:
                upcoming.append(thread.submit(prepare, following))
            yield batch, prepared
