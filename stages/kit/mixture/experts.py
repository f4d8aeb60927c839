"""Which dense models may become the experts of one mixture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from stages.core.errors import UserError
from stages.core.lineage import Lineage, short
from stages.kit.models.folders import check_model_folder
from stages.kit.models.load import load_config
from stages.kit.models.prompts import load_processor, tokenizer_of

GEOMETRY = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
)
"""The settings that two models have to share for one to stand in another's place."""


def check_lineages(base: Lineage, experts: Mapping[str, Lineage]) -> None:
    """Raises UserError unless each expert was made from `base`, directly or through other recipes, and no two of the
    same content. experts: by name."""
    names: dict[str, str] = {}
    for name, lineage in experts.items():
        chain = list(lineage.bases())
        if base.digest not in {ancestor.digest for ancestor in chain}:
            root = chain[-1]
            raise UserError(
                f"expert {name} comes from {root.name} (content {short(root.digest)}), not from {base.name} "
                f"(content {short(base.digest)}); the experts of a mixture are trained from one base"
            )
        if (other := names.setdefault(lineage.digest, name)) != name:
            raise UserError(
                f"experts {other} and {name} are the same model (content {short(lineage.digest)}); "
                "a mixture of them would only take more memory"
            )


def check_models(base_dir: Path, expert_dirs: Mapping[str, Path]) -> None:
    """Raises UserError unless all are dense Qwen2 models of one geometry, with one tokenizer and one chat template."""
    config, tokenizer = dense_config(base_dir), _tokenizer(base_dir)
    for name, folder in expert_dirs.items():
        theirs = dense_config(folder)
        for field in GEOMETRY:
            if getattr(theirs, field) != getattr(config, field):
                raise UserError(
                    f"expert {name} has {field} {getattr(theirs, field)}, its base {base_dir} has "
                    f"{getattr(config, field)}; the experts of a mixture have one geometry"
                )
        for what, found in _tokenizer(folder).items():
            if found != tokenizer[what]:
                raise UserError(
                    f"expert {name} has another {what} than its base {base_dir}; the experts of a mixture share one"
                )


def dense_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a dense Qwen2 model whose weights are all there. Raises UserError for any other."""
    check_model_folder(folder)
    config = load_config(folder)
    if config.model_type != "qwen2":
        raise UserError(f"{folder} is a {config.model_type}; a mixture is made from dense Qwen2 models (qwen2)")
    if config.use_sliding_window:
        # Qwen2MoeAttention keeps the window from flash attention (transformers/models/qwen2_moe).
        raise UserError(f"{folder} uses sliding window attention, which Qwen2Moe would not do in the same way")
    return config


def _tokenizer(folder: Path) -> dict[str, Any]:
    """What makes two tokenizers the same, by its name in messages; their files may differ in form."""
    tokenizer = tokenizer_of(load_processor(folder, None))
    return {
        "vocabulary": tokenizer.get_vocab(),
        "tokenizer": json.loads(tokenizer.backend_tokenizer.to_str())["model"],
        "chat template": tokenizer.chat_template,
    }
