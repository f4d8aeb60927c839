"""Layers over several GPUs, pretended in a record of one process: where weights lie, and what is copied between GPUs.

accelerate's hooks copy the inputs of each module to the GPU of its weights (accelerate/hooks.py, AlignDevicesHook), and
gradients go the same way back. The root's own hook is left out: TRL's loss calls the backbone without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from stages.kit.memory.recorder import Recorder
from stages.kit.models.adapters import plain_name
from stages.kit.models.load import gpu_of


def spread(model: PreTrainedModel | PeftModel, gpus: Mapping[str, int], recorder: Recorder) -> None:
    """Put the model's weights, adapters and buffers on their GPUs, and have inputs copied there.

    gpus: as models/load.py makes it.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    kept_back = base._skip_keys_device_placement or ()  # noqa: SLF001 - what accelerate is asked not to copy
    kept_back = {kept_back} if isinstance(kept_back, str) else set(kept_back)
    for name, tensor in (*base.named_parameters(), *base.named_buffers()):
        gpu = gpu_of(plain_name(name), gpus)
        assert gpu is not None, name
        recorder.place(tensor, gpu)
    for name, module in base.named_modules():
        gpu = gpu_of(plain_name(name), gpus)
        if gpu is None:
            continue
        for tensor in quantization_tensors(module):
            recorder.place(tensor, gpu)
        if name and next(module.parameters(), None) is not None:  # accelerate looks at modules with weights
            hook = partial(_with_inputs_there, recorder=recorder, gpu=gpu, kept_back=kept_back)
            module.register_forward_pre_hook(hook, with_kwargs=True)
            module.register_forward_hook(partial(_with_gradients_there, recorder=recorder, gpu=gpu))
    head = recorder.gpu_of(base.get_output_embeddings().weight)
    base.base_model.register_forward_hook(partial(_with_hidden_states_there, recorder=recorder, gpu=head))


def quantization_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The scales and tables that a layer in 4 bits keeps beside its packed weights (bitsandbytes' QuantState)."""
    state = getattr(module, "quant_state", None)
    if state is None:
        return []
    parts = (*vars(state).values(), *vars(state.state2).values())
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _with_inputs_there(
    _: nn.Module, args: Any, kwargs: dict[str, Any], *, recorder: Recorder, gpu: int, kept_back: set[str]
) -> tuple[Any, dict[str, Any]]:
    there = partial(_copied, recorder=recorder, gpu=gpu)
    moved = {name: value for name, value in kwargs.items() if name not in kept_back}
    return tree_map_only(torch.Tensor, there, args), {**kwargs, **tree_map_only(torch.Tensor, there, moved)}


def _with_gradients_there(_: nn.Module, _inputs: Any, output: Any, *, recorder: Recorder, gpu: int) -> None:
    """As autograd has them where a model's own `to`, which does nothing here, had copied the output elsewhere."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_copied, recorder=recorder, gpu=gpu))


def _with_hidden_states_there(_: nn.Module, _inputs: Any, output: Any, *, recorder: Recorder, gpu: int) -> Any:
    """As TRL's loss has them for the head, which may lie elsewhere than the last layer."""
    output.last_hidden_state = _copied(output.last_hidden_state, recorder=recorder, gpu=gpu)
    return output


def _copied(tensor: torch.Tensor, *, recorder: Recorder, gpu: int) -> torch.Tensor:
    """The tensor on a GPU: itself where it lies there."""
    source = recorder.gpu_of(tensor)
    copy: torch.Tensor = tensor if source == gpu else _Copy.apply(tensor, recorder, source, gpu)
    return copy


class _Copy(torch.autograd.Function):
    """A tensor on another GPU, as `to` copies it; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: Recorder, source: int, gpu: int) -> torch.Tensor:
        ctx.recorder, ctx.source = recorder, source
        with recorder.on(gpu):
            return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        with ctx.recorder.on(ctx.source):
            return gradient.clone(), None, None, None
