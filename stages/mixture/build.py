"""Build a mixture of experts from dense Qwen2 models of one base, and certify it.

The MLPs of every layer become the experts of that layer, everything else comes from the base, and routers start from
zeros. Weights go from safetensors to safetensors a file at a time, so memory does not depend on the number of experts.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from stages.core.atomic import atomic_folder
from stages.core.errors import UserError
from stages.core.lineage import Lineage, short, write_lineage
from stages.data.conversation import Conversation
from stages.mixture.certificate import TOLERANCE, BuildCertificate, Change
from stages.mixture.routing import measure_domains
from stages.models.folders import INDEX_FILE, Checkpoint, check_model_folder, copy_model_files
from stages.models.load import load_config, meta_model
from stages.models.merge import MAX_SHARD_SIZE
from stages.models.prompts import load_processor

SHARED_EXPERT_SIZE = 64
"""Width of the shared expert, which Qwen2Moe requires. It is all zero, like its gate: it adds nothing and gets no
gradient. vLLM refuses a width of 0."""

_EXPERT = re.compile(r"(?P<mlp>model\.layers\.\d+\.mlp)\.experts\.(?P<expert>\d+)\.(?P<matrix>\w+\.weight)")
_ZERO = re.compile(r"model\.layers\.\d+\.mlp\.(gate|shared_expert_gate|shared_expert\.\w+)\.weight")

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
    Raises UserError for an expert of another base, or if the mixture does not contain its experts.
    """
    base_dir, base_lineage = base
    expert_dirs = {name: folder for name, (folder, _) in experts.items()}
    check_lineages(base_lineage, {name: lineage for name, (_, lineage) in experts.items()})
    with atomic_folder(built_dir) as folder:
        changes = merge_experts(base_dir, expert_dirs, folder, top_k=top_k)
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
    """Write a Qwen2Moe folder, with the base's tokenizer, in the dtype of the experts.

    base_dir, expert_dirs: a dense Qwen2 folder, and models that recipes made of it; the experts are numbered in this
    order. Returns each expert's distance from the base. Raises UserError for a model that is not a dense Qwen2.
    """
    dense, *_ = [dense_config(folder) for folder in (base_dir, *expert_dirs.values())]
    config = mixture_config(dense, experts=len(expert_dirs), top_k=top_k)
    base, experts = Checkpoint(base_dir), [Checkpoint(path) for path in expert_dirs.values()]
    config.dtype = experts[0]["model.norm.weight"].dtype  # all were merged in the profile's precision

    def weights(name: str, shape: torch.Size) -> torch.Tensor:
        if _ZERO.fullmatch(name):
            return torch.zeros(shape, dtype=config.dtype)
        if match := _EXPERT.fullmatch(name):
            return experts[int(match["expert"])][f"{match['mlp']}.{match['matrix']}"].to(config.dtype)
        return base[name].to(config.dtype)

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
    changes = {name: change_from(base, expert) for name, expert in zip(expert_dirs, experts, strict=True)}
    for name, change in changes.items():
        log.info("expert %s changed the MLPs by %.2g of their norm", name, change.mlp)
        if change.outside:
            log.warning("expert %s changed all else by %.2g of its norm, which is lost", name, change.outside)
    return changes


def change_from(base: Checkpoint, expert: Checkpoint) -> Change:
    mlp = [name for name in expert.path_of if ".mlp." in name]
    outside = [name for name in expert.path_of if ".mlp." not in name]
    return Change(mlp=_distance(base, expert, mlp), outside=_distance(base, expert, outside))


def _distance(base: Checkpoint, expert: Checkpoint, names: Iterable[str]) -> float:
    """Norm of the difference of these weights over the norm of the base's; infinite if those are all zero."""
    moved = norm = 0.0
    for name in names:
        ours, theirs = base[name].float(), expert[name].float()
        moved += (theirs - ours).square().sum().item()
        norm += ours.square().sum().item()
    return math.sqrt(moved / norm) if norm else math.inf
