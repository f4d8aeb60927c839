"""Triton's kernels of TRL's fused loss, which score tiles of logits on a GPU, and the C compiler that Triton needs.

Triton compiles the code that launches its kernels where it runs. Imports torch only to prepare a training.

Run     python -m stages.training.kernels   prints what to install for the compiler, or nothing (docker/setup)
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from stages.core.errors import UserError
from stages.planning.plan import Plan


def prepare_kernels(plan: Plan) -> None:
    """Have TRL's fused loss and the plan's fused kernels run on the plan's GPU, in this process.

    Raises UserError if Triton cannot compile, or Liger's kernels compute something else than torch.
    """
    if not plan.on_gpu:
        return
    from stages.internals.trl_internals import has_triton, launch_where_tensors_are
    from stages.models.load import local_device

    if problem := compiler_problem() if has_triton() else "Triton is not installed":
        raise UserError(f"training on a GPU needs Triton, which compiles kernels where it runs: {problem}")
    launch_where_tensors_are()
    if plan.fused_kernels:
        refuse_wrong_kernels(str(local_device(plan.device)))


def refuse_wrong_kernels(device: str) -> None:
    """Raises UserError if a tiny model has other gradients with Liger's kernels than with torch's, in fp32."""
    import torch

    from stages.models.folders import GEOMETRIES_DIR
    from stages.models.kernels import fused_kernels
    from stages.models.load import load_config, new_model

    def gradients(*, fused: bool) -> torch.Tensor:
        torch.manual_seed(0)
        tokens = torch.arange(64, device=device)[None]
        with torch.device(device):
            model = new_model(load_config(GEOMETRIES_DIR / "qwen2.5-tiny"), precision="fp32").train()
        with fused_kernels(model, used=fused):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    with torch.random.fork_rng([device] if device != "cpu" else []):
        ours, plain = gradients(fused=True), gradients(fused=False)
    off = float((ours - plain).norm() / plain.norm())
    if not off <= 1e-3:
        raise UserError(f"Liger's kernels are off by {off:.1g} on this GPU; plan without, by memory.kernels: off")


def compiler_problem() -> str | None:
    """The reason why Triton cannot compile for this Python, and what to install, in one line; None if none is known.

    Triton takes CC, else gcc, else clang, and Python's own headers (triton/runtime/build.py, 3.7.1).
    """
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang") or "gcc")
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if shutil.which(compiler) and headers.is_file():
        return None
    missing = headers if shutil.which(compiler) else f"C compiler {compiler}"
    return (
        f"there is no {missing}; install what is missing: apt install gcc libc6-dev python3-dev (Debian, Ubuntu), "
        "dnf install gcc python3-devel (Fedora)"
    )


if __name__ == "__main__":
    print(compiler_problem() or "", end="")
