"""What is taken for memory that ran out, and what is not."""

import errno

import pytest
import torch
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.kit.memory_use.out_of_memory import recognised_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("NCCL Error 1: unhandled cuda error: Cuda failure 2 'out of memory'"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_an_error_for_want_of_memory_ends_the_stage_with_its_code(error: Exception) -> None:
    with pytest.raises(OutOfMemory, match=r"^out of memory: [^\n]+$") as caught, recognised_out_of_memory():
        raise error
    assert caught.value.exit_code == OUT_OF_MEMORY
    assert caught.value.__cause__ is error


def test_torch_on_a_cpu_is_understood() -> None:
    with pytest.raises(OutOfMemory, match="can't allocate memory"), recognised_out_of_memory():
        torch.empty(1 << 60, dtype=torch.uint8)


def test_weights_that_did_not_fit_while_they_were_quantized_are_understood() -> None:
    """transformers collects the errors of conversions, and raises one that says nothing of them."""
    info = LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(),
        mismatched_keys=set(),
        skipped_pp_keys=set(),
        error_msgs=[],
        conversion_errors={"lm_head.weight": "Bnb4bitQuantize: CUDA out of memory. Tried to allocate 1.02 GiB"},
    )
    with pytest.raises(OutOfMemory), recognised_out_of_memory():
        log_state_dict_report(torch.nn.Linear(1, 1), "folder", False, info)
    info.conversion_errors = {"lm_head.weight": "Bnb4bitQuantize: blocksize must be a multiple of 64"}
    with pytest.raises(RuntimeError, match="automatic conversion"), recognised_out_of_memory():
        log_state_dict_report(torch.nn.Linear(1, 1), "folder", False, info)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("out of memory"),
        UserError("sample 3 has 4096 tokens"),
    ],
)
def test_any_other_error_passes_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, recognised_out_of_memory():
        raise error
    assert caught.value is error
