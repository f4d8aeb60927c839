"""What torch and its libraries raise when memory runs out, made one exception with an exit code of its own."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from stages.core.errors import OutOfMemory

_SIGNS = (
    # torch.OutOfMemoryError, "CUDA error: out of memory" of a kernel, NCCL, bitsandbytes.
    "out of memory",
    # CUBLAS_, CUDNN_ and CUSOLVER_, which allocate workspaces beside torch.
    "STATUS_ALLOC_FAILED",
    "not enough workspace",
    # c10/core/CPUAllocator: "DefaultCPUAllocator: can't allocate memory"
    "can't allocate memory",
    # vLLM, before it answers.
    "No available memory for the cache blocks",
    "is less than desired GPU memory utilization",
)


@contextmanager
def recognised_out_of_memory() -> Iterator[None]:
    """Turns an error that means "no memory left" into OutOfMemory; any other passes as it is.

    Nothing is freed: the process is to end. bitsandbytes' own allocations end it themselves, with exit code 1.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not means_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise OutOfMemory(f"out of memory: {reason}") from error


def means_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return True
    return any(map(says_out_of_memory, (str(error), *_unsaid(error))))


def says_out_of_memory(text: str) -> bool:
    return any(sign in text for sign in _SIGNS)


def _unsaid(error: BaseException) -> Iterator[str]:
    """What went wrong while weights were quantized: transformers logs it, and raises an error that does not say it."""
    for frame, _ in walk_tb(error.__traceback__):
        yield from getattr(frame.f_locals.get("loading_info"), "conversion_errors", {}).values()
