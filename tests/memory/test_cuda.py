"""On a CPU, without weights, a step does what CUDA would do; and after it the CPU is as it was."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_trainer

from stages.core.params.schema import DeviceParams
from stages.memory import step
from stages.memory.cuda import Kernel, chosen_kernel, cuda_semantics, hidden_bytes
from stages.memory.predict import Depth, depth_of
from stages.memory.recorder import Peak, Recorder
from stages.memory.step import record_step
from stages.models import kernels
from tests.memory.small import CUDA, FULL, R1, R4, batch_of, config_of, peak_bytes, plan_of, processor_of, recorded

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    """The names of the operations that reach the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def behaviour() -> dict[str, Any]:
    """This process's results of everything that cuda_semantics changes."""
    found: dict[str, Any] = {}
    with FakeTensorMode():
        states = torch.ones(1, 2, 8, 16, requires_grad=True)
        with Seen() as seen:
            F.scaled_dot_product_attention(states, states, states)
        found["attention"] = seen.names
        with Seen() as seen:
            F.dropout(states, 0.5)
        found["dropout"] = seen.names
    states = torch.ones(1, 2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        half = states.bfloat16()
        found["layer_norm"] = F.layer_norm(half, [16]).dtype
        found["power"] = half.pow(2).dtype
        found["softmax"] = half.softmax(-1).dtype
        found["sum"] = half.sum().dtype
        found["linear"] = F.linear(states, torch.ones(16, 16)).dtype
    found["a row"] = kernels.takes_variable_lengths(states.bfloat16())
    found["foreach"] = optimizer._get_foreach_kernels_supported_devices()  # type: ignore[attr-defined]
    for module in (chunked_logprob, trl_trainer):
        for name in ("_forward_kernel", "_backward_kernel", "_addmm_fp32", "_use_triton", "triton"):
            found[f"{module.__name__}.{name}"] = getattr(module, name, "missing")
    found["apply"] = nn.Module._apply
    found["types"] = (*_foreach_utils._foreach_supported_types, *optimizer._foreach_supported_types)
    return found


def states(heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(1, heads, 4, width, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "heads", "key_heads", "width", "masked", "kernel"),
    [
        (torch.bfloat16, 4, 4, 64, False, "flash"),
        (torch.float16, 4, 4, 80, False, "flash"),
        (torch.bfloat16, 4, 2, 64, False, "flash"),
        (torch.bfloat16, 4, 4, 256, False, "flash"),
        (torch.bfloat16, 4, 4, 264, False, "efficient"),
        (torch.bfloat16, 4, 4, 64, True, "efficient"),
        (torch.bfloat16, 4, 2, 64, True, "math"),
        (torch.float32, 4, 4, 64, False, "efficient"),
        (torch.float32, 4, 4, 64, True, "efficient"),
        (torch.float32, 4, 2, 64, False, "math"),
    ],
)
def test_attention_takes_the_kernel_that_torch_takes_on_cuda(
    dtype: torch.dtype, heads: int, key_heads: int, width: int, masked: bool, kernel: Kernel
) -> None:
    mask = torch.empty(1, 1, 4, 4, dtype=torch.bool) if masked else None
    assert chosen_kernel(states(heads, width, dtype), states(key_heads, width, dtype), mask) == kernel


def test_within_it_operations_are_those_of_cuda() -> None:
    with cuda_semantics():
        found = behaviour()
    assert found["layer_norm"] == found["power"] == found["softmax"] == found["sum"] == torch.float32
    assert found["linear"] == torch.bfloat16
    assert "aten.native_dropout.default" in found["dropout"]
    assert "aten._scaled_dot_product_efficient_attention.default" in found["attention"]
    assert "cpu" in found["foreach"]
    assert found["a row"]


def test_a_record_leaves_nothing_behind_whether_or_not_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan, before = config_of("text"), plan_of(**R1), behaviour()
    batch, processor = batch_of(plan, config), processor_of("text")
    peak = peak_bytes(record_step(plan, config, processor, batch))

    def fails(*_: object) -> NoReturn:
        raise KeyError("in the midst of it")

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="midst"):
        patch.setattr(step, "fill_optimizer_state", fails)
        record_step(plan_of(**R1, **CUDA), config, processor, batch)
    assert behaviour() == before
    assert FakeTensor not in before["types"]
    assert not AcceleratorState._shared_state  # it would hold on to the other precision
    assert peak_bytes(record_step(plan, config, processor, batch)) == peak


def test_deterministic_flash_attention_adds_up_in_copies_where_the_batch_is_small() -> None:
    """144 processors on 28 heads of one sample: 6 copies of dQ in fp32, on an L4's 58: 3; on 28 heads of 8 samples: 1.
    And row sums."""
    backward = aten._scaled_dot_product_flash_attention_backward.default
    for batch, processors, copies in ((1, 144, 6), (1, 58, 3), (8, 144, 1)):
        states = torch.empty(batch, 28, 256, 128, dtype=torch.bfloat16)
        rows = batch * 28 * 256
        assert hidden_bytes(backward, (states, states, states), processors) == rows * 4 * (1 + copies * 128)


def test_a_named_card_has_its_own_processors() -> None:
    """An L4 has 58, and needs fewer copies than a large GPU."""
    sizes = []
    for card in (None, "L4"):
        settings: dict[str, Any] = {**CUDA, "device": DeviceParams(kind="cuda", card=card)}
        storages = recorded("text", plan_of(**R1, **settings)).storages
        sizes.append(sum(storage.size_bytes for storage in storages if storage.budget == "temporaries"))
    assert sizes[1] < sizes[0]


def test_flash_attention_of_a_row_adds_up_in_rows_that_each_sample_rounds_up() -> None:
    """144 processors on 28 heads of 3 samples: 2 copies of dQ in fp32. Row sums, and dK and dV of 28 heads, not 4."""
    backward = torch.ops.torch_attn._varlen_attn_backward.default
    query, key = (torch.empty(256, heads, 128, dtype=torch.bfloat16) for heads in (28, 4))
    rows, ends = 28 * (256 + 3 * 128), torch.tensor([0, 100, 200, 256], dtype=torch.int32)
    expected = rows * 4 * (1 + 2 * 128) + 2 * 256 * 28 * 128 * 2
    assert hidden_bytes(backward, (query, query, key, key, query, None, ends), 144) == expected


@pytest.mark.parametrize("model", ["text", "detection"])
def test_a_row_has_no_mask_and_one_call_for_all_its_samples(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(query))
        return varlen_attn(query, *args, **kwargs)

    monkeypatch.setattr(kernels, "varlen_attn", counted)
    settings = {**R1, **CUDA, "max_length": 512, "micro_batch": 4}
    masked = peak_bytes(recorded(model, plan_of(**settings), padded=True))
    assert peak_bytes(recorded(model, plan_of(**settings, padding_free=True))) < 0.98 * masked
    assert calls.count(4 * 512 - 30) == 2 * 2  # two layers, two micro-batches
    assert len(calls) == 2 * sum(depth_of(config_of(model))), "one call a layer, of a vision tower too"


def test_what_a_kernel_takes_for_itself_counts_beside_what_it_returns() -> None:
    """masked_scatter: 9 bytes an element, while the result is there already."""
    recorder = Recorder(DeviceParams(kind="cuda"), config_of("text"))
    with recorder:
        recorder.begin("forward")
        tensor, mask = torch.empty(1 << 20), torch.empty(1 << 20, dtype=torch.bool)
        result = tensor.masked_scatter(mask, tensor)
    assert hidden_bytes(aten.masked_scatter.default, (tensor, mask, tensor), 144) == 9 << 20
    assert recorder.finish().peaks()["forward"].total() == (4 + 1 + 4 + 9) << 20
    assert result.numel() == 1 << 20


def peaks_of(**settings: Any) -> dict[Any, Peak]:
    return recorded("text", plan_of(**{**CUDA, **settings}), padded=True).peaks()


def test_optimizers_take_what_they_take_on_cuda() -> None:
    names = ("adamw_torch", "adamw_torch_fused", "adamw_8bit")
    foreach, fused, shrunk = (peaks_of(**FULL, optimizer=name)["step"] for name in names)
    states = fused["optimizer"]
    # Unfused, AdamW has temporaries as large as the trained weights; fused none.
    assert foreach["temporaries"] > 0.9 * states / 2
    assert fused["temporaries"] < 0.02 * states
    assert foreach["optimizer"] == states
    # 8 bits for 32, a scale for 256 of them, and small tensors stay as they are.
    assert shrunk["optimizer"] == pytest.approx(states / 4 * (1 + 4 / 256), rel=0.02)
    lion = peaks_of(**FULL, optimizer="lion_32bit")["step"]
    assert lion["optimizer"] == pytest.approx(states / 2, rel=0.01)
    assert lion["temporaries"] < 0.02 * states, "a CPU's step has some"


WAITS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.repeat_interleave.Tensor),
    *(aten.masked_select.default, aten.equal.default),
}


def operators_and_waits(monkeypatch: pytest.MonkeyPatch, depth: Depth, **changes: Any) -> tuple[int, int]:
    """Operators of a recorded step on a GPU, and those that the host waits for."""
    names: list[Any] = []
    recorded, tolist, at_work = Recorder.recorded, torch.Tensor.tolist, []

    def seen(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        masked = func is aten.index.Tensor and any(each is not None and each.dtype == torch.bool for each in args[1])
        names.append("wait" if func in WAITS or masked else func)
        at_work.append(func)
        result = recorded(recorder, func, args, kwargs)
        at_work.pop()
        return result

    def listed(tensor: torch.Tensor) -> Any:
        names.extend([] if at_work else ["wait"])  # the recorder's are none of the step's
        return tolist(tensor)

    plan = plan_of(**R4, **CUDA, grad_accumulation=1, padding_free=True, fused_kernels=True, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "recorded", seen)
        patch.setattr(torch.Tensor, "tolist", listed)
        config = config_of("detection", depth)
        record_step(plan, config, processor_of("detection"), batch_of(plan, config))
    return len(names), names.count("wait")


def test_no_layer_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    operators, waits = operators_and_waits(monkeypatch, (1, 1))
    assert waits > 0
    for depth in ((2, 1), (1, 2)):
        more_operators, more_waits = operators_and_waits(monkeypatch, depth)
        assert (more_operators > operators, more_waits) == (True, waits)


def test_adapters_without_copies_save_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = operators_and_waits(monkeypatch, (1, 1), quantization="nf4")
    monkeypatch.setattr(kernels, "fuse_adapters", lambda model: None)
    assert ours < operators_and_waits(monkeypatch, (1, 1), quantization="nf4")[0]
