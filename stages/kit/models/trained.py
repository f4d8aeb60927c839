"""Trained weights, apart from their base: a PEFT adapter, the tensors of parts trained in full, or both."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.lineage import combined_digest, read_lineage, require_base, short
from stages.core.params.schema import DeviceParams
from stages.kit.models.certificate import read_certificate
from stages.kit.models.folders import has_weights
from stages.kit.models.load import load_model
from stages.kit.models.parts import plain_name
from stages.kit.models.placement import whole
from stages.kit.models.probes import weight_digests

ADAPTER_DIR = "adapter"
WEIGHTS_FILE = "weights.safetensors"

log = logging.getLogger(__name__)


def trained_tensors(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    """All trained weights, by their names in the model, on the CPU.

    All processes of a sharded model have to ask at once; each gets it whole.
    """
    return {
        name: whole(parameter.detach()).cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def save_trained(
    model: PreTrainedModel | PeftModel, folder: Path, *, base_dir: str, tensors: dict[str, torch.Tensor]
) -> None:
    """Write `folder/adapter/` (PEFT) and `folder/weights.safetensors` (parts trained in full), as far as there are any.

    base_dir: the base's path relative to the workspace, for PEFT's own tools; our loading goes by the lineage.
    tensors: from `trained_tensors`.
    """
    full = {plain_name(name): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    if full:
        save_file(full, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if isinstance(model, PeftModel):
        config = model.peft_config["default"]
        config.base_model_name_or_path = base_dir
        config.target_modules = sorted(config.target_modules)  # PEFT's is a set
        adapter = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
        model.save_pretrained(
            folder / ADAPTER_DIR, state_dict=adapter, safe_serialization=True, save_embedding_layers=False
        )
        (folder / ADAPTER_DIR / "README.md").unlink(missing_ok=True)  # a model card of blanks


def load_trained(base: PreTrainedModel, folder: Path) -> PreTrainedModel | PeftModel:
    """`base` with the trained weights of `folder`: full weights in place of its own, adapters attached, not merged.

    The caller has made sure that this is the right base (`lineage.require_base`).
    Raises UserError for a folder without any, or with tensors that the base has no place for.
    """
    weights_path, adapter_dir = folder / WEIGHTS_FILE, folder / ADAPTER_DIR
    if not weights_path.exists() and not adapter_dir.exists():
        raise UserError(f"{folder} holds neither {WEIGHTS_FILE} nor {ADAPTER_DIR}/")
    parameters = dict(base.named_parameters())
    for name, tensor in (load_file(weights_path) if weights_path.exists() else {}).items():
        if name not in parameters:
            raise UserError(f"{weights_path} holds {name}, which {type(base).__name__} does not have")
        if parameters[name].shape != tensor.shape:
            raise UserError(
                f"{weights_path} holds {name} as {tuple(tensor.shape)}, the base as {tuple(parameters[name].shape)}"
            )
        parameters[name].data.copy_(tensor)
    if not adapter_dir.exists():
        return base
    return PeftModel.from_pretrained(base, str(adapter_dir), is_trainable=False, autocast_adapter_dtype=True)


def merge_trained(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Adapters added into the weights they sit on; refuses an adapter that is not a number."""
    return model.merge_and_unload(safe_merge=True) if isinstance(model, PeftModel) else model


def load_certified(folder: Path, *, device: DeviceParams, precision: str, attn: str) -> PreTrainedModel:
    """The model of a folder that `certified_model` accepted.

    Without weights in it (models.keep_merged), the trained weights are merged into its base again, in memory.
    Raises UserError where base, trained weights or result are not those that the merge was certified with.
    """
    if has_weights(folder):
        return load_model(folder, device=device, precision=precision, attn=attn)
    lineage = read_lineage(folder)
    rebuild = f"dvc repro -f -s merge@{lineage.name}"
    base_dir, trained_dir = (
        Path(os.path.normpath(folder / lineage.parents[role].path)) for role in ("base", "trained")
    )
    trained, _ = require_base(trained_dir, base_dir, fix=rebuild)
    if trained != lineage.parents["trained"].lineage:
        raise UserError(
            f"{folder} was merged from {short(lineage.parents['trained'].lineage.digest)}, but {trained_dir} holds "
            f"{short(trained.digest)}; rebuild it with: {rebuild}"
        )
    log.info("%s has no weights: merging %s into %s again, in memory", folder, trained_dir, base_dir)
    base = load_model(base_dir, device=device, precision=precision, attn=attn)
    model = merge_trained(load_trained(base, trained_dir))
    found = combined_digest(weight_digests(model))
    wanted = read_certificate(folder.with_name("merge.json"), lineage.name).weights_digest
    if found != wanted:
        raise UserError(
            f"merging {trained_dir} into {base_dir} again gave weights {short(found)}, but {short(wanted)} were "
            f"certified, perhaps on another kind of device; certify them here with: {rebuild}"
        )
    return model
