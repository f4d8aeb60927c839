"""TRL's fused loss on GPUs: its kernels are launched where their tensors lie, and a compiler is not needed. A plan's
fused kernels, which are Triton's too, do need one.

On CUDA the loss scores tiles of logits by Triton's kernels (trl/kernels/chunked_logprob.py). Triton launches a kernel
on the current device, wherever its tensors lie, and needs a C compiler for the code that launches it.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from typing import Any, Literal

import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_trainer

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.models.fused_kernels import refuse_wrong_kernels
from stages.kit.models.load import DTYPES, local_device
from stages.kit.planning.plan import Plan
from stages.kit.training.compiler import compiler_problem

log = logging.getLogger("stages")

LossKernels = Literal["triton", "torch"]
"""The kernels that compute the loss. The two round differently."""


def prepare_fused_loss(device: DeviceParams) -> LossKernels:
    """Make TRL's fused loss, of this whole process, run on the device. Returns what computes it there.

    Where Triton cannot start this is torch, as on a CPU, and a line of the log says why and what to install.
    """
    if device.kind == "cpu":
        return "torch"
    is_installed = chunked_logprob._TRITON_AVAILABLE  # noqa: SLF001
    if problem := (compiler_problem() or driver_problem()) if is_installed else "Triton is not installed":
        log.info("the loss is computed without Triton, slower and with more memory than planned: %s", problem)
        use_torch()
        return "torch"
    launch_where_tensors_are()
    return "triton"


def require_fused_kernels(plan: Plan, loss_kernels: LossKernels) -> None:
    """Raises UserError where the plan is for Liger's kernels and they do not run here, or compute something else."""
    if plan.fused_kernels and loss_kernels != "triton":
        raise UserError(
            "the plan is for Liger's kernels, which Triton compiles; the log says above what that lacks. Install it, "
            f"or plan without: profiles.{plan.profile}.memory.kernels: off"
        )
    if plan.fused_kernels:
        refuse_wrong_kernels(local_device(plan.device), DTYPES[plan.precision])


def driver_problem() -> str | None:
    """Why Triton cannot make its part of the CUDA driver, or None. It is compiled once for each cache, and loaded."""
    from triton.backends.nvidia.driver import CudaUtils

    try:
        CudaUtils()
    # No libcuda.so.1 where ldconfig looks, a compiler's error, a cache that nothing can be written to or loaded from.
    except (AssertionError, subprocess.CalledProcessError, RuntimeError, OSError, ImportError) as error:
        return f"Triton cannot start ({' '.join(str(error).split())})"
    return None


def use_torch() -> None:
    """Have the loss computed by torch's operations, as TRL does where there is no Triton."""
    for module in (chunked_logprob, trl_trainer):  # the one imports it from the other, by name
        module._use_triton = lambda _device: False  # noqa: SLF001


def launch_where_tensors_are() -> None:
    """Guard the launches of both kernels, forward and backward."""
    for name in ("_forward_kernel", "_backward_kernel"):
        kernel = getattr(chunked_logprob, name)
        if not isinstance(kernel, GuardedKernel):
            setattr(chunked_logprob, name, GuardedKernel(kernel))


class GuardedKernel:
    """A Triton kernel that is launched on the device of its first argument, a tensor.

    With layers on several GPUs the head lies on the last one and the first is current: the launch fails, or, where the
    GPUs can read each other's memory, gives wrong numbers (triton-lang/triton#5205).
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.cuda.device(tensor.device):
                return self.kernel[grid](tensor, *args, **kwargs)

        return launch
