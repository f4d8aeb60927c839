"""TRL's fused loss is launched where its tensors lie, and training on a GPU is refused if Triton cannot compile."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_trainer

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams
from stages.memory.cuda import cuda_semantics
from stages.training import kernels
from stages.training.kernels import compiler_problem, prepare_kernels
from tests.training.small import plan_for

CPU = plan_for("r1-llm-only")
GPUS = replace(CPU, device=DeviceParams(kind="cuda", count=2))
KERNELS = ("_forward_kernel", "_backward_kernel")


class StandInKernel:
    """A Triton kernel, computed by torch, that records the current device and the devices of its tensors."""

    def __init__(self, compute: Callable[..., None], current: list[torch.device]) -> None:
        self.compute, self.current = compute, current
        self.launches: list[tuple[torch.device, set[torch.device]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            tensors = {argument.device for argument in args if isinstance(argument, torch.Tensor)}
            self.launches.append((self.current[-1], tensors))
            self.compute(*args, **kwargs)

        return launch


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandInKernel]:
    """A machine with GPUs and a working compiler, as far as TRL's loss can tell; its tensors lie on the CPU."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def set_to(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    found = [StandInKernel(tile, current) for tile in (chunked_logprob._forward_tile, chunked_logprob._backward_tile)]
    monkeypatch.setattr(torch.cuda, "device", set_to)
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", True)
    monkeypatch.setattr(chunked_logprob, "_use_triton", lambda _: True)
    monkeypatch.setattr(trl_trainer, "_use_triton", lambda _: True)
    for name, stand_in in zip(KERNELS, found, strict=True):
        monkeypatch.setattr(chunked_logprob, name, stand_in, raising=False)
    arithmetic = SimpleNamespace(cdiv=lambda number, step: -(-number // step))
    monkeypatch.setattr(chunked_logprob, "triton", arithmetic, raising=False)
    monkeypatch.setattr(kernels, "compiler_problem", lambda: None)
    return found


def take_a_loss() -> None:
    """Loss and gradients of seven tokens over a vocabulary of 40, in chunks of 16."""
    hidden, weight = (torch.randn(rows, 8).requires_grad_() for rows in (7, 40))
    targets = torch.randint(0, 40, (7,))
    log_probs, *_ = chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 16, None, 1.0, ())
    log_probs.sum().backward()


def test_a_kernel_is_launched_on_the_device_of_its_tensors_and_not_at_all_to_predict_memory(
    stand_ins: list[StandInKernel],
) -> None:
    prepare_kernels(GPUS)
    with cuda_semantics():
        take_a_loss()
    assert [kernel.launches for kernel in stand_ins] == [[], []]
    take_a_loss()
    here = torch.device("cpu")
    assert [kernel.launches for kernel in stand_ins] == [[(here, {here})] * 3] * 2
    assert stand_ins[0].current == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (kernels, "compiler_problem", lambda: "not installed"),
        (chunked_logprob, "_TRITON_AVAILABLE", False),
    ],
)
def test_training_on_a_gpu_needs_triton_and_on_a_cpu_nothing(
    stand_ins: list[StandInKernel], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any
) -> None:
    monkeypatch.setattr(place, name, value)
    with pytest.raises(UserError, match=r"^training on a GPU needs Triton, .* not installed$"):
        prepare_kernels(GPUS)
    prepare_kernels(CPU)
    assert [getattr(chunked_logprob, kernel) for kernel in KERNELS] == stand_ins


@pytest.mark.parametrize(
    ("programs", "caller", "problem"),
    [
        ([], None, "no C compiler gcc"),
        (["clang"], None, None),
        (["gcc"], "absent", "no C compiler absent"),
        (["gcc"], "no headers", "Python.h"),
    ],
)
def test_the_compiler_that_triton_takes_and_pythons_headers_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: list[str], caller: str | None, problem: str | None
) -> None:
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path / ("no" if caller == "no headers" else "")))
    if caller == "absent":
        monkeypatch.setenv("CC", caller)
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = compiler_problem()
    if problem is None:
        assert found is None
    else:
        assert problem in str(found)
        assert "apt install gcc libc6-dev python3-dev" in str(found)
