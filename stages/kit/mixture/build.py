"""Build a mixture of experts from dense Qwen2 models of one base: check them, merge them, certify the result.

The MLPs of every layer become the experts of that layer, everything else comes from the base, and routers start from
zeros. Weights go from safetensors to safetensors in pieces of one tensor, so memory does not depend on the models.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
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

PIECE_WEIGHTS = 2**21
"""Weights of a tensor that are in memory at a time; 8 MiB in fp32."""

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
            domains=measure_domains(folder, base_dir, expert_dirs, probes, load=load, processor=processor),
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
    merge = _Merge(Checkpoint(base_dir), [Checkpoint(path) for path in expert_dirs.values()])
    config.dtype = merge.dtype
    write_shards(meta_model(config).to(merge.dtype), folder, merge.pieces)
    copy_model_files(base_dir, folder, weights=False)
    config.save_pretrained(folder)
    return {name: merge.change(index) for index, name in enumerate(expert_dirs)}


class Checkpoint:
    """The weights of a dense Qwen2 folder, in one file or several, read a piece at a time."""

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

    def piece(self, name: str, rows: slice) -> torch.Tensor:
        """(rows, ...) of a tensor, in its own dtype.

        The file is opened for every piece: while it is open, everything that was read of it stays in memory.
        """
        with safe_open(self.path_of[name], framework="pt") as file:
            return file.get_slice(name)[rows]


class _Merge:
    """The source of every tensor of the mixture; measures the experts' distance from the base on the way."""

    def __init__(self, base: Checkpoint, experts: list[Checkpoint]) -> None:
        self.base, self.experts = base, experts
        dtypes = set.union(*(model.dtypes for model in (base, *experts)))
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # fp32 holds fp16 and bf16 exactly
        self.base_squares = dict.fromkeys(("mlp", "outside"), 0.0)
        """Sum of the squares of the base's weights."""
        self.change_squares = {(index, where): 0.0 for index in range(len(experts)) for where in self.base_squares}
        """Sum of the squares of the differences to the base, by expert."""

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor of the mixture. tensor: its shape and dtype, on the meta device."""
        if match := _EXPERT.fullmatch(name):
            source, index = f"{match['mlp']}.{match['matrix']}", int(match["expert"])
            for rows in _rows(tensor):
                base, expert = self.base.piece(source, rows), self.experts[index].piece(source, rows)
                if index == 0:
                    self.base_squares["mlp"] += _square(base.float())
                self.change_squares[index, "mlp"] += _square(expert.float() - base.float())
                yield self._bytes(expert)
        elif _ZERO.fullmatch(name):
            yield self._bytes(torch.zeros(tensor.shape))
        else:
            for rows in _rows(tensor):
                base = self.base.piece(name, rows)
                self.base_squares["outside"] += _square(base.float())
                for index, each in enumerate(self.experts):
                    self.change_squares[index, "outside"] += _square(each.piece(name, rows).float() - base.float())
                yield self._bytes(base)

    def change(self, index: int) -> Change:
        shares = {
            where: math.sqrt(self.change_squares[index, where] / squares) if squares else math.inf
            for where, squares in self.base_squares.items()
        }
        return Change(**shares)

    def _bytes(self, tensor: torch.Tensor) -> memoryview:
        return tensor.to(self.dtype).contiguous().view(-1).view(torch.uint8).numpy().data


def _rows(tensor: torch.Tensor) -> Iterator[slice]:
    """Slices of the first dimension with about PIECE_WEIGHTS weights each."""
    count = len(tensor)
    step = max(1, PIECE_WEIGHTS // (tensor.numel() // count))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _square(tensor: torch.Tensor) -> float:
    flat = tensor.flatten()
    return torch.dot(flat, flat).item()


def write_shards(
    model: PreTrainedModel, folder: Path, pieces: Callable[[str, torch.Tensor], Iterator[memoryview]]
) -> None:
    """Write a model's safetensors, with their index if they are several, in the names and files of save_pretrained.

    model: on the meta device. pieces: from a weight's name, and a meta tensor of its shape and dtype, to its bytes.
    """
    # Tied weights are one parameter, under its first name; save_pretrained leaves out the same ones.
    named = revert_weight_conversion(model, dict(model.named_parameters()))
    # New tensors, as experts are views of one tensor, and would each be counted at the size of all.
    tensors = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_SHARD_SIZE
    )
    # disable=None shows it on a terminal only.
    with tqdm(desc="weights", total=total_bytes, unit="B", unit_scale=True, leave=False, disable=None) as progress:
        for file_name, names in split.filename_to_tensors.items():
            with (folder / file_name).open("wb") as file:
                file.write(_header({name: tensors[name] for name in names}))
                for name in names:
                    for piece in pieces(name, tensors[name]):
                        progress.update(file.write(piece))
    if split.is_sharded:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The header of a safetensors file: its length (8 bytes, little endian), then JSON; the data follow without gaps.

    By hand, as safetensors itself wants all tensors of a file at once. Source: its README, "Format".
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as safetensors aligns the data
    return len(text).to_bytes(8, "little") + text
