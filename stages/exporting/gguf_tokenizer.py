"""The tokenizer and the chat template of a model folder, as settings of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

from stages.core.errors import UserError
from stages.models.folders import read_json

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONVERTER = "llama.cpp's convert_hf_to_gguf.py may know it"
PRE_TOKENIZERS = {"qwen2": _PATTERN.replace("DIGITS", ""), "llama-bpe": _PATTERN.replace("DIGITS", "{1,3}")}
"""llama.cpp's name of a pre-tokenizer by the pattern that splits text (src/llama-vocab.cpp)."""


def add_tokenizer(writer: GGUFWriter, model_dir: Path, vocab_size: int) -> None:
    """Raises UserError for a tokenizer other than byte-level BPE with a known pre-tokenizer."""
    tokenizer = read_json(model_dir / "tokenizer.json")
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UserError(f"{model_dir} has a tokenizer other than byte-level BPE, not exported here; {CONVERTER}")
    ids, types = [f"[PAD{number}]" for number in range(vocab_size)], [TokenType.UNUSED] * vocab_size
    for text, number in model["vocab"].items():
        ids[number], types[number] = text, TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        ids[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(tokenizer, model_dir))
    writer.add_token_list(ids)
    writer.add_token_types(types)
    special = SpecialVocab(model_dir, load_merges=True, n_vocab=vocab_size)
    special.add_special_token = {"bos": False}  # chat templates write it
    special.add_to_gguf(writer, quiet=True)


def _pre_tokenizer(tokenizer: dict[str, Any], model_dir: Path) -> str:
    steps = tokenizer["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    kinds = [step.get("type") for step in steps]
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["ByteLevel"] and steps[0]["use_regex"]:
        return "gpt-2"
    for name, pattern in PRE_TOKENIZERS.items():
        if kinds == ["Split", "ByteLevel"] and patterns == [pattern]:
            return name
    raise UserError(f"{model_dir} splits text before its byte-level BPE in a way without a name here; {CONVERTER}")
