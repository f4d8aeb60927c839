"""Tiny models and conversations for tests: the real classes and files, random weights, a fraction of a second."""

from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from stages.core.params.schema import EvaluationParams
from stages.data.conversation import Conversation
from stages.evaluation.generate import TextGenerator
from stages.models.prompts import Processor, load_processor
from tests import ROOT

QUESTION = "Detect the bounding box of the nutrition table."
ANSWER = "<|object_ref_start|>nutrition-table<|object_ref_end|><|box_start|>({},{}),({},{})<|box_end|>"


def tiny_text_model(*, num_experts: int = 0) -> tuple[Qwen2ForCausalLM | Qwen2MoeForCausalLM, Any]:
    """A Qwen2 of random weights in `eval` mode, or a Qwen2Moe with so many experts, two of them for each token."""
    tokenizer: Any = load_processor(ROOT / "data/tiny/qwen2-folklore", None)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.3,  # far from uniform, so that what goes in matters
    }
    torch.manual_seed(0)
    if not num_experts:
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval(), tokenizer
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=32, norm_topk_prob=True)
    return Qwen2MoeForCausalLM(config).eval(), tokenizer


def generator_of(
    model: PreTrainedModel, processor: Processor, *, batch_size: int, max_new_tokens: int, complete: Any = None
) -> TextGenerator:
    """complete: the task's test of whether a completion is complete, if it has one."""
    task: Any = SimpleNamespace(**({"complete": lambda text, answer_format: complete(text)} if complete else {}))
    return TextGenerator(
        model=model,
        processor=processor,
        samples=task,
        answer_format=None,
        batch_size=batch_size,
        settings=EvaluationParams(max_new_tokens=max_new_tokens),
    )


def table_conversation(index: int, *, answered: bool = True) -> Conversation:
    """A white table on a plain ground, at a place that depends on `index`; sizes differ, so that batches are padded."""
    width, height = 84 + 28 * (index % 2), 84
    box = (5 + 7 * (index % 4), 10, 40 + 7 * (index % 4), 60)
    picture = Image.new("RGB", (width, height), (30, 60 + 20 * (index % 5), 90))
    ImageDraw.Draw(picture).rectangle(box, fill="white")
    shares = [1000 * side // size for side, size in zip(box, (width, height, width, height), strict=True)]
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    if answered:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": ANSWER.format(*shares)}]})
    return Conversation(sample_id=f"table-{index}", messages=messages, images=[picture])
