"""What evaluation was predicted to take is what torch's profiler measures while a model really answers."""

import pytest
import torch

from stages.kit.evaluation.generation import generate_shrinking
from stages.kit.memory.answers import Inference, record_answers
from stages.kit.models.load import auto_class
from stages.kit.training.peak import cpu_peak
from tests.kit.memory.small import R1, batch_of, config_of, peak_bytes, plan_of


@pytest.mark.parametrize(
    ("model", "batch_size", "length", "new_tokens"),
    [("detection", 4, 128, 4), ("text", 4, 128, 4), ("moe", 4, 128, 4), ("text", 8, 10, 150)],
)
def test_long_questions_and_long_answers_are_predicted(
    model: str, batch_size: int, length: int, new_tokens: int
) -> None:
    plan, config = plan_of(**R1, micro_batch=batch_size, max_length=length), config_of(model, (4, 2))
    batch = dict(batch_of(plan, config))
    del batch["labels"]
    inference = Inference(device=plan.device, precision=plan.precision, attn=plan.attn)
    recording = record_answers(inference, config, batch, max_new_tokens=new_tokens)
    answering = auto_class(config).from_config(config).eval()
    held = (*answering.parameters(), *answering.buffers(), *batch.values())
    with torch.inference_mode(), cpu_peak(held) as peak:
        answering.generate(
            **batch,
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=4,
            custom_generate=generate_shrinking,
        )
    # In a small model much else is of the cache's size.
    assert peak_bytes(recording) == pytest.approx(peak.size_bytes, rel=0.03 if new_tokens > length else 0.02)
