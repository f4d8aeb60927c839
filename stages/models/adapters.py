"""Parts and adapters: which weights of a model a recipe trains, and the trained weights apart from their base.

The parts are vision tower, projector and language model. Works on real and on meta-device models, with or without
adapters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stages.core.errors import UserError
from stages.core.families import PROJECTOR, TOWER
from stages.core.params.schema import PARTS, LearningParams, LoraParams, Part, PartsParams
from stages.internals.peft_internals import expert_names
from stages.models.load import full_tensor, load_base, meta_model, shard

if TYPE_CHECKING:
    from stages.planning.plan import Plan

ALL_LINEAR = "all-linear"
"""In lora.targets: the linear layers of the part, whatever their names."""

ADAPTER_DIR = "adapter"
WEIGHTS_FILE = "weights.safetensors"


def part_of(name: str) -> Part:
    """The part that a parameter or module belongs to, by its full name, PEFT's prefixes and infixes allowed."""
    name = plain_name(name)
    if PROJECTOR.match(name):
        return "projector"
    return "vision" if TOWER.match(name) else "llm"


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def is_idle(model: nn.Module, name: str) -> bool:
    """Whether a parameter or module belongs to the shared expert of a mixture that was built here: all zero, so that it
    adds nothing and no gradient ever reaches it (mixture/build.py)."""
    config = getattr(model, "config", None)
    return getattr(config, "neutral_shared_expert", False) and ".mlp.shared_expert" in name


def load_trainable(plan: Plan) -> PreTrainedModel | PeftModel:
    """The base with the recipe's adapters on it, placed as planned."""
    model = apply_recipe(load_base(plan), plan.recipe)
    if plan.is_sharded:
        # Starts the group of all processes of the training if there is none yet.
        shard(model, plan, init_device_mesh(plan.device.kind, (plan.device.total,)))
    return model


def apply_recipe(model: PreTrainedModel, recipe: LearningParams) -> PreTrainedModel | PeftModel:
    """Freeze and unfreeze by part, attach LoRA adapters where asked, keep trained weights in fp32.

    Returns the model itself, or a PeftModel around it. Raises UserError if the model lacks a part or a target.
    """
    present = {part_of(name) for name, _ in model.named_parameters()}
    for part in recipe.parts.trained():
        if part not in present:
            raise UserError(f"parts.{part} is to be trained, but {type(model).__name__} has no {part}")
    full = _full_parameters(model, recipe.parts, recipe.full_targets)
    model.requires_grad_(False)
    adapted: PreTrainedModel | PeftModel = model
    if recipe.parts.trained("lora"):
        assert recipe.lora is not None
        is_meta = any(parameter.is_meta for parameter in model.parameters())
        adapted = get_peft_model(model, lora_config(model, recipe.lora), low_cpu_mem_usage=is_meta)
        for layer in adapted.modules():
            if isinstance(layer, LoraLayer) and model.dtype != torch.float32:
                layer.cast_input_dtype_enabled = False  # to the adapter's fp32, from which autocast casts back
    for name, parameter in adapted.named_parameters():
        if plain_name(name) in full:
            parameter.requires_grad_(True)
        if parameter.requires_grad:
            # fp16 needs fp32 weights under GradScaler, and small updates to bf16 weights are lost to rounding.
            parameter.data = parameter.data.to(torch.float32)
    return adapted


def _full_parameters(
    model: PreTrainedModel, parts: PartsParams, full_targets: Mapping[Part, Sequence[str]]
) -> set[str]:
    """Names of the parameters that are trained in full. Raises UserError for a target without any."""
    found: set[str] = set()
    if not parts.trained("full"):
        return found
    # Loading makes all parameters trainable, also those that the class corrects by rules of its own.
    corrected = {name for name, each in meta_model(model.config).named_parameters() if not each.requires_grad}
    for part in parts.trained("full"):
        names = [
            name
            for name, _ in model.named_parameters()
            if part_of(name) == part and not is_idle(model, name) and name not in corrected
        ]
        if part not in full_targets:
            found.update(names)
        for target in full_targets.get(part, ()):
            # A module's parameters and those of the modules within it.
            chosen = [name for name in names if f".{target}." in f".{name}"]
            if not chosen:
                endings = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in names})
                raise UserError(
                    f"full_targets.{part}: {target!r} names no module with weights; the {part}'s end in "
                    f"{', '.join(endings)}"
                )
            found.update(chosen)
    return found


def lora_config(model: PreTrainedModel, lora: LoraParams) -> LoraConfig:
    """PEFT's configuration. Its targets are the layers that the recipe names and no others.

    Raises UserError for a target that matches no linear layer of its part, or a layer that `init` cannot start from.
    """
    linears, chosen = adaptable_linears(model), set[str]()
    for part, suffixes in lora.targets.items():
        own = [name for name in linears if part_of(name) == part]
        for suffix in suffixes:
            # Whole components: attn.proj ends blocks.0.attn.proj, but proj does not end o_proj.
            named = [name for name in own if suffix == ALL_LINEAR or f".{name}".endswith(f".{suffix}")]
            if not named:
                endings = sorted({name.rsplit(".", 1)[-1] for name in own})
                raise UserError(
                    f"lora.targets.{part}: {suffix!r} names no linear layer that takes an adapter, as neither a head "
                    f"nor a mixture's experts do; the {part}'s end in {', '.join(endings)}; {ALL_LINEAR} names them all"
                )
            chosen.update(named)
    names = sorted(chosen)
    if lora.takes_from_base:
        _require_rank(model, names, lora)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=names,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=True if lora.init == "default" else lora.init,
    )


def _require_rank(model: PreTrainedModel, names: Sequence[str], lora: LoraParams) -> None:
    """Raises UserError unless each layer has as many rows and columns as an adapter takes of its weight."""
    for name in names:
        layer: Any = model.get_submodule(name)
        if isinstance(layer, Conv1D) and lora.init == "olora":
            raise UserError(f"lora.init: olora does not know weights with inputs first, as of {name}; use pissa")
        if (most := min(layer.weight.shape)) < lora.rank:
            raise UserError(f"lora.rank: {lora.rank}, but {lora.init} finds at most {most} directions in {name}")


def adaptable_linears(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers that compute with an adapter on them.

    Left out are the head and projections of Mamba, as TRL's loss and Mamba's kernels take the weights alone; layers of
    a class of the model's own, such as routers; names that PEFT takes for a mixture's fused experts; and idle layers.
    """
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    experts = expert_names(model.config.model_type)

    def is_adaptable(name: str, module: nn.Module) -> bool:
        parent, _, leaf = name.rpartition(".")
        in_mamba = hasattr(modules[parent], "A_log") and hasattr(modules[parent], "D")
        return (
            isinstance(module, (nn.Linear, Conv1D))
            and module is not head
            and not type(module).__module__.startswith("transformers.models.")
            and leaf not in experts
            and not (in_mamba and leaf in ("out_proj", "dt_proj", "x_proj"))
            and not is_idle(model, name)
        )

    return [name for name, module in modules.items() if is_adaptable(name, module)]


def count_trainable(model: nn.Module) -> dict[str, int]:
    """Trainable parameters by part and in `total`, and `all` of them, adapters among them, trainable or not."""
    counts: dict[str, int] = dict.fromkeys((*PARTS, "total", "all"), 0)
    for name, parameter in model.named_parameters():
        packed = getattr(parameter, "quant_state", None)  # bitsandbytes packs two 4-bit weights in a byte
        size = parameter.numel() if packed is None else int(torch.Size(packed.shape).numel())
        counts["all"] += size
        if parameter.requires_grad:
            counts[part_of(name)] += size
            counts["total"] += size
    return counts


def trainable_line(counts: Mapping[str, int]) -> str:
    """counts: from `count_trainable`."""
    by_part = ", ".join(f"{part} {counts[part]:,}" for part in PARTS)
    return f"trainable={counts['total']:,} of {counts['all']:,} ({by_part})"


def trained_modules(model: nn.Module) -> set[str]:
    """Plain names of the modules with weights that a recipe changes."""
    return {
        re.sub(r"\.lora_.*$", "", plain_name(name)) if ".lora_" in name else plain_name(name).rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def trained_tensors(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    """All trained weights by name, on the CPU.

    All processes of a sharded model have to call this together; each gets whole tensors.
    """
    return {
        name: full_tensor(parameter.detach()).cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def initial_tensors(model: PreTrainedModel | PeftModel, recipe: LearningParams) -> dict[str, torch.Tensor]:
    """The adapter before the first step, if it starts as a part of the base; else nothing. As `trained_tensors`."""
    if recipe.lora is None or not recipe.lora.takes_from_base:
        return {}
    return {name: tensor.clone() for name, tensor in trained_tensors(model).items() if ".lora_" in name}


def on_whole_base(adapter: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter of twice the rank, which on the base's own weights does what `adapter` does on what `initial` left.

    The change of a weight is BA - B₀A₀. PEFT saves it as [B, -B₀][A; A₀] (peft_model.py, save_pretrained), two large
    terms of a small difference, which 16 bits lose. The same is (B - B₀)A + B₀(A - A₀), where each term is small.
    """
    plain = dict(adapter)
    for name, tensor in adapter.items():
        if ".lora_A." in name:  # (rank, inputs)
            plain[name] = torch.cat((tensor, tensor - initial[name]))
        elif ".lora_B." in name:  # (outputs, rank)
            plain[name] = torch.cat((tensor - initial[name], initial[name]), dim=1)
    return plain


def save_trained(
    model: PreTrainedModel | PeftModel,
    folder: Path,
    *,
    base_name: str,
    revision: str | None,
    tensors: dict[str, torch.Tensor],
    initial: Mapping[str, torch.Tensor],
) -> None:
    """Write `folder/adapter/` (PEFT) and `folder/weights.safetensors` (parts trained in full), if there are any.

    base_name, revision: the base's on the hub, or its path relative to the workspace and None, for PEFT's own tools;
    loading here goes by the lineage.
    tensors: from `trained_tensors`. initial: from `initial_tensors`.
    """
    full = {plain_name(name): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    if full:
        save_file(full, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if isinstance(model, PeftModel):
        config = copy(model.peft_config["default"])
        config.base_model_name_or_path, config.revision = base_name, revision
        config.target_modules = sorted(config.target_modules)  # PEFT's is a set
        adapter = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
        if initial:
            adapter = on_whole_base(adapter, initial)
            config.init_lora_weights, config.r = True, 2 * config.r
            config.lora_alpha *= 2**0.5 if config.use_rslora else 2  # the same scale
        with patch.dict(model.peft_config, default=config):
            model.save_pretrained(
                folder / ADAPTER_DIR, state_dict=adapter, safe_serialization=True, save_embedding_layers=False
            )
        (folder / ADAPTER_DIR / "README.md").unlink(missing_ok=True)  # a model card of blanks


def load_trained(base: PreTrainedModel, folder: Path) -> PreTrainedModel | PeftModel:
    """`base` with the trained weights of `folder`: full weights in place of its own, adapters attached, not merged.

    The caller has made sure that this is the right base (`lineage.require_base`), with weights of the same shapes.
    """
    weights_path, adapter_dir = folder / WEIGHTS_FILE, folder / ADAPTER_DIR
    parameters = dict(base.named_parameters())
    for name, tensor in (load_file(weights_path) if weights_path.exists() else {}).items():
        assert parameters[name].shape == tensor.shape, (weights_path, name, tensor.shape)
        parameters[name].data.copy_(tensor)
    if not adapter_dir.exists():
        return base
    return PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=False, autocast_adapter_dtype=True)
