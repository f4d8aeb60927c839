"""Builds a tiny Qwen2-VL or Qwen2 from the real transformers classes, without network.

It is saved as a plain Hugging Face folder like the big model's: the same architecture, special tokens, chat format and
image processing, so it takes the same path through every stage. Only the sizes, the vocabulary (byte-level BPE trained
on a given corpus) and the weights (random) differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stages.kit.models.prompts import Processor, images_only

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
SPECIAL_TOKENS = (
    *(END_OF_TEXT, "<|im_start|>", END_OF_TURN, "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
"""All of Qwen2-VL's, which Qwen2.5's text models have too."""

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
"""ChatML as Qwen2-VL and Qwen2 render it; `generation` marks what the assistant says, its end of turn included."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of a tiny model."""

    vocab_size: int
    """Byte-level pieces, at least 256; special tokens come on top."""
    hidden_size: int
    """A multiple of 2 x num_heads."""
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    """A divisor of num_heads."""
    vision: Mapping[str, int] = field(default_factory=dict)
    """depth, embed_dim (a multiple of 4 x num_heads), num_heads and mlp_ratio of Qwen2-VL's vision tower."""
    pixels: tuple[int, int] = (0, 0)
    """Least and largest area of an image after resizing; 224 x 224 is 64 visual tokens."""


def train_tokenizer(corpus: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Byte-level BPE as Qwen2's, in which digits stay apart, with Qwen2-VL's special tokens and chat format.

    corpus: texts to learn the pieces from, without special tokens. Any other text can be encoded too, down to single
    bytes.
    """
    pieces = Tokenizer(models.BPE())
    pieces.normalizer = normalizers.NFC()
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pieces.train_from_iterator(corpus, trainer)
    bpe = json.loads(pieces.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        bos_token=None,
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=4096,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def build_tiny(corpus: Iterable[str], geometry: Geometry, *, seed: int = 0) -> tuple[Any, Any]:
    """A model with random float32 weights and its processor: a Qwen2-VL, or a Qwen2 with tied embeddings and its
    tokenizer where the geometry has no vision tower. The same arguments give the same weights.

    corpus: texts for the tokenizer to learn its pieces from. Sets torch's random seed.
    """
    tokenizer = train_tokenizer(corpus, geometry.vocab_size)
    end_of_text, end_of_turn = tokenizer.pad_token_id, tokenizer.eos_token_id
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    language = {
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_key_value_heads,
        "rope_parameters": rope,
        "rms_norm_eps": 1e-6,
        "vocab_size": -(-len(tokenizer) // 64) * 64,  # a multiple of 64, as the big one's is
        "max_position_embeddings": 4096,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_turn,
        "pad_token_id": end_of_text,
    }
    processor: Any = tokenizer
    torch.manual_seed(seed)
    model: Any
    if geometry.vision:
        pairs = geometry.hidden_size // geometry.num_heads // 2
        # Rotary frequencies from fast to slow, divided among time, height and width as in Qwen2-VL. Time is idle in an
        # image, and a few fast ones tell its few rows apart.
        rope["mrope_section"] = [1, max(2, pairs // 10), pairs - 1 - max(2, pairs // 10)]
        tower = {"hidden_size": geometry.hidden_size, "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0}}
        names = ("image_pad", "video_pad", "vision_start", "vision_end")
        image, video, start, end = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names)
        config = Qwen2VLConfig(
            text_config=language,
            vision_config={**geometry.vision, **tower},
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=False,
        )
        model = Qwen2VLForConditionalGeneration(config)
        size = dict(zip(("shortest_edge", "longest_edge"), geometry.pixels, strict=True))
        image_processor = Qwen2VLImageProcessorPil(size=size)
        processor = images_only("qwen2_vl")(
            image_processor=image_processor, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE
        )
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**language, tie_word_embeddings=True))
    # Without sampling, until the end of a turn.
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[end_of_turn, end_of_text], do_sample=False
    )
    return model, processor


def save_model(model: PreTrainedModel, processor: Processor, folder: Path) -> None:
    """Writes a plain Hugging Face folder, weights as bfloat16 safetensors.

    Casts `model` to bfloat16 in place, rotary frequencies too: to use the model, load it again.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
