"""Predictions against what a GPU says. Each is made, and each is measured, in a process of its own."""

import os
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from stages.kit.errors import OutOfMemory
from stages.kit.memory.calibrating.children import Children, Task
from stages.kit.memory.calibrating.measured import DeviceFacts, Measured
from stages.kit.memory.calibrating.settings import ON_CUDA
from stages.kit.memory.calibrating.work import forecast_of, predict_task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

A_HANDFUL = tuple(setting for setting in ON_CUDA if setting.geometry == "qwen2-vl-2b")[:5]
"""nf4; bf16, fp16 and fp32; checkpointed and not; all weights of the vision tower."""


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Children:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return Children(tmp_path_factory.mktemp("logs"), gpu)


@pytest.fixture(scope="module")
def facts(children: Children) -> DeviceFacts:
    return TypeAdapter(DeviceFacts).validate_json(children.run(Task(job="facts", device="cuda")))


@pytest.mark.parametrize("name", [setting.name for setting in A_HANDFUL])
def test_what_is_predicted_is_what_is_measured_within_7_percent(
    name: str, children: Children, facts: DeviceFacts
) -> None:
    forecast = forecast_of(children, predict_task(name, facts, "cuda"))
    if forecast.scaled.high_bytes > facts.total_bytes:
        pytest.skip(f"{facts.name} is too small")
    answer = children.run(Task(job="measure", device="cuda", setting=name, layers=forecast.layers))
    measured = TypeAdapter(Measured).validate_json(answer)
    for prediction in (forecast.scaled, forecast.exact):
        assert prediction.allocated_bytes == pytest.approx(measured.allocated_bytes, rel=0.07)
        assert prediction.reserved_bytes == pytest.approx(measured.reserved_bytes, rel=0.07)
        assert prediction.total_bytes == pytest.approx(measured.total_bytes, rel=0.07)


def test_what_cannot_fit_runs_out_of_memory_and_is_known_to_have(
    children: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch gets a hundredth of the GPU: sitecustomize runs in every Python that finds it."""
    (tmp_path / "sitecustomize.py").write_text("import torch; torch.cuda.set_per_process_memory_fraction(0.01)\n")
    monkeypatch.setattr(
        "stages.kit.memory.calibrating.children.stage_environment",
        lambda *_, **__: {**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    with pytest.raises(OutOfMemory):
        children.run(Task(job="measure", device="cuda", setting=A_HANDFUL[0].name))


def test_the_facts_are_those_of_a_gpu(facts: DeviceFacts) -> None:
    assert facts.total_bytes > 2**30
    assert 50 * 2**20 < facts.context_bytes < 2 * 2**30
    assert facts.workspace_bytes == 32 * 2**20  # CUBLAS_WORKSPACE_CONFIG=:4096:8, as every stage has it
    assert facts.workspaces == 2
