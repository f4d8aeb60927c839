"""TRL's fused loss: where its kernels are launched, that they compute what torch does, and refusal without Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_trainer

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.kit.internals.trl_internals import GuardedKernel
from stages.kit.memory.cuda import cuda_semantics
from stages.kit.models import kernels as liger
from stages.kit.training import kernels as kernels_module
from stages.kit.training.kernels import prepare_kernels
from tests import ROOT
from tests.kit.training.small import plan_for

CPU = plan_for("r1-llm-only")
GPUS = replace(CPU, device=DeviceParams(kind="cuda", count=2))
KERNELS = ("_forward_kernel", "_backward_kernel")


class CurrentDevice:
    """A stand-in for torch.cuda.device: it sets the device that a kernel is launched on."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)

    @contextmanager
    def set_to(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before


class StandInKernel:
    """A kernel of Triton's, computed by torch, that notes what the current device is and where its tensors lie."""

    def __init__(self, compute: Callable[..., None], current: CurrentDevice) -> None:
        self.compute, self.current = compute, current
        self.launches: list[tuple[torch.device, set[torch.device]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            tensors = {argument.device for argument in args if isinstance(argument, torch.Tensor)}
            self.launches.append((self.current.device, tensors))
            self.compute(*args, **kwargs)

        return launch


@pytest.fixture(autouse=True)
def trl_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNELS:
        monkeypatch.setattr(chunked_logprob, name, getattr(chunked_logprob, name, None), raising=False)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[StandInKernel]:
    """A machine with GPUs and a working compiler, as far as TRL's loss can tell; its tensors lie on the CPU."""
    current = CurrentDevice()
    stand_ins = [
        StandInKernel(chunked_logprob._forward_tile, current),
        StandInKernel(chunked_logprob._backward_tile, current),
    ]
    monkeypatch.setattr(torch.cuda, "device", current.set_to)
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(chunked_logprob, "_use_triton", lambda _: True)
    monkeypatch.setattr(trl_trainer, "_use_triton", lambda _: True)
    monkeypatch.setattr(chunked_logprob, "_forward_kernel", stand_ins[0])
    monkeypatch.setattr(chunked_logprob, "_backward_kernel", stand_ins[1])
    monkeypatch.setattr(chunked_logprob, "triton", Arithmetic, raising=False)
    monkeypatch.setattr(kernels_module, "compiler_problem", lambda: None)
    monkeypatch.setattr(kernels_module, "driver_problem", lambda: None)
    return stand_ins


class Arithmetic:
    @staticmethod
    def cdiv(number: int, step: int) -> int:
        return -(-number // step)


def loss_and_gradients() -> list[torch.Tensor]:
    """A loss of seven tokens over a vocabulary of 40, in chunks of 16."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 8).requires_grad_() for rows in (7, 40))
    targets = torch.randint(0, 40, (7,))
    log_probs, *_ = chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())
    loss = -log_probs.sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def test_every_kernel_is_launched_on_the_device_of_its_tensors(kernels: list[StandInKernel]) -> None:
    here = torch.device("cpu")
    prepare_kernels(GPUS)
    loss_and_gradients()
    assert [kernel.launches for kernel in kernels] == [[(here, {here})] * 3] * 2
    assert kernels[0].current.device == torch.device("cuda", 0)


def test_without_the_guard_it_is_launched_on_whatever_device_is_current(kernels: list[StandInKernel]) -> None:
    """TRL alone fails the test above."""
    loss_and_gradients()
    assert {device for kernel in kernels for device, _ in kernel.launches} == {torch.device("cuda", 0)}


def test_a_process_that_prepares_twice_guards_once(kernels: list[StandInKernel]) -> None:
    prepare_kernels(GPUS)
    prepare_kernels(GPUS)
    guarded = chunked_logprob._forward_kernel
    assert isinstance(guarded, GuardedKernel)
    assert guarded.kernel is kernels[0]


@pytest.mark.parametrize("problem", ["compiler_problem", "driver_problem"])
def test_where_triton_cannot_start_training_on_a_gpu_is_refused(
    kernels: list[StandInKernel], monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(kernels_module, problem, lambda: "no gcc; install it")
    with pytest.raises(UserError, match=r"^training on a GPU needs Triton, .*: no gcc; install it$"):
        prepare_kernels(GPUS)
    assert [getattr(chunked_logprob, name) for name in KERNELS] == kernels


def test_so_it_is_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels_module, "compiler_problem")
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", False)
    with pytest.raises(UserError, match=r"Triton is not installed$"):
        prepare_kernels(GPUS)


def test_ligers_kernels_are_tried_where_the_plan_is_for_them(
    kernels: list[StandInKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[torch.device, torch.dtype]] = []
    monkeypatch.setattr(liger, "refuse_wrong_kernels", lambda *args: tried.append(args))
    prepare_kernels(GPUS)
    assert not tried
    prepare_kernels(replace(GPUS, fused_kernels=True, precision="bf16"))
    assert tried == [(torch.device("cuda", 0), torch.bfloat16)]


def test_a_cpu_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels_module, "compiler_problem")
    before = [getattr(chunked_logprob, name) for name in KERNELS]
    prepare_kernels(CPU)
    assert [getattr(chunked_logprob, name) for name in KERNELS] == before


def test_a_prediction_is_of_tritons_kernels(kernels: list[StandInKernel]) -> None:
    prepare_kernels(GPUS)
    prepared = [getattr(chunked_logprob, name) for name in KERNELS]
    with cuda_semantics():
        assert chunked_logprob._use_triton(torch.device("cpu"))
        loss_and_gradients()
        assert [kernel.launches for kernel in kernels] == [[], []]
    assert [getattr(chunked_logprob, name) for name in KERNELS] == prepared


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it is for Linux")


@needs_triton
def test_a_driver_that_triton_does_not_find_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process must not load a driver's library, so it looks where there is none."""
    from triton.backends.nvidia import driver

    def not_found() -> None:
        raise AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up")

    monkeypatch.setattr(driver, "CudaUtils", not_found)
    problem = kernels_module.driver_problem()
    assert problem == "Triton cannot start (libcuda.so cannot found! Please make sure GPU is set up)"


# Triton reads TRITON_INTERPRET when a kernel is defined, so this is a process of its own. It prints the loss and the
# gradients of each case, by Triton's kernels and by torch.
INTERPRETED = """
import json, sys
import torch
from triton.runtime.interpreter import InterpretedFunction
from trl.kernels import chunked_logprob

assert isinstance(chunked_logprob._forward_kernel, InterpretedFunction)

def results(use_triton, dtype, outputs=(), softcap=None, scale=1.0, temperature=1.0):
    torch.manual_seed(0)
    chunked_logprob._use_triton = lambda _: use_triton
    hidden, weight = torch.randn(9, 16), 0.3 * torch.randn(2100, 16)  # a vocabulary of more than one block and chunk
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
    targets = torch.randint(0, 2100, (9,))
    apply = chunked_logprob.ChunkedLogProbFunction.apply
    log_probs, entropy, *_ = apply(*leaves, None, targets, temperature, 1536, softcap, scale, outputs)
    loss = -log_probs.mean() + (0 if entropy is None else 0.1 * entropy.mean())
    loss.backward()
    return [tensor.double().flatten().tolist() for tensor in (loss.detach(), *(leaf.grad for leaf in leaves))]

cases = json.loads(sys.argv[1])
print(json.dumps([
    [results(use_triton, getattr(torch, dtype), **options) for use_triton in (True, False)] for dtype, options in cases
]))
"""

CASES: Sequence[tuple[str, dict[str, Any]]] = (
    ("float32", {}),
    ("bfloat16", {}),
    ("float16", {}),
    ("float32", {"softcap": 5.0, "scale": 0.7, "temperature": 1.3}),
    ("float32", {"outputs": ["entropy", "is_top1"]}),
)

# Kernels and torch round a gradient to the weights' type from sums in another order.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}


@needs_triton
def test_tritons_kernels_and_torch_give_the_same_loss_and_gradients() -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps(CASES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for (dtype, options), (by_triton, by_torch) in zip(CASES, json.loads(result.stdout), strict=True):
        for ours, theirs in zip(by_triton, by_torch, strict=True):
            largest = max(map(abs, theirs))
            assert largest > 0
            assert ours == pytest.approx(theirs, rel=0, abs=TOLERANCE[dtype] * largest), (dtype, options)
