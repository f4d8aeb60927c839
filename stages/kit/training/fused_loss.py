"""TRL's fused loss on GPUs: its kernels are launched where their tensors lie.

On CUDA the loss scores tiles of logits by Triton's kernels (trl/kernels/chunked_logprob.py). Triton launches a kernel
on the current device, wherever its tensors lie, and needs a C compiler for the code that launches it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import torch
from trl.kernels import chunked_logprob

from stages.core.errors import UserError
from stages.kit.models.fused_kernels import refuse_wrong_kernels
from stages.kit.models.load import DTYPES, local_device
from stages.kit.planning.plan import Plan
from stages.kit.training.compiler import compiler_problem


def prepare_kernels(plan: Plan) -> None:
    """Make TRL's fused loss, of this whole process, run on the plan's device, where the plan's fused kernels run too.

    Raises UserError where Triton cannot start, or a kernel of Liger's computes something else than torch.
    """
    if plan.device.kind == "cpu":
        return
    is_installed = chunked_logprob._TRITON_AVAILABLE  # noqa: SLF001
    if problem := (compiler_problem() or driver_problem()) if is_installed else "Triton is not installed":
        raise UserError(f"training on a GPU needs Triton, which compiles kernels where it runs: {problem}")
    launch_where_tensors_are()
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
