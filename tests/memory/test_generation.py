"""The predicted memory of generation is what torch's profiler measures."""

import pytest
import torch

from stages.evaluation.generate import generated_tokens
from stages.evaluation.likelihood import _sums
from stages.internals.torch_internals import cpu_peak
from stages.memory.step import record_generation
from stages.models.load import DTYPES, auto_class
from stages.planning.ladder import prefill_batch_size
from tests.memory.small import R1, batch_of, config_of, peak_bytes, plan_of


@pytest.mark.parametrize(
    ("model", "batch_size", "length", "new_tokens", "attn"),
    [
        ("detection", 16, 128, 4, "sdpa"),
        ("text", 16, 128, 4, "sdpa"),
        ("moe", 32, 128, 4, "sdpa"),
        ("text", 16, 10, 60, "sdpa"),
        ("text", 16, 512, 4, "eager"),
    ],
)
def test_long_questions_and_long_completions_are_predicted(
    model: str, batch_size: int, length: int, new_tokens: int, attn: str
) -> None:
    plan = plan_of(**R1, micro_batch=prefill_batch_size(batch_size), max_length=length, attn=attn)
    config = config_of(model, (4, 2))
    batch = dict(batch_of(plan, config))
    del batch["labels"]
    recording = record_generation(plan, config, batch, batch_size=batch_size, max_new_tokens=new_tokens)
    generating = auto_class(config).from_config(config, attn_implementation=attn).eval()
    held = (*generating.parameters(), *generating.buffers(), *batch.values())
    size = len(batch["input_ids"])
    batches = ((list(range(first, first + size)), dict(batch)) for first in range(0, batch_size, size))
    limits = {"batch_size": batch_size, "max_new_tokens": new_tokens}
    with torch.inference_mode(), cpu_peak(held) as peak:
        completions = dict(generated_tokens(generating, batches, lambda _: False, **limits))
    assert [len(completions[number]) for number in range(batch_size)] == [new_tokens] * batch_size
    assert peak_bytes(recording) == pytest.approx(peak.size_bytes, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_of_likelihoods_are_predicted(precision: str) -> None:
    """A vocabulary so large that these are the fullest moment."""
    plan = plan_of(**R1, micro_batch=2, max_length=384, precision=precision)
    config = config_of("text", (4, 2))
    config.vocab_size = 30_000
    batch = dict(batch_of(plan, config))
    del batch["labels"]
    limits = {"batch_size": 2, "max_new_tokens": 4}
    without, recording = (
        record_generation(plan, config, batch, likelihoods=asked, **limits) for asked in (False, True)
    )
    model = auto_class(config).from_config(config, attn_implementation="sdpa", dtype=DTYPES[precision]).eval()
    held = (*model.parameters(), *model.buffers(), *batch.values())
    with torch.no_grad(), cpu_peak(held) as peak:
        _sums(model, batch, batch["attention_mask"].bool())
    assert peak_bytes(without) < 0.8 * peak.size_bytes
    assert peak_bytes(recording) == pytest.approx(peak.size_bytes, rel=0.02)
