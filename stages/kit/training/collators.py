"""From conversations to a batch of tensors; the recipe chooses the tokens that count in the loss.

A batch has a row for each sample, padded, or all samples behind one another in a single row, without padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import MODEL_MAPPING, PreTrainedConfig

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.families import vision_tokens
from stages.kit.models.load import load_config
from stages.kit.models.prompts import Processor, count_tokens, encode, samples_for, tokenizer_of

if TYPE_CHECKING:
    from stages.core.params.schema import Loss
    from stages.kit.planning.plan import Plan

IGNORED = -100
"""The label of a token that does not count (torch.nn.CrossEntropyLoss's ignore_index)."""
FEATURES = "image_features"
"""The entry of a batch that has features of its pictures in place of their pixels (features.py): one picture after the
other, (picture tokens, width of the language model)."""


def padded(samples: Sequence[Mapping[str, torch.Tensor]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """The batch of samples that were collated one by one, as if together: padded on the right."""
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


class ConversationCollator:
    """Batches of answered conversations, padded on the right or packed; a text that may be cut is cut to `max_length`.

    loss: `assistant-only` counts the assistant's words and the end-of-turn token; `all-tokens` counts all text, chat
    markup included. Padding and vision tokens never count. With `router-labels` a token's label is not the token, but
    the number of the expert that is to have it; padding does not count.
    """

    def __init__(
        self,
        processor: Processor,
        records: Sequence[Any],
        converse: Callable[[Any], Conversation],
        *,
        loss: Loss,
        max_length: int,
        experts: Sequence[int] | None = None,
        packed_for: PreTrainedConfig | None = None,
    ) -> None:
        """converse: the answered conversation of a record; picklable, for data-loader workers. experts: with
        `router-labels`, the number of each record's. packed_for: the model that takes the samples in one row."""
        assert (experts is not None) == (loss == "router-labels"), loss
        self.processor = processor
        self.records = records
        self.converse = converse
        self.max_length = max_length
        self.experts = experts
        self.loss: Loss = loss
        self.packed_for = packed_for
        tokenizer = tokenizer_of(processor)
        self.pad_token_id: int = tokenizer.pad_token_id
        vocabulary = tokenizer.get_vocab()
        vision = [vocabulary[token] for token in vision_tokens() if token in vocabulary]
        self._vision = torch.tensor(vision, dtype=torch.long)

    @classmethod
    def of_plan(
        cls, plan: Plan, processor: Processor, records: Sequence[Any], samples: ModuleType
    ) -> ConversationCollator:
        """Batches as a plan's training takes them. samples: this module of its task.

        Raises UserError where domains are not as the plan has them, and for a sample without pictures where training
        needs some in each.
        """
        config = load_config(Path(plan.base_dir))
        asked = samples_for(samples, config.model_type, processor)
        converse = partial(asked.conversation, answered=True, answer_format=plan.answer_format)
        _require_pictures(plan, map(converse, records))
        experts = experts_of(plan, records, samples) if plan.loss == "router-labels" else None
        return cls(
            *(processor, records, converse),
            loss=plan.loss,
            max_length=plan.max_length,
            experts=experts,
            packed_for=config if plan.padding_free else None,
        )

    def __call__(self, examples: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        """examples: rows of a dataset with the column `sample`. Returns the model's inputs and `labels`, as `padded` or
        `packed` has them."""
        return self.as_planned(self.one_a_row(examples))

    def as_planned(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A padded batch as the training takes it, padded or packed."""
        return batch if self.packed_for is None else packed(batch, self.packed_for, self.loss)

    def one_a_row(self, examples: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        """The padded batch, (B, T), whichever the training takes."""
        numbers = [int(example["sample"]) for example in examples]
        conversations = [self.converse(self.records[number]) for number in numbers]
        options: dict[str, Any] = {"max_length": self.max_length, "mark_answers": self.loss == "assistant-only"}
        batch = encode(self.processor, conversations, padding_side="right", **options)
        answers = batch.pop("answers", None)
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, (number, conversation) in enumerate(zip(numbers, conversations, strict=True)):
            length = int(batch["attention_mask"][row].sum())
            self._refuse_too_long(conversation, length)
            if self.experts is not None:
                labels[row, :length] = self.experts[number]
                continue
            ids = batch["input_ids"][row, :length]
            counted = ~torch.isin(ids, self._vision) if answers is None else answers[row, :length]
            labels[row, :length][counted] = ids[counted]
        return {**batch, "labels": labels}

    @cached_property
    def lengths(self) -> list[int]:
        """The length of each sample in tokens, without making its pictures' pixels.

        Raises UserError naming the first sample that is longer than max_length: now, not hours into the training.
        """
        lengths = []
        for record in self.records:
            conversation = self.converse(record)
            lengths.append(count_tokens(self.processor, conversation, max_length=self.max_length))
            self._refuse_too_long(conversation, lengths[-1])
        return lengths

    def lengths_said(self) -> str:
        """The lengths in words. Raises as `lengths` does."""
        ordered = sorted(self.lengths)
        return (
            f"samples of {ordered[0]} to {ordered[-1]} tokens, half of them at most {ordered[len(ordered) // 2]}; "
            f"limit {self.max_length}"
        )

    def _refuse_too_long(self, conversation: Conversation, length: int) -> None:
        if length > self.max_length:
            raise UserError(
                f"sample {conversation.sample_id} has {length} tokens, more than max_length {self.max_length}; "
                + ("lower the profile's images.max_pixels or " if conversation.images else "")
                + "raise the recipe's max_length"
            )


def packed(batch: Mapping[str, torch.Tensor], config: PreTrainedConfig, loss: Loss) -> dict[str, torch.Tensor]:
    """The samples of a padded batch behind one another in a row, and nothing in between.

    Each sample's positions begin at 0, which is all that keeps it apart from the others: there is no mask. Its last
    token has no next one, so the first label of the sample behind it does not count, unless labels are the tokens' own,
    as with `router-labels`.

    batch: (B, T), padded on the right. Returns (1, L); where pictures' tokens have places in time, height and width,
    position_ids (4, 1, L): those in the text first, by which attention goes (transformers, Qwen2VLTextModel.forward).
    """
    row = dict(batch)
    mask = row.pop("attention_mask")
    real = mask.bool()
    positions = (mask.cumsum(1) - 1)[None]
    if hasattr(MODEL_MAPPING[type(config)], "get_rope_index"):
        row.setdefault("mm_token_type_ids", torch.zeros_like(mask))
        pictures = (row["mm_token_type_ids"], row.get("image_grid_thw"))
        places, _ = _without_weights(config).get_rope_index(row["input_ids"], *pictures, attention_mask=mask)
        positions = torch.cat([positions, places])
    if loss != "router-labels":
        row["labels"] = row["labels"].clone()
        row["labels"][:, 0] = IGNORED
    for name in row.keys() & {"input_ids", "labels", "mm_token_type_ids"}:
        row[name] = row[name][real][None]
    row["position_ids"] = positions[:, real] if len(positions) == 1 else positions[:, None, real]
    return row


def _without_weights(config: PreTrainedConfig) -> Any:
    """The config's model without its modules, which knows the places of its pictures' tokens."""
    kind = MODEL_MAPPING[type(config)]
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    return model


def _require_pictures(plan: Plan, conversations: Iterable[Conversation]) -> None:
    """Raises UserError for a sample without pictures where training needs some in each.

    It would give no gradient where only the parts that see pictures are trained. And processes that share these parts'
    weights or gradients wait for each other there: one that has no picture keeps the others waiting for ever.
    """
    trained = set(plan.parts.trained())
    alone = "llm" not in trained
    shared = plan.placement == "sharded" or (plan.placement == "ddp" and trained != {"llm"})
    if not alone and not shared:
        return
    examples = {bool(each.images): each.sample_id for each in conversations}
    if False in examples and (alone or True in examples):
        why = "trains only parts that see pictures" if alone else f"shares them among processes ({plan.placement})"
        fix = "train llm too" if alone else "take placement single or balanced"
        raise UserError(
            f"sample {examples[False]} has no picture, and recipe {plan.recipe} {why}; {fix}, or leave such samples out"
        )


def experts_of(plan: Plan, records: Sequence[Any], samples: ModuleType) -> list[int]:
    """The number of the expert whose domain each record is of.

    Raises UserError for a task without domains, for a sample whose domain no expert has, and for a domain without
    samples, as its expert would never be chosen again.
    """
    assert plan.domains, plan.loss
    if not hasattr(samples, "domain"):
        raise UserError(f"task {plan.task} knows no domains of its samples, so loss router-labels has nothing to teach")
    domains = [samples.domain(record) for record in records]
    found = Counter(domains)
    for domain, count in found.items():
        if domain not in plan.domains:
            raise UserError(
                f"{plan.data_dir} has training samples of the domain {domain}, {count:,} of {len(domains):,}, which no "
                f"expert has; domains of recipe {plan.recipe} are {', '.join(plan.domains)}"
            )
    for domain in plan.domains:
        if domain not in found:
            raise UserError(
                f"{plan.data_dir} has no training sample of the domain {domain}, so its expert would never be chosen; "
                f"it has {', '.join(found)}"
            )
    return [plan.domains.index(domain) for domain in domains]
