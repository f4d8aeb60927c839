"""Dense Qwen2 checkpoints merged into one Qwen2Moe checkpoint, tensor by tensor, from safetensors to safetensors.

Every layer's MLPs become the experts of that layer, all else comes from the base, and routers
start from zeros. A piece of one tensor is held at a time, so memory does not depend on the size of the models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, Qwen2MoeConfig

from stages.core.errors import UserError
from stages.kit.mixture.certificate import Change
from stages.kit.mixture.experts import dense_config
from stages.kit.models.folders import copy_model_files, weight_files
from stages.kit.models.load import meta_model
from stages.kit.models.shards import DTYPES, write_shards

SHARED_EXPERT_SIZE = 64
"""Width of the shared expert, which Qwen2Moe cannot do without. All zero, its gate too: it adds nothing, and gets no
gradient. vLLM refuses a width of 0."""

PIECE_WEIGHTS = 2**21
"""Weights of a tensor that are held at a time; 8 MiB in fp32."""

_EXPERT = re.compile(r"(?P<mlp>model\.layers\.\d+\.mlp)\.experts\.(?P<expert>\d+)\.(?P<matrix>\w+\.weight)")
_ROUTER = re.compile(r"model\.layers\.\d+\.mlp\.gate\.weight")
_SHARED_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.shared_expert(_gate|\.\w+)\.weight")
_NOT_NEEDED = re.compile(r"lm_head\.weight|.*\.rotary_emb\.inv_freq")
"""Beside a model's parameters a checkpoint may hold the head where it is tied, and what older libraries saved."""


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


def merge_experts(
    base_dir: Path,
    expert_dirs: Mapping[str, Path],
    folder: Path,
    *,
    top_k: int,
) -> dict[str, Change]:
    """Write a Qwen2Moe folder, with the base's tokenizer, in the widest of the dtypes that go into it.

    base_dir, expert_dirs: dense Qwen2 folders that `check_models` accepts; the experts are numbered in this order.
    Routers are zeros, which give every expert the same weight.
    Returns how far each expert is from the base. Raises UserError for a checkpoint with other weights than its config
    says.
    """
    config = mixture_config(dense_config(base_dir), experts=len(expert_dirs), top_k=top_k)
    merge = _Merge(Checkpoint(base_dir), [Checkpoint(path) for path in expert_dirs.values()])
    config.dtype = merge.dtype
    write_shards(meta_model(config).to(merge.dtype), folder, merge.pieces, what="the merged experts")
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
        if missing := sorted(wanted.keys() - found.keys()):
            raise UserError(f"{folder} lacks {len(missing)} weights of a Qwen2, among them {', '.join(missing[:3])}")
        if surplus := sorted(name for name in found.keys() - wanted.keys() if not _NOT_NEEDED.fullmatch(name)):
            raise UserError(
                f"{folder} holds {len(surplus)} weights that Qwen2 does not have, among them {', '.join(surplus[:3])}"
            )
        for name, shape in wanted.items():
            if found[name] != shape:
                raise UserError(f"{folder} holds {name} as {found[name]}, its config.json says {shape}")

    def piece(self, name: str, rows: slice) -> torch.Tensor:
        """(rows, ...) of a tensor, in its own dtype.

        The file is opened for every piece: what safetensors has read of it stays in memory while it is open.
        """
        with safe_open(self.path_of[name], framework="pt") as file:
            return file.get_slice(name)[rows]


class _Merge:
    """Where every tensor of the mixture comes from, and how far the experts are from the base, measured on the way."""

    def __init__(self, base: Checkpoint, experts: list[Checkpoint]) -> None:
        self.base, self.experts = base, experts
        dtypes = set.union(*(model.dtypes for model in (base, *experts)))
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # fp32 holds fp16 and bf16 exactly
        self.base_squares = dict.fromkeys(("mlp", "outside"), 0.0)
        """Sum of the squares of the base's weights."""
        self.change_squares = {(index, where): 0.0 for index in range(len(experts)) for where in self.base_squares}
        """Of the differences to it, by expert."""

    def pieces(self, name: str, tensor: torch.Tensor) -> Iterator[memoryview]:
        if match := _EXPERT.fullmatch(name):
            source, index = f"{match['mlp']}.{match['matrix']}", int(match["expert"])
            for rows in _rows(tensor):
                base, ours = self.base.piece(source, rows), self.experts[index].piece(source, rows)
                if index == 0:
                    self.base_squares["mlp"] += _square(base)
                self.change_squares[index, "mlp"] += _square_of_difference(ours, base)
                yield _bytes(ours, self.dtype)
        elif _ROUTER.fullmatch(name) or _SHARED_EXPERT.fullmatch(name):
            yield _bytes(torch.zeros(tensor.shape), self.dtype)
        else:
            for rows in _rows(tensor):
                yield _bytes(self._outside(name, rows), self.dtype)

    def change(self, index: int) -> Change:
        shares = {
            where: math.sqrt(self.change_squares[index, where] / squares) if squares else math.inf
            for where, squares in self.base_squares.items()
        }
        return Change(**shares)

    def _outside(self, name: str, rows: slice) -> torch.Tensor:
        """Rows of a tensor that is not an expert's, which the mixture has once."""
        base = self.base.piece(name, rows)
        self.base_squares["outside"] += _square(base)
        for index, expert in enumerate(self.experts):
            self.change_squares[index, "outside"] += _square_of_difference(expert.piece(name, rows), base)
        return base


def _rows(tensor: torch.Tensor) -> Iterator[slice]:
    """Slices of the first dimension that hold about PIECE_WEIGHTS weights each."""
    count = len(tensor)
    step = max(1, PIECE_WEIGHTS // (tensor.numel() // count))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _square(tensor: torch.Tensor) -> float:
    flat = tensor.float().flatten()
    return torch.dot(flat, flat).item()


def _square_of_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return _square(one.float() - other.float())


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    return tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data
