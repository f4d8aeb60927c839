"""What evaluation takes: a batch of the longest prompts read at once, and then answered token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from stages.core.params.schema import DeviceParams
from stages.kit.memory.recorder import emptied, recorder_of
from stages.kit.memory.recording import Recording, Storage
from stages.kit.models.load import DTYPES, new_model


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How a profile computes answers."""

    device: DeviceParams
    precision: str
    attn: str


def record_answers(
    inference: Inference,
    config: PreTrainedConfig,
    batch: Mapping[str, torch.Tensor],
    *,
    batch_size: int,
    max_new_tokens: int,
) -> Recording:
    """One pass over the last questions of a batch, which keeps keys and values, and one logit each, while the other
    answers are all about to end. As a last moment of the same phase, the last token of answers that are all of full
    length.

    By then the cache holds questions and answers, and for an instant one layer's keys twice, as each token is appended
    (transformers' DynamicCache).

    batch: of the longest questions, without labels, as many as are read at once. batch_size: answers at once.
    """
    text, prompts, itemsize = config.get_text_config(), batch["input_ids"], DTYPES[inference.precision].itemsize
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys_of_an_answer = (prompts.shape[1] + max_new_tokens) * text.num_key_value_heads * width * itemsize  # in a layer
    with recorder_of(inference.device, inference.attn, config) as recorder:
        inputs = {name: emptied(tensor) for name, tensor in batch.items()}
        attn = inference.attn if inference.attn == "eager" else "sdpa"  # flash-attn's too: cuda.py has its kernels
        model = new_model(config, precision=inference.precision, attn=attn).eval()
        recorder.label(model.parameters(), "weights")
        recorder.label(inputs.values(), "activations")
        recorder.begin("forward")
        others = batch_size - len(prompts)
        recorder.add(2 * text.num_hidden_layers * others * keys_of_an_answer, "activations")
        with torch.inference_mode():
            output = model(**inputs, use_cache=True, logits_to_keep=1)
        recording = recorder.finish()
        del output
    end = max(max(storage.born, storage.died or 0) for storage in recording.storages) + 1
    for storage in recording.storages:
        if storage.budget != "weights" and storage.died is None:
            storage.died = end
    # The likeliest is chosen among fp32 logits.
    logits = batch_size * text.vocab_size * (itemsize + torch.float32.itemsize * (itemsize < torch.float32.itemsize))
    keys = (2 * text.num_hidden_layers + 1) * batch_size * keys_of_an_answer
    recording.storages += [
        Storage(keys, "activations", born=end + 1),
        Storage(logits, "logits", born=end + 2),
    ]
    return recording
