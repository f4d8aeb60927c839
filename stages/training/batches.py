"""From conversations to a batch of tensors; the recipe's loss decides which tokens count.

A batch has a padded row for each sample (B, T), or all samples one after the other in a single row (1, L).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import MODEL_MAPPING, PreTrainedConfig

from stages.core.errors import UserError
from stages.core.families import VISION_TOKENS
from stages.core.params.schema import Loss
from stages.data.conversation import Conversation
from stages.models.load import load_config
from stages.models.prompts import (
    Processor,
    check_carried,
    count_tokens,
    encode,
    fuses_with_prompt,
    samples_for,
    tokenizer_of,
)
from stages.planning.plan import Plan

IGNORED = -100
"""Label of a token that does not count (torch.nn.CrossEntropyLoss's ignore_index)."""
FEATURES = "image_features"
"""Entry of a batch with features of its images in place of their pixels (features.py): (image tokens, width of the
language model), one image after the other."""


class TooLong(UserError):
    """Samples with more tokens than max_length."""

    def __init__(self, samples: Sequence[tuple[Conversation, int]], max_length: int, *, some_fit: bool) -> None:
        """samples: each with its length. some_fit: whether there are others, which are not too long."""
        self.table = "".join(f"{conversation.sample_id}\t{length}\n" for conversation, length in samples)
        (first, length), others = samples[0], len(samples) - 1
        super().__init__(
            f"sample {first.sample_id} has {length} tokens, more than max_length {max_length}"
            + (f", and {others:,} more are too long; " if others else "; ")
            + ("lower the profile's images.max_pixels or " if first.images else "")
            + "raise the recipe's max_length"
            + (", or leave such samples out (skip_too_long: true in the recipe)" if some_fit else ": no sample fits")
        )


@dataclass(eq=False, repr=False)
class ConversationCollator:
    """Batches of answered conversations, padded on the right or packed; a text that may be cut is cut to `max_length`.

    loss: `assistant-only` counts the assistant's words and the end-of-turn token; `all-tokens` counts all text, chat
    markup included. Padding and vision tokens never count. With `router-labels` a token's label is the number of its
    expert; padding does not count.
    """

    processor: Processor
    records: Sequence[Any]
    converse: Callable[[Any], Conversation]
    """The answered conversation of a record; picklable, for data-loader workers."""
    _: KW_ONLY
    loss: Loss
    max_length: int
    experts: Sequence[int] | None = None
    """With `router-labels`, the number of each record's expert."""
    packed_for: PreTrainedConfig | None = None
    """The model that takes the samples in one row."""

    def __post_init__(self) -> None:
        assert (self.experts is not None) == (self.loss == "router-labels"), self.loss
        vocabulary = tokenizer_of(self.processor).get_vocab()
        vision = [vocabulary[token] for token in VISION_TOKENS if token in vocabulary]
        self._vision = torch.tensor(vision, dtype=torch.long)

    @classmethod
    def for_plan(
        cls, plan: Plan, processor: Processor, records: Sequence[Any], samples: ModuleType
    ) -> ConversationCollator:
        """The collator of a plan's training, without samples that it skips. samples: the task's module of this name.

        Raises UserError if domains differ from the plan's, and for a sample without images if each needs some.
        """
        config = load_config(Path(plan.base_dir))
        for_model = samples_for(samples, config.model_type, processor)
        converse = partial(for_model.conversation, answered=True, answer_format=plan.recipe.answer_format)
        if plan.skip_too_long:
            tokens = partial(count_tokens, processor, max_length=(limit := plan.recipe.max_length))
            records = [each for each in records if tokens(converse(each)) <= limit] or records
        _require_images(plan, map(converse, records))
        return cls(
            *(processor, records, converse),
            loss=plan.recipe.loss,
            max_length=plan.recipe.max_length,
            experts=experts_of(plan, records, samples) if plan.recipe.loss == "router-labels" else None,
            packed_for=config if plan.padding_free else None,
        )

    def __call__(self, examples: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        """The model's inputs and `labels`, padded or packed. examples: rows of a dataset with the column `sample`."""
        batch = self.padded_batch(examples)
        return batch if self.packed_for is None else packed(batch, self.packed_for, self.loss)

    def padded_batch(self, examples: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        """The padded batch, (B, T), whether or not the training packs it."""
        numbers = [int(example["sample"]) for example in examples]
        conversations = [self.converse(self.records[number]) for number in numbers]
        options: dict[str, Any] = {"max_length": self.max_length, "mark_answers": self.loss == "assistant-only"}
        batch = encode(self.processor, conversations, padding_side="right", **options)
        answers = batch.pop("answers", None)
        labels = torch.full_like(batch["input_ids"], IGNORED)
        lengths = batch["attention_mask"].sum(1).tolist()
        self._refuse_too_long(zip(conversations, lengths, strict=True))
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            if self.experts is not None:
                labels[row, :length] = self.experts[number]
                continue
            ids = batch["input_ids"][row, :length]
            counts = ~torch.isin(ids, self._vision) if answers is None else answers[row, :length]
            labels[row, :length][counts] = ids[counts]
        return {**batch, "labels": labels}

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each sample in tokens, computed without the pixels of its images.

        Raises TooLong for samples that are longer than max_length, and UserError for the first one that cannot be
        learnt as it is.
        """
        check_carried(self.processor, map(self.converse, self.records))
        lengths = []
        for conversation in map(self.converse, self.records):
            if self.loss == "all-tokens" and conversation.unlearnt:
                raise UserError(
                    f"sample {conversation.sample_id} has turns that are not to be learnt, which loss all-tokens would "
                    "learn; take assistant-only"
                )
            lengths.append(count_tokens(self.processor, conversation, max_length=self.max_length))
        self._refuse_too_long(zip(map(self.converse, self.records), lengths, strict=True))
        return lengths

    def length_summary(self) -> str:
        """Raises as `lengths` does."""
        ordered = sorted(self.lengths)
        fused = sum(fuses_with_prompt(self.processor, self.converse(record)) for record in self.records)
        return (
            f"samples of {ordered[0]} to {ordered[-1]} tokens, half of them at most {ordered[len(ordered) // 2]}; "
            f"limit {self.max_length}"
            + f"; in {fused:,} the answer's first token fuses with the prompt and is not learnt"
            * (fused > 0)
        )

    def require_positions(self, config: PreTrainedConfig, validated: Iterable[Conversation], limit: int | None) -> None:
        """Raises as `lengths` does, and UserError for a sample with more tokens than the base has positions.

        validated: conversations with their reference answers. limit: evaluation.max_length.
        """
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
        trained = zip(map(self.converse, self.records), self.lengths, strict=True)
        scored = ((each, count_tokens(self.processor, each, max_length=limit)) for each in validated)
        for conversation, length in chain(trained, scored):
            if length > positions:
                raise UserError(
                    f"sample {conversation.sample_id} has {length} tokens, and the base has {positions} positions "
                    "(max_position_embeddings of its config.json); leave such samples out, or take another base"
                )

    def largest_batch(self, micro_batch: int, max_length: float = math.inf) -> dict[str, Any]:
        """The longest samples in tokens, the longest first; all if there are fewer. max_length: of these, if as many
        are so short.

        An image takes tokens by its pixels, so these have the most pixels too, if all or none have images.
        """
        ordered = sorted(range(len(self.lengths)), key=lambda sample: (-self.lengths[sample], sample))
        longer = sum(length > max_length for length in self.lengths)
        first = min(longer, max(0, len(ordered) - micro_batch))
        return self([{"sample": sample} for sample in ordered[first : first + micro_batch]])

    def _refuse_too_long(self, samples: Iterable[tuple[Conversation, int]]) -> None:
        if too_long := [(conversation, length) for conversation, length in samples if length > self.max_length]:
            raise TooLong(too_long, self.max_length, some_fit=len(too_long) < len(self.records))


def padded(samples: Sequence[Mapping[str, torch.Tensor]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """The padded batch of samples that were collated one by one, equal to collating them together."""
    values = {"input_ids": pad_token_id, "labels": IGNORED, "attention_mask": 0, "mm_token_type_ids": 0}
    batch = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        tensors = [sample[name] for sample in samples if name in sample]
        if name in values:
            rows = [row for tensor in tensors for row in tensor]
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=values[name])
        else:
            batch[name] = torch.cat(tensors)
    return batch


def packed(batch: Mapping[str, torch.Tensor], config: PreTrainedConfig, loss: Loss) -> dict[str, Any]:
    """The samples of a padded batch one after the other in a row, without padding.

    Each sample's positions begin at 0, and there is no mask: attention takes the ends of the samples (cu_seq_lens_q and
    _k, (samples + 1,) int32) and the longest one's length (max_length_q and _k) as Python ints, so no layer waits
    for the GPU. A sample's last token has no next one, so the first label of the sample behind it does not count,
    unless labels are the tokens' own, as with `router-labels`.

    batch: (B, T), padded on the right. Returns (1, L). If image tokens have positions in time, height and width,
    position_ids are (4, 1, L): the positions in the text come first (transformers, Qwen2VLTextModel.forward).
    """
    row: dict[str, Any] = dict(batch)
    mask = row.pop("attention_mask")
    real = mask.bool()
    positions = (mask.cumsum(1) - 1)[None]
    if hasattr(MODEL_MAPPING[type(config)], "get_rope_index"):
        row.setdefault("mm_token_type_ids", torch.zeros_like(mask))
        images = (row["mm_token_type_ids"], row.get("image_grid_thw"))
        places, _ = _without_weights(config).get_rope_index(row["input_ids"], *images, attention_mask=mask)
        positions = torch.cat([positions, places])
    if loss != "router-labels":
        row["labels"] = row["labels"].clone()
        row["labels"][:, 0] = IGNORED
    for name in row.keys() & {"input_ids", "labels", "mm_token_type_ids"}:
        row[name] = row[name][real][None]
    row["position_ids"] = positions[:, real] if len(positions) == 1 else positions[:, None, real]
    lengths = mask.sum(1)
    ends, longest = pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _without_weights(config: PreTrainedConfig) -> Any:
    """The config's model without its modules, which can compute the positions of image tokens."""
    kind = MODEL_MAPPING[type(config)]
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    return model


def _require_images(plan: Plan, conversations: Iterable[Conversation]) -> None:
    """Raises UserError for a sample without images if training needs some in each.

    Without an image, parts that see images get no gradient, and processes that share their weights or gradients would
    wait for each other for ever.
    """
    trained = set(plan.recipe.parts.trained())
    alone = "llm" not in trained
    shared = plan.is_sharded or (plan.memory.placement == "ddp" and trained != {"llm"})
    if not alone and not shared:
        return
    examples = {bool(each.images): each.sample_id for each in conversations}
    if False in examples and (alone or True in examples):
        why = "trains only parts that see images" if alone else f"shares them among processes ({plan.memory.placement})"
        fix = "train llm too" if alone else "take placement single or balanced"
        raise UserError(
            f"sample {examples[False]} has no image, and recipe {plan.name} {why}; {fix}, or leave such samples out"
        )


def experts_of(plan: Plan, records: Sequence[Any], samples: ModuleType) -> list[int]:
    """The number of the expert for the domain of each record.

    Raises UserError for a task without domains, and unless experts and samples have the same ones: an expert without
    samples would never be chosen again.
    """
    assert plan.domains, plan.recipe.loss
    if not hasattr(samples, "domain"):
        raise UserError(
            f"samples of task {plan.recipe.task} have no domains, so there is nothing for loss router-labels"
        )
    domains = [samples.domain(record) for record in records]
    counts = Counter(domains)
    if counts.keys() != {*plan.domains}:
        raise UserError(
            f"{plan.data_dir} has training samples of {', '.join(f'{name} ({n:,})' for name, n in counts.items())}, "
            f"but the experts of {plan.name} are of {', '.join(plan.domains)}; each domain needs samples and an expert"
        )
    return [plan.domains.index(domain) for domain in domains]
