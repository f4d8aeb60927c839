"""What a run trained, and only that: a PEFT adapter, the tensors of parts trained in full, or both."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.kit.models.parts import plain_name
from stages.kit.models.sharding import whole

ADAPTER_DIR = "adapter"
WEIGHTS_FILE = "weights.safetensors"


def trained_tensors(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    """Everything that was trained, by its name in the model, on the CPU.

    All processes of a sharded model have to ask at once; each gets it whole.
    """
    return {
        name: whole(parameter.detach()).cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def save_trained(
    model: PreTrainedModel | PeftModel,
    folder: Path,
    *,
    base_dir: str,
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write `folder/adapter/` (PEFT) and `folder/weights.safetensors` (parts trained in full), as far as there are any.

    base_dir: the base's path relative to the workspace, for PEFT's own tools; our loading goes by the lineage.
    tensors: as `trained_tensors` has them, where more than one process had to be asked.
    """
    tensors = trained_tensors(model) if tensors is None else tensors
    full = {plain_name(name): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    if full:
        save_file(full, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if isinstance(model, PeftModel):
        model.peft_config["default"].base_model_name_or_path = base_dir
        adapter = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
        model.save_pretrained(
            folder / ADAPTER_DIR, state_dict=adapter, safe_serialization=True, save_embedding_layers=False
        )
        (folder / ADAPTER_DIR / "README.md").unlink(missing_ok=True)  # a model card of blanks


def load_trained(base: PreTrainedModel, folder: Path) -> PreTrainedModel | PeftModel:
    """`base` with what `folder` holds put on: full weights in place of its own, adapters attached, not merged.

    The caller has made sure that this is the right base (`lineage.require_base`).
    Raises UserError for a folder with nothing in it, or with tensors that the base has no place for.
    """
    weights_path, adapter_dir = folder / WEIGHTS_FILE, folder / ADAPTER_DIR
    if not weights_path.exists() and not adapter_dir.exists():
        raise UserError(f"{folder} holds neither {WEIGHTS_FILE} nor {ADAPTER_DIR}/")
    if weights_path.exists():
        _put_in_place(base, load_file(weights_path), weights_path)
    if not adapter_dir.exists():
        return base
    return PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=False, autocast_adapter_dtype=True)


def merge_trained(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Adapters added into the weights they sit on; refuses an adapter that is not a number."""
    return model.merge_and_unload(safe_merge=True) if isinstance(model, PeftModel) else model


def _put_in_place(model: nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name not in parameters:
            raise UserError(f"{path} holds {name}, which {type(model).__name__} does not have")
        if parameters[name].shape != tensor.shape:
            raise UserError(
                f"{path} holds {name} as {tuple(tensor.shape)}, the base as {tuple(parameters[name].shape)}"
            )
        parameters[name].data.copy_(tensor)
