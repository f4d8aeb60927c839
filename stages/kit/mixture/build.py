"""Build a mixture of experts from dense Qwen2 models of one base: check them, merge them, certify the result.

The MLPs of every layer become the experts of that layer, everything else comes from the base, and routers start from
zeros. Weights go from safetensors to safetensors a file at a time, so memory does not depend on the number of experts.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from stages.core.errors import UserError
from stages.core.lineage import Lineage, short, write_lineage
from stages.core.records import published
from stages.kit.data.conversation import Conversation
from stages.kit.mixture.certificate import TOLERANCE, BuildCertificate, Change
from stages.kit.mixture.routing import measure_domains
from stages.kit.models.folders import INDEX_FILE, check_model_folder, copy_model_files, weight_files
from stages.kit.models.load import load_config, meta_model
from stages.kit.models.merge import MAX_SHARD_SIZE
from stages.kit.models.prompts import load_processor, tokenizer_of

GEOMETRY = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
)
"""Settings that two models must share for one to take the other's place."""

SHARED_EXPERT_SIZE = 64
"""Width of the shared expert, which Qwen2Moe requires. It is all zero, like its gate: it adds nothing and gets no
gradient. vLLM refuses a width of 0."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""torch's dtypes by safetensors' names."""

_EXPERT = re.compile(r"(?P<mlp>model\.layers\.\d+\.mlp)\.experts\.(?P<expert>\d+)\.(?P<matrix>\w+\.weight)")
_ZERO = re.compile(r"model\.layers\.\d+\.mlp\.(gate|shared_expert_gate|shared_expert\.\w+)\.weight")
_NOT_NEEDED = re.compile(r"lm_head\.weight|.*\.rotary_emb\.inv_freq")
"""Weights that a checkpoint may hold beside a model's parameters: a tied head, buffers of older libraries."""

log = logging.getLogger(__name__)


def build_mixture(
    built_dir: Path,
    base: tuple[Path, Lineage],
    experts: Mapping[str, tuple[Path, Lineage]],
    probes: Mapping[str, Sequence[Conversation]],
    *,
    top_k: int,
    precision: str,
    load: Callable[[Path], PreTrainedModel],
) -> BuildCertificate:
    """Write a Qwen2Moe folder with its lineage, reload it, and write its certificate beside it.

    base, experts: dense models; the experts are numbered in this order. probes: conversations by expert.
    Raises UserError for models that do not fit together, or if the mixture does not contain its experts.
    """
    base_dir, base_lineage = base
    expert_dirs = {name: folder for name, (folder, _) in experts.items()}
    check_lineages(base_lineage, {name: lineage for name, (_, lineage) in experts.items()})
    check_models(base_dir, expert_dirs)
    with published(built_dir) as folder:
        changes = merge_experts(base_dir, expert_dirs, folder, top_k=top_k)
        for name, change in changes.items():
            log.info("expert %s changed the MLPs by %.2g of their norm", name, change.mlp)
            if change.outside:
                log.warning("expert %s changed all else by %.2g of its norm, which is lost", name, change.outside)
        parents = {"base": base, **{f"expert/{name}": parent for name, parent in experts.items()}}
        lineage = write_lineage(folder, kind="built", name=built_dir.name, parents=parents)
        processor = load_processor(base_dir, None)
        certificate = BuildCertificate(
            build=built_dir.name,
            built_digest=lineage.digest,
            precision=precision,
            top_k=top_k,
            changes=changes,
            tolerance=TOLERANCE[precision],
            domains=measure_domains(folder, expert_dirs, probes, load=load, processor=processor),
        )
        if problems := certificate.problems():
            raise UserError(f"the build {built_dir.name} is not made of its experts: {'; '.join(problems)}")
    certificate.write(built_dir.with_name(f"{built_dir.name}.json"))
    return certificate


def check_lineages(base: Lineage, experts: Mapping[str, Lineage]) -> None:
    """Raises UserError unless each expert was made from `base`, directly or through other recipes. experts: by name."""
    for name, lineage in experts.items():
        chain = list(lineage.bases())
        if base.digest not in {ancestor.digest for ancestor in chain}:
            root = chain[-1]
            raise UserError(
                f"expert {name} comes from {root.name} (content {short(root.digest)}), not from {base.name} "
                f"(content {short(base.digest)}); the experts of a mixture are trained from one base"
            )


def check_models(base_dir: Path, expert_dirs: Mapping[str, Path]) -> None:
    """Raises UserError unless all are dense Qwen2 models of one geometry, with one tokenizer and one chat template."""
    config, tokenizer = dense_config(base_dir), _tokenizer_parts(base_dir)
    for name, folder in expert_dirs.items():
        theirs = dense_config(folder)
        for field in GEOMETRY:
            if getattr(theirs, field) != getattr(config, field):
                raise UserError(
                    f"expert {name} has {field} {getattr(theirs, field)}, its base {base_dir} has "
                    f"{getattr(config, field)}; the experts of a mixture have one geometry"
                )
        for part, found in _tokenizer_parts(folder).items():
            if found != tokenizer[part]:
                raise UserError(
                    f"expert {name} has another {part} than its base {base_dir}; the experts of a mixture share one"
                )


def dense_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a dense Qwen2 model with all of its weights. Raises UserError for any other."""
    check_model_folder(folder)
    config = load_config(folder)
    if config.model_type != "qwen2":
        raise UserError(f"{folder} is a {config.model_type}; a mixture is made from dense Qwen2 models (qwen2)")
    if config.use_sliding_window:
        # Qwen2MoeAttention keeps the window from flash attention (transformers/models/qwen2_moe).
        raise UserError(f"{folder} uses sliding window attention, which Qwen2Moe would not do in the same way")
    return config


def _tokenizer_parts(folder: Path) -> dict[str, Any]:
    """The parts that two equal tokenizers share, by their names in messages; their files may differ in form."""
    tokenizer = tokenizer_of(load_processor(folder, None))
    return {
        "vocabulary": tokenizer.get_vocab(),
        "tokenizer": json.loads(tokenizer.backend_tokenizer.to_str())["model"],
        "chat template": tokenizer.chat_template,
    }


def mixture_config(dense: PreTrainedConfig, *, experts: int, top_k: int) -> Qwen2MoeConfig:
    """The configuration of a mixture of `experts` models like `dense`, of which each token takes `top_k`."""
    of_its_kind = {"model_type", "architectures", "transformers_version", "sliding_window"}
    return Qwen2MoeConfig(
        **{key: value for key, value in dense.to_dict().items() if key not in of_its_kind},
        architectures=["Qwen2MoeForCausalLM"],
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        moe_intermediate_size=dense.intermediate_size,
        shared_expert_intermediate_size=SHARED_EXPERT_SIZE,
        neutral_shared_expert=True,  # ours: models/adapters.py leaves it alone
        decoder_sparse_step=1,
        mlp_only_layers=[],
        qkv_bias=True,
    )


def merge_experts(base_dir: Path, expert_dirs: Mapping[str, Path], folder: Path, *, top_k: int) -> dict[str, Change]:
    """Write a Qwen2Moe folder, with the base's tokenizer, in the widest of the experts' and the base's dtypes.

    base_dir, expert_dirs: dense Qwen2 folders that `check_models` accepts; the experts are numbered in this order.
    Returns each expert's distance from the base. Raises UserError for a checkpoint with other weights than its config
    says.
    """
    config = mixture_config(dense_config(base_dir), experts=len(expert_dirs), top_k=top_k)
    base, experts = Checkpoint(base_dir), [Checkpoint(path) for path in expert_dirs.values()]
    dtypes = base.dtypes.union(*(expert.dtypes for expert in experts))
    config.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # fp32 holds fp16 and bf16 exactly
    base_squares = {"mlp": 0.0, "outside": 0.0}
    changes = [dict(base_squares) for _ in experts]

    def weights(name: str, shape: torch.Size) -> torch.Tensor:
        """A tensor of the mixture; measures its distance from the base's."""
        if _ZERO.fullmatch(name):
            return torch.zeros(shape, dtype=config.dtype)
        match = _EXPERT.fullmatch(name)
        where, source = ("mlp", f"{match['mlp']}.{match['matrix']}") if match else ("outside", name)
        numbers = [int(match["expert"])] if match else range(len(experts))
        ours = base[source]
        if 0 in numbers:  # otherwise the base's has been counted
            base_squares[where] += _square(ours.float())
        for number in numbers:
            theirs = experts[number][source]
            changes[number][where] += _square(theirs.float() - ours.float())
        return (theirs if match else ours).to(config.dtype)

    with torch.device("meta"):
        # Tied weights are one parameter, under its first name; save_pretrained leaves out the same ones.
        model = meta_model(config)
        named = revert_weight_conversion(model, dict(model.named_parameters()))
        # New tensors, as experts are views of one tensor, and would each be counted at the size of all.
        tensors = {name: torch.empty(tensor.shape, dtype=config.dtype) for name, tensor in named.items()}
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_SHARD_SIZE
    )
    for file_name, names in tqdm(split.filename_to_tensors.items(), "weights", leave=False, disable=None):
        save_file({name: weights(name, tensors[name].shape) for name in names}, folder / file_name, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copy_model_files(base_dir, folder, weights=False)
    config.save_pretrained(folder)
    return {
        name: Change(
            **{
                where: math.sqrt(change[where] / squares) if squares else math.inf
                for where, squares in base_squares.items()
            }
        )
        for name, change in zip(expert_dirs, changes, strict=True)
    }


class Checkpoint:
    """The weights of a dense Qwen2 folder, in one file or several, read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError unless it holds exactly the parameters that its configuration asks for."""
        self.path_of: dict[str, Path] = {}
        self.dtypes: set[torch.dtype] = set()
        wanted = {name: tuple(tensor.shape) for name, tensor in meta_model(dense_config(folder)).named_parameters()}
        found = {}
        for path in (folder / name for name in sorted(weight_files(folder))):
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    part = file.get_slice(name)
                    found[name] = tuple(part.get_shape())
                    self.path_of[name] = path
                    if not _NOT_NEEDED.fullmatch(name):
                        if part.get_dtype() not in DTYPES:
                            raise UserError(f"{path} holds {name} as {part.get_dtype()}, expected {', '.join(DTYPES)}")
                        self.dtypes.add(DTYPES[part.get_dtype()])
        names = wanted.keys() | {name for name in found if not _NOT_NEEDED.fullmatch(name)}
        if wrong := sorted(name for name in names if wanted.get(name) != found.get(name)):
            shown = "; ".join(
                f"{name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'none')}" for name in wrong[:3]
            )
            raise UserError(f"{folder} has {len(wrong)} weights that its config.json does not say: {shown}")

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor in its own dtype, mapped from its file, which is closed with the last tensor of it."""
        with safe_open(self.path_of[name], framework="pt") as file:
            return file.get_tensor(name)


def _square(tensor: torch.Tensor) -> float:
    flat = tensor.flatten()
    return torch.dot(flat, flat).item()
