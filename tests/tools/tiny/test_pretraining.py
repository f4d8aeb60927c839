import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn
from transformers import PreTrainedModel, Qwen2ForCausalLM

from stages.kit.models.folders import check_model_folder
from tests.tiny import SMALLEST_TEXT
from tools.tiny.architecture import build_tiny_qwen2
from tools.tiny.pretraining import FIRST_STEPS, Settings, begin, command, model_card, rate_factor, train_steps

SETTINGS = Settings(steps=FIRST_STEPS + 10, batch_size=1, warmup_steps=2, threads=1)


def prepare(settings: Settings, auxiliary: nn.Module | None = None) -> tuple[Any, Any, Iterator[float]]:
    """Training on one and the same sequence."""
    model, tokenizer = build_tiny_qwen2(["tôi đi"], SMALLEST_TEXT, seed=1)
    return model, tokenizer, training(model, settings, auxiliary)


def training(model: Qwen2ForCausalLM, settings: Settings, auxiliary: nn.Module | None) -> Iterator[float]:
    begin(model, settings)
    ids = torch.arange(6)[None]

    def losses(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return loss + (auxiliary(torch.ones(1)).sum() if auxiliary else 0), loss

    yield from train_steps(model, settings, losses, auxiliary=auxiliary.parameters() if auxiliary else ())


def write(out_dir: Path, measure: Any, *options: str) -> Result:
    main = command("", SETTINGS, prepare, measure, card="moe.md")
    return CliRunner().invoke(main, ["--out", str(out_dir), *options])


def test_the_rate_warms_up_and_ends_at_three_percent() -> None:
    settings = Settings(steps=100, batch_size=1, warmup_steps=10)
    rates = [rate_factor(step, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.1, abs=0.001)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.03)


def test_auxiliary_weights_are_trained_beside_all_of_the_models() -> None:
    beside = nn.Linear(1, 1)
    model, _, losses = prepare(SETTINGS, beside)
    before = [parameter.clone() for parameter in (*model.parameters(), *beside.parameters())]
    seen = list(losses)
    assert seen[-1] < seen[0]
    after = [*model.parameters(), *beside.parameters()]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_is_written_is_what_was_trained_and_measured(tmp_path: Path) -> None:
    def measure(written: PreTrainedModel, _: Any) -> dict[str, Any]:
        assert written.dtype == torch.float32
        return {"truthfulqa": sum(parameter.sum().item() for parameter in written.parameters()), "qmsum": 0}

    base = tmp_path / "base"
    assert write(base, measure).exit_code == 0
    model, _, losses = prepare(SETTINGS)
    seen = list(losses)
    record = json.loads((base / "pretraining.json").read_text())
    assert record["settings"]["steps"] == len(seen)
    assert record["first_losses"] == [round(loss, 4) for loss in seen[:FIRST_STEPS]]
    assert record["final_loss"] == pytest.approx(sum(seen[-25:]) / 25, abs=1e-4)
    assert record["model_sha256"] == hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    check_model_folder(base)
    rounded = sum(parameter.bfloat16().float().sum().item() for parameter in model.parameters())
    assert record["figures"]["truthfulqa"] == pytest.approx(rounded, rel=1e-6)
    assert (base / "README.md").read_text() == model_card("moe.md", record)


def test_nothing_is_written_of_a_training_that_fails(tmp_path: Path) -> None:
    def measure(written: PreTrainedModel, _: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    (tmp_path / "base").mkdir()
    (tmp_path / "base/old").touch()
    assert write(tmp_path / "base", measure, "--steps", "1").exit_code == 1
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["base", "base/old"]
    assert "0 is not in the range x>=1" in write(tmp_path / "base", measure, "--steps", "0").output
