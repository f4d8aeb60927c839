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
    inference: Inference, config: PreTrainedConfig, batch: Mapping[str, torch.Tensor], *, max_new_tokens: int
) -> Recording:
    """One pass over the prompts, as `generate` begins: it keeps keys and values, and one logit each. As a last moment
    of the same phase, the last token of the longest answers.

    By then the cache holds prompt and answer, and for an instant one layer's keys twice, as each token is appended
    (transformers' DynamicCache).

    No answer of the batch ends before the others do.

    batch: of the longest prompts, without labels.
    """
    with recorder_of(inference.device, inference.attn, config) as recorder:
        inputs = {name: emptied(tensor) for name, tensor in batch.items()}
        model = new_model(config, precision=inference.precision).eval()
        recorder.label(model.parameters(), "weights")
        recorder.label(inputs.values(), "activations")
        recorder.begin("forward")
        with torch.inference_mode():
            output = model(**inputs, use_cache=True, logits_to_keep=1)
        recording = recorder.finish()
        del output
    end = max(max(storage.born, storage.died or 0) for storage in recording.storages) + 1
    for storage in recording.storages:
        if storage.budget != "weights" and storage.died is None:
            storage.died = end
    text, prompts, itemsize = config.get_text_config(), batch["input_ids"], DTYPES[inference.precision].itemsize
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys_of_a_layer = (
        prompts.shape[0] * (prompts.shape[1] + max_new_tokens) * text.num_key_value_heads * width * itemsize
    )
    # `generate` chooses among fp32 logits, of which it keeps a copy.
    logits = len(prompts) * text.vocab_size * (itemsize + 2 * torch.float32.itemsize)
    recording.storages += [
        Storage((2 * text.num_hidden_layers + 1) * keys_of_a_layer, "activations", born=end + 1),
        Storage(logits, "logits", born=end + 2),
    ]
    return recording
