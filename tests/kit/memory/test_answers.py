"""What evaluation was predicted to take is what torch's profiler measures while a model really answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen2Config, Qwen2MoeConfig

from stages.kit.memory.answers import cache_bytes, record_answers
from stages.kit.memory.stand_in import stand_in_batch
from stages.kit.models.load import auto_class, load_config
from stages.kit.training.peak import cpu_peak

GEOMETRY: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "detection": load_config(Path("data/tiny/qwen2-vl")),
    "text": Qwen2Config(**GEOMETRY),
    "moe": Qwen2MoeConfig(
        **GEOMETRY, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=128
    ),
}


def questions(config: PreTrainedConfig, *, batch_size: int, length: int) -> dict[str, torch.Tensor]:
    batch = stand_in_batch(config, micro_batch=batch_size, max_length=length, max_pixels=224 * 224)
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def predicted_bytes(config: PreTrainedConfig, batch: dict[str, torch.Tensor], max_new_tokens: int) -> int:
    recording = record_answers(
        config, batch, precision="fp32", flash_only=False, on_cuda=False, max_new_tokens=max_new_tokens
    )
    return max(peak.size_bytes for peak in recording.peaks().values())


def measured_bytes(config: PreTrainedConfig, batch: dict[str, torch.Tensor], max_new_tokens: int) -> int:
    model = auto_class(config).from_config(config).eval()
    held = (*model.parameters(), *model.buffers(), *batch.values())
    with torch.inference_mode(), cpu_peak(held) as peak:
        model.generate(
            **batch, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, do_sample=False, pad_token_id=4
        )
    return peak.size_bytes


@pytest.mark.parametrize("model", CONFIGS)
def test_long_questions_are_predicted(model: str) -> None:
    batch = questions(CONFIGS[model], batch_size=4, length=128)
    assert predicted_bytes(CONFIGS[model], batch, 4) == pytest.approx(
        measured_bytes(CONFIGS[model], batch, 4), rel=0.02
    )


def test_long_answers_are_predicted() -> None:
    """In a small model much else is of the cache's size."""
    text = CONFIGS["text"]
    batch = questions(text, batch_size=8, length=10)
    assert predicted_bytes(text, batch, 150) == pytest.approx(measured_bytes(text, batch, 150), rel=0.03)


def test_the_cache_has_two_tensors_a_layer_of_the_heads_that_are_shared() -> None:
    text = CONFIGS["text"]
    assert cache_bytes(text, batch_size=3, length=10, precision="bf16") == 3 * 10 * 4 * 2 * 2 * 32 * 2
