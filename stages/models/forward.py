"""A model's own forward: the logits that it makes of hidden states, whether TRL's loss is theirs, and its cache."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from stages.core.errors import UserError
from stages.internals.torch_internals import tree_leaves
from stages.internals.transformers_internals import is_stateful
from stages.models.load import library_errors

PROBE_TOKENS, PROBE_VOCABULARY = 16, 64
PROBE_SCALE = 20.0
"""Standard deviation of the probe's logits before any scaling: a soft cap of 30 shows."""


class _Hidden(BaseModelOutputWithPast):
    """Hidden states in the form of any backbone's outputs; the others are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def forward_from(model: PreTrainedModel, hidden: torch.Tensor, **inputs: Any) -> Any:
    """The output of a model's own forward, which scales and caps logits, with its backbone's hidden states given.

    hidden: (1, rows, width); the output's logits are (1, rows, vocabulary).
    """
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with patch.object(model.base_model, "forward", lambda *_, **__: _Hidden(last_hidden_state=hidden)):
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs)


@torch.no_grad()
def require_own_loss(model: PreTrainedModel) -> None:
    """Raises UserError unless TRL's loss is that of the model's own logits, on hidden states at random.

    TRL applies the head's weight itself, with scales and caps by the names that they have in some configurations
    (trl/trainer/utils.py): a model with others would learn by another loss, and nothing would show it.
    model: without weights, on the meta device; its head gets a small one of random weights.
    """
    from trl.trainer.utils import add_fused_lm_head  # slow to import

    head, drawn = model.get_output_embeddings(), torch.Generator().manual_seed(0)
    kind = model.config.model_type
    if head is None or model.base_model is model:
        raise UserError(f"a {kind} has no backbone with a head on it, which TRL's loss needs")
    width = head.weight.shape[1]
    hidden = torch.randn(1, PROBE_TOKENS, width, generator=drawn)
    weight = torch.randn(PROBE_VOCABULARY, width, generator=drawn) * PROBE_SCALE / width**0.5
    labels = torch.randint(PROBE_VOCABULARY, hidden.shape[:2], generator=drawn)
    with ExitStack() as stack:
        stack.enter_context(patch.object(head, "weight", nn.Parameter(weight)))
        if getattr(head, "bias", None) is not None:
            stack.enter_context(patch.object(head, "bias", nn.Parameter(torch.zeros(PROBE_VOCABULARY))))
        stack.enter_context(patch.dict(vars(model)))  # TRL replaces its forward
        stack.enter_context(library_errors(f"{kind} computes its logits otherwise than by a head on its backbone"))
        own = F.cross_entropy(forward_from(model, hidden).logits[0, :-1].float(), labels[0, 1:])
        add_fused_lm_head(model)
        trl = forward_from(model, hidden, labels=labels, fused_lm_head=True).loss
    if not abs(trl - own) <= 1e-3 * own:
        raise UserError(
            f"TRL's loss of a {kind} is {trl / own - 1:+.0%} off that of the model's own logits: the model scales or "
            "caps them as TRL does not know, and cannot be trained here"
        )


def forward_takes(model: PreTrainedModel) -> Collection[str]:
    """Names of the inputs of a model's forward."""
    return inspect.signature(type(model).forward).parameters


def has_plain_cache(model: PreTrainedModel) -> bool:
    """Whether a model's cache has keys and values of all tokens and nothing else, so that rows can be joined and
    dropped: no states of linear attention, convolutions or Mamba, and positions that are given."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers}
    return (
        not is_stateful(model)
        and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
        and {"position_ids", "logits_to_keep", "past_key_values"} <= {*forward_takes(model)}
    )


def layer_sizes(cache: Any) -> list[int]:
    """Bytes of each layer of a cache."""
    leaves = (tree_leaves(vars(layer)) for layer in cache.layers)
    return [sum(leaf.nbytes for leaf in each if isinstance(leaf, torch.Tensor)) for each in leaves]
