"""The committed tiny bases: plain Hugging Face folders, with the chat template of Qwen2-VL."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from stages.models.folders import check_model_folder
from stages.models.prompts import load_processor
from tests import ROOT

TINY_DIR = ROOT / "data/tiny"
BASES = ("qwen2", "qwen2-folklore", "qwen2-vl")


@pytest.mark.parametrize("name", BASES)
def test_a_committed_base_is_a_plain_folder(name: str) -> None:
    check_model_folder(TINY_DIR / name)
    loader = AutoModelForImageTextToText if name.endswith("vl") else AutoModelForCausalLM
    model, info = loader.from_pretrained(TINY_DIR / name, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert load_processor(TINY_DIR / name, None).chat_template


@pytest.mark.parametrize("name", BASES)
def test_a_conversation_is_rendered_as_qwen2_vl_renders_it(name: str) -> None:
    """The expected text is that of Qwen2-VL-7B-Instruct's own template (its chat_template.json)."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_DIR / name)
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Here."}]},
        {"role": "user", "content": "And now?"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where?<|im_end|>\n"
        "<|im_start|>assistant\nHere.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    encoded = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, masked in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if masked]
    assert tokenizer.decode(answer) == "Here.<|im_end|>"
