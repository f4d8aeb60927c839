"""What evaluation takes: a batch of the longest prompts read at once, and then answered token by token."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from transformers import PreTrainedConfig

from stages.kit.memory.cuda import cuda_semantics
from stages.kit.memory.recorder import Recorder, emptied, room_for_fakes
from stages.kit.memory.recording import Recording, Storage
from stages.kit.models.load import DTYPES, new_model
from stages.kit.planning.prediction import Budget


def record_prompts(
    config: PreTrainedConfig, batch: Mapping[str, torch.Tensor], *, precision: str, flash_only: bool, on_cuda: bool
) -> Recording:
    """One pass over the prompts, without weights, as `generate` begins: it keeps keys and values, and one logit each.

    batch: of the longest prompts, without labels.
    """
    recorder = Recorder(fake=True, cuda=on_cuda, vocab_size=config.get_text_config().vocab_size)
    with ExitStack() as stack:
        if on_cuda:
            stack.enter_context(cuda_semantics(flash_only=flash_only))
        stack.enter_context(room_for_fakes())
        stack.enter_context(recorder)
        inputs = {name: emptied(tensor) for name, tensor in batch.items()}
        model = new_model(config, precision=precision).eval()
        recorder.label(model.parameters(), "weights")
        recorder.label(inputs.values(), "activations")
        recorder.begin("forward")
        with torch.inference_mode():
            output = model(**inputs, use_cache=True, logits_to_keep=1)
        recording = recorder.finish()
        del output
    return recording


def cache_bytes(config: PreTrainedConfig, *, batch_size: int, length: int, precision: str) -> int:
    """Keys and values of every layer for a batch of this many tokens each, in the arithmetic's precision."""
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * width
    return batch_size * length * per_token * DTYPES[precision].itemsize


def record_answers(
    config: PreTrainedConfig,
    batch: Mapping[str, torch.Tensor],
    *,
    precision: str,
    flash_only: bool,
    on_cuda: bool,
    max_new_tokens: int,
) -> Recording:
    """`record_prompts`, and what the last token of the longest answers takes, as a last moment of the same phase.

    Then the cache holds prompt and answer, and for an instant one layer's keys twice, as each token is appended
    (transformers' DynamicCache).
    """
    recording = record_prompts(config, batch, precision=precision, flash_only=flash_only, on_cuda=on_cuda)
    prompts = batch["input_ids"]
    cache = cache_bytes(config, batch_size=len(prompts), length=prompts.shape[1] + max_new_tokens, precision=precision)
    text = config.get_text_config()
    # `generate` chooses among fp32 logits, of which it keeps a copy.
    logits = len(prompts) * text.vocab_size * (DTYPES[precision].itemsize + 2 * torch.float32.itemsize)
    end = max(max(storage.born, storage.died or 0) for storage in recording.storages) + 1
    for storage in recording.storages:
        if storage.budget != "weights" and storage.died is None:
            storage.died = end
    last: tuple[tuple[int, Budget], ...] = (
        (cache + cache // (2 * text.num_hidden_layers), "activations"),
        (logits, "logits"),
    )
    for tick, (size_bytes, budget) in enumerate(last, start=end + 1):
        recording.storages.append(Storage(size_bytes=size_bytes, phase="forward", budget=budget, born=tick))
    return recording
