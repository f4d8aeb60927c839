"""Private parts of transformers, for transformers 5.23.0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, ProcessorMixin, Trainer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer


def on_device(trainer: Trainer, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A batch on the trainer's device."""
    return dict(trainer._prepare_inputs(dict(inputs)))


def become_nf4(model: PreTrainedModel, config: BitsAndBytesConfig) -> dict[str, Any]:
    """Replace the linear layers that transformers would load in nf4 by bitsandbytes' own, without weights.

    Returns them by name.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    quantizer = Bnb4BitHfQuantizer(config, pre_quantized=False)
    kept = quantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    replace_with_bnb_linear(model, kept, quantizer.quantization_config)
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def set_attention(model: PreTrainedModel, config: PreTrainedConfig, name: str) -> None:
    """Have the modules of a loaded model that have this config attend by another registered implementation.

    The config stays: models that are made from it later would look for a package of that name.
    """
    own = copy.copy(config)
    own._attn_implementation = name
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own


@contextmanager
def attending_by(model: PreTrainedModel, name: str, *, instead_of: Collection[str]) -> Iterator[None]:
    """Parts of a loaded model that attend by one of `instead_of` attend by `name` in the block, and then by their own
    again."""
    configs = (module.config for module in model.modules() if hasattr(module, "config"))
    with ExitStack() as stack:
        for config in {id(config): config for config in configs}.values():
            if getattr(config, "_attn_implementation", None) in instead_of:
                stack.enter_context(patch.object(config, "_attn_implementation_internal", name))
        yield


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether a model keeps states of which no token can be taken back, as Mamba does."""
    return bool(model._is_stateful)


def layer_classes(model: PreTrainedModel) -> set[str]:
    """Names of the classes that transformers keeps whole on one device."""
    return set(model._no_split_modules or ())


def mark_distributed(model: PreTrainedModel) -> None:
    """Make transformers' Trainer, and accelerate with it, leave placement and gradients alone."""
    model._is_distributed_loading_by_transformers = True


def num_image_tokens(processor: ProcessorMixin, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens of each image by its (height, width), as vLLM counts them too."""
    return processor._get_num_multimodal_tokens(sizes)["num_image_tokens"]


class CheckpointHooks(Trainer):
    """Public names for Trainer's private hooks that save and restore a training.

    Trainer decides when to save, which samples to skip, and when to restore what. The hooks of its own would write
    whole models in their final place, and pickles.
    """

    save_checkpoint: Callable[[], None]
    """Saves the step that has just ended."""
    restore_state: Callable[[Path], None]
    """Restores weights, optimizer, schedule and gradient scaler from the folder that train() was given."""
    restore_progress: Callable[[], None]
    """Restores random numbers and totals, once Trainer has reset its own and fetched the first samples."""
    on_grad_norm: Callable[[torch.Tensor], None]
    """Called after the backward passes of a step with the gradient norm, (), before clipping."""

    def running_totals(self) -> dict[str, Any]:
        """Sums since the last line of the log, which a checkpoint between two lines has to keep."""
        return {
            "loss": self._tr_loss,
            "logged_loss": self._total_loss_scalar,
            "logged_step": self._globalstep_last_logged,
        }

    def set_running_totals(self, totals: Mapping[str, Any]) -> None:
        self._tr_loss = totals["loss"].to(self.args.device)
        self._total_loss_scalar = totals["logged_loss"]
        self._globalstep_last_logged = totals["logged_step"]
        self._initial_global_step = 0  # the mean loss at the end is over all steps

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.store_flos()
        self.save_checkpoint()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Too early: there is no optimizer yet. restore_state does it."""

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        self.restore_state(Path(checkpoint))

    def _load_scaler(self, checkpoint: str) -> None:
        """restore_state has done it."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self.restore_progress()

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self.on_grad_norm(grad_norm)
        return grad_norm
