"""Builds a Qwen2-VL or a Qwen2 of a few million weights or fewer from the real transformers classes, with no network.

What comes out is a plain Hugging Face folder like the big model's: the same architecture, all of its
special tokens, its chat format and its image processing, so it takes the same path through every stage.
Only the sizes, the vocabulary (byte-level BPE trained on a corpus that the caller gives) and the weights
(random) differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    Qwen2VLProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stages.kit.models.processors import Processor
from stages.kit.models.without_torchvision import PicturesOnlyProcessor

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""All of Qwen2-VL's, which Qwen2.5's text models have too."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- set plain = [{'type': 'text', 'text': message.content}] -%}
    {%- set parts = plain if message.content is string else message.content -%}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
            {%- for part in parts -%}{{- part.text -}}{%- endfor -%}
            {{- '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {%- for part in parts -%}
            {%- if part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML as Qwen2-VL and Qwen2 render it; `generation` marks what the assistant says, its end of turn included."""


@dataclass(frozen=True, kw_only=True)
class TinyGeometry:
    """Sizes of a tiny Qwen2-VL; the defaults give 2.9 million weights."""

    hidden_size: int = 192
    """Width of the language model; a multiple of 2 x num_heads."""
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 3
    vision_hidden_size: int = 128
    """Width of the vision tower; a multiple of 4 x vision_num_heads (its rotary embedding has two axes)."""
    vision_num_layers: int = 4
    vision_num_heads: int = 4
    vision_mlp_ratio: int = 3
    vocab_size: int = 640
    """Byte-level pieces, at least 256; special tokens come on top."""
    min_pixels: int = 112 * 112
    max_pixels: int = 224 * 224
    """Area of a picture after resizing; 224 x 224 is 64 visual tokens."""


TINY = TinyGeometry()

SMALLEST = TinyGeometry(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    vision_hidden_size=32,
    vision_num_layers=2,
    vision_num_heads=2,
    vision_mlp_ratio=2,
    vocab_size=320,
    min_pixels=56 * 56,
    max_pixels=112 * 112,
)
"""For unit tests: about 0.25 million weights, 16 visual tokens, built in a fraction of a second."""


@dataclass(frozen=True, kw_only=True)
class TinyTextGeometry:
    """Sizes of a tiny Qwen2; the defaults give 1 million weights, embeddings tied."""

    hidden_size: int = 128
    """A multiple of 2 x num_heads."""
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_key_value_heads: int = 2
    """A divisor of num_heads: queries share keys and values, as in the big ones."""
    vocab_size: int = 1280
    """Byte-level pieces, at least 256; special tokens come on top."""


TINY_TEXT = TinyTextGeometry()

SMALLEST_TEXT = TinyTextGeometry(
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_key_value_heads=1, vocab_size=320
)
"""For unit tests: 40 thousand weights."""


def train_tokenizer(corpus: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """Byte-level BPE as Qwen2's, in which digits stay apart, with Qwen2-VL's special tokens.

    corpus: texts to learn the pieces from, without special tokens. Any other text can be encoded all the
    same, down to single bytes.
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
    )


def build_processor(corpus: Iterable[str], geometry: TinyGeometry = TINY) -> Qwen2VLProcessor:
    """The tokenizer and an image processor that resizes pictures to `geometry`'s areas."""
    size = {"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels}
    return PicturesOnlyProcessor(
        image_processor=Qwen2VLImageProcessorPil(size=size),
        tokenizer=train_tokenizer(corpus, geometry.vocab_size),
        chat_template=CHAT_TEMPLATE,
    )


def tiny_config(tokenizer: Qwen2Tokenizer, geometry: TinyGeometry = TINY) -> Qwen2VLConfig:
    """The model's configuration. Its vocabulary is padded to a multiple of 64, as the big one's is."""
    token_id = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    pairs = geometry.hidden_size // geometry.num_heads // 2
    # Rotary frequencies from fast to slow, shared out to time, height and width as in Qwen2-VL. Time is idle
    # in a picture, and a few fast ones tell its few rows apart.
    sections = [1, max(2, pairs // 10), pairs - 1 - max(2, pairs // 10)]
    return Qwen2VLConfig(
        text_config={
            "hidden_size": geometry.hidden_size,
            "intermediate_size": geometry.intermediate_size,
            "num_hidden_layers": geometry.num_layers,
            "num_attention_heads": geometry.num_heads,
            "num_key_value_heads": geometry.num_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections},
            "rms_norm_eps": 1e-6,
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "max_position_embeddings": 4096,
            "bos_token_id": token_id[END_OF_TEXT],
            "eos_token_id": token_id[END_OF_TURN],
            "pad_token_id": token_id[END_OF_TEXT],
        },
        vision_config={
            "hidden_size": geometry.hidden_size,
            "depth": geometry.vision_num_layers,
            "embed_dim": geometry.vision_hidden_size,
            "num_heads": geometry.vision_num_heads,
            "mlp_ratio": geometry.vision_mlp_ratio,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1_000.0},
        },
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def tiny_text_config(tokenizer: Qwen2Tokenizer, geometry: TinyTextGeometry = TINY_TEXT) -> Qwen2Config:
    """The configuration of a text model, with its vocabulary padded as `tiny_config` does."""
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    return Qwen2Config(
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        max_position_embeddings=4096,
        bos_token_id=end_of_text,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        tie_word_embeddings=True,
    )


def build_tiny_qwen2_vl(
    corpus: Iterable[str], geometry: TinyGeometry = TINY, *, seed: int = 0
) -> tuple[Qwen2VLForConditionalGeneration, Qwen2VLProcessor]:
    """A model with random float32 weights, and its processor. The same arguments give the same weights.

    corpus: texts for the tokenizer to learn its pieces from. Sets torch's random seed.
    """
    processor = build_processor(corpus, geometry)
    tokenizer = processor.tokenizer
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(tiny_config(tokenizer, geometry))
    model.generation_config = greedy_generation(tokenizer)
    return model, processor


def build_tiny_qwen2(
    corpus: Iterable[str], geometry: TinyTextGeometry = TINY_TEXT, *, seed: int = 0
) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """A text model with random float32 weights, and its tokenizer, on the terms of `build_tiny_qwen2_vl`."""
    tokenizer = train_tokenizer(corpus, geometry.vocab_size)
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_text_config(tokenizer, geometry))
    model.generation_config = greedy_generation(tokenizer)
    return model, tokenizer


def greedy_generation(tokenizer: Qwen2Tokenizer) -> GenerationConfig:
    """Generation without sampling that stops at the end of a turn."""
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    return GenerationConfig(
        bos_token_id=end_of_text,
        pad_token_id=end_of_text,
        eos_token_id=[end_of_turn, end_of_text],
        do_sample=False,
    )


def save_model(model: PreTrainedModel, processor: Processor, folder: Path) -> None:
    """Writes a plain Hugging Face folder, weights as bfloat16 safetensors.

    Casts `model` to bfloat16 in place, rotary frequencies too: to use the model, load it again.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
