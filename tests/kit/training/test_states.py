import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.optim import PagedAdamW8bit
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from stages.kit.training import resume
from stages.kit.training.resume import load_state, save_state
from stages.kit.training.trainer import RecipeTrainer

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states") / "process-0.safetensors"


@given(VALUES)
def test_a_state_without_tensors_comes_back(path: Path, value: Any) -> None:
    save_state(value, path)
    assert load_state(path) == value


def test_tensors_come_back_bit_for_bit_wherever_they_lie(path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    state: dict[str, Any] = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": whole.T}, 10: {"exp_avg": torch.empty(0, 4)}},
        "nan": [torch.tensor([math.nan, -0.0, math.inf]), math.inf],
        "kinds": [torch.tensor([1, 2], dtype=kind) for kind in (torch.uint8, torch.int64, torch.bfloat16, torch.bool)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "pair": (1, 2),
    }
    save_state(state, path)
    found = load_state(path)
    assert torch.equal(found["state"]["0"]["exp_avg"], whole.T)
    assert found["state"]["0"]["step"].shape == ()
    assert found["state"]["10"]["exp_avg"].shape == (0, 4)
    assert found["nan"][0].view(torch.int32).tolist() == state["nan"][0].view(torch.int32).tolist()
    assert found["nan"][1] == math.inf
    for one, other in zip(found["kinds"], state["kinds"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert torch.equal(found["parameter"], torch.ones(2))
    assert found["pair"] == [1, 2]


def test_a_tensor_in_several_places_is_written_once_and_a_view_of_it_on_its_own(path: Path) -> None:
    table = torch.arange(1000.0)
    save_state([table, {"again": table}, table[:10]], path)
    first, second, view = load_state(path)
    assert first is second["again"]
    assert torch.equal(view, table[:10])
    assert path.stat().st_size < 2 * table.nbytes


def test_a_full_disk_and_a_missing_folder_are_errors_of_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        save_state({"a": torch.ones(1)}, path.parent / "nowhere/process-0.safetensors")

    def full(*_: Any) -> None:  # safetensors says it in a text
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(resume, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_state({"a": torch.ones(1)}, path)


def test_moments_of_a_paged_optimizer_go_on_in_managed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' own loading would put them on the GPU."""
    (before, weight), (after, other) = (paged_optimizer() for _ in range(2))
    before.init_state(before.param_groups[0], weight, 0, 0)
    moments = [before.state[weight][name].random_(256).clone() for name in ("state1", "state2")]
    buffers: list[torch.Tensor] = []

    def managed(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        buffers.append(torch.zeros_like(parameter, dtype=dtype))
        return buffers[-1]

    monkeypatch.setattr(after, "get_state_buffer", managed)
    trainer: Any = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=after, param_groups=after.param_groups),
        lr_scheduler=SimpleNamespace(load_state_dict=lambda _: None),
        plan=SimpleNamespace(optimizer="paged_adamw_8bit"),
        _restored={"optimizer": before.state_dict(), "scheduler": {}, "scaler": None},
    )
    RecipeTrainer.restore_optimizer(trainer)
    restored = [after.state[other][name] for name in ("state1", "state2")]
    assert {id(tensor) for tensor in restored} == {id(buffer) for buffer in buffers}
    assert all(torch.equal(one, tensor) for one, tensor in zip(restored, moments, strict=True))
    assert torch.equal(after.state[other]["qmap1"], before.state[weight]["qmap1"])


def paged_optimizer() -> tuple[Any, torch.nn.Parameter]:
    weight = torch.nn.Parameter(torch.ones(128, 64))  # fewer than 4,096 weights would have moments of 32 bits
    return PagedAdamW8bit([weight]), weight
