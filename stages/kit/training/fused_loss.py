"""TRL's fused loss on GPUs: its kernels are launched where their tensors lie.

On CUDA the loss scores tiles of logits by Triton's kernels (trl/kernels/chunked_logprob.py). Triton launches a kernel
on the current device, wherever its tensors lie, and needs a C compiler for the code that launches it.
"""

from __future__ import annotations

import subprocess

from stages.core.errors import UserError
from stages.kit.internals.trl_internals import has_triton, launch_where_tensors_are
from stages.kit.models.kernels import refuse_wrong_kernels
from stages.kit.models.load import DTYPES, local_device
from stages.kit.planning.plan import Plan
from stages.kit.training.compiler import compiler_problem


def prepare_kernels(plan: Plan) -> None:
    """Make TRL's fused loss, of this whole process, run on the plan's device, where the plan's fused kernels run too.

    Raises UserError where Triton cannot start, or a kernel of Liger's computes something else than torch.
    """
    if plan.device.kind == "cpu":
        return
    if problem := (compiler_problem() or driver_problem()) if has_triton() else "Triton is not installed":
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
