"""A tiny model of each family, built at random from its config, with its published chat template: a plain folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import chat_template_utils

from stages.models.load import auto_class
from stages.models.prompts import Processor, images_only, with_options
from tests import ROOT

TEMPLATES_DIR = Path(chat_template_utils.__file__).parent / "chat_templates"
PIECES = json.loads((ROOT / "data/tiny/qwen2-vl/tokenizer.json").read_text(encoding="utf-8"))
"""Pieces of byte-level BPE, a few hundred."""
QWEN_TOKENS = tuple(token["content"] for token in PIECES["added_tokens"])
PHI_TOKENS = ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
GEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}

TEMPLATES = {
    "qwen2": ("qwen2_5", QWEN_TOKENS, QWEN),
    "qwen2_moe": ("qwen2_5", QWEN_TOKENS, QWEN),
    "qwen2_vl": ("qwen2_5_vl", QWEN_TOKENS, QWEN),
    "qwen2_5_vl": ("qwen2_5_vl", QWEN_TOKENS, QWEN),
    "qwen3": ("qwen3", QWEN_TOKENS, QWEN),
    "qwen3_vl": ("qwen3_vl", QWEN_TOKENS, QWEN),
    "phi3": ("phi3", PHI_TOKENS, {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}),
    "gemma3_text": ("gemma3", GEMMA_TOKENS, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}),
    "llama": ("llama3_1", LLAMA_TOKENS, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
}
"""For each model_type: its published template by TRL's name, special tokens, and those with a role."""
ENDS = {"llama": "<|eot_id|>", "gemma3_text": "<end_of_turn>", "phi3": "<|end|>"}
"""End of a turn; <|im_end|> in the other families."""

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"intermediate_size": 128},  # rows of whole blocks, which a CPU can have in nf4
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3": {"head_dim": 32},
    # Features that go to the last layer reach no token that counts.
    "qwen3_vl": {"head_dim": 16, "num_hidden_layers": 3},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64},
    "qwen2_5_vl": {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    },
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}


def template_of(model_type: str) -> str:
    return (TEMPLATES_DIR / f"{TEMPLATES[model_type][0]}.jinja").read_text(encoding="utf-8")


def tokenizer_for(model_type: str) -> PreTrainedTokenizerFast:
    """The pieces of the tiny Qwen2-VL, with the family's special tokens and its published chat template."""
    _, special, named = TEMPLATES[model_type]
    pieces = json.dumps(PIECES | {"added_tokens": []})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(pieces), **named)
    # Without a name of their own, as those of Gemma 3, Llama and Phi-3 are published.
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    tokenizer.chat_template = with_options(template_of(model_type))
    tokenizer.model_ends = {*generation_config_for(model_type, tokenizer).eos_token_id}  # as load_processor sets it
    return tokenizer


def generation_config_for(model_type: str, tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(ENDS.get(model_type, "<|im_end|>"))]
    return GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id or 0)


def processor_for(model_type: str) -> Processor:
    tokenizer = tokenizer_for(model_type)
    if model_type not in VISION:
        return tokenizer
    size = {"shortest_edge": 3136, "longest_edge": 12544}
    images = Qwen2VLImageProcessorPil(size=size, patch_size=PATCH[model_type])
    return images_only(model_type)(images, tokenizer, chat_template=tokenizer.chat_template)


def config_for(model_type: str) -> Any:
    tokenizer = tokenizer_for(model_type)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    settings = {**TEXT, **OWN.get(model_type, {}), "vocab_size": len(tokenizer), **ids}
    if model_type not in VISION:
        return AutoConfig.for_model(model_type, **settings)
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    tokens = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{text}|>") for name, text in names.items()}
    return AutoConfig.for_model(model_type, text_config=settings, vision_config=VISION[model_type], **tokens)


def save_tiny_family(model_type: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a folder with a model of some 0.2 million random weights."""
    processor, config, tokenizer = processor_for(model_type), config_for(model_type), tokenizer_for(model_type)
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config)
    model.generation_config = generation_config_for(model_type, tokenizer)
    for each in (model.to(torch.bfloat16), processor):
        each.save_pretrained(folder)
    return folder
