import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from transformers import PreTrainedModel, Qwen2ForCausalLM, Qwen2Tokenizer

from stages.kit.models.folders import check_model_folder
from tests.tiny import SMALLEST_TEXT
from tools.tiny_bases.architecture import build_tiny_qwen2
from tools.tiny_bases.pretraining import (
    FIRST_STEPS,
    Settings,
    begin,
    make_optimizers,
    model_card,
    options,
    pretrain,
    rate_factor,
    train_steps,
)

SETTINGS = Settings(steps=FIRST_STEPS + 10, batch_size=1, warmup_steps=2, threads=1)


@pytest.fixture
def built() -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    return build_tiny_qwen2(["tôi đi"], SMALLEST_TEXT, seed=1)


def training(model: Qwen2ForCausalLM, auxiliary: nn.Module | None = None) -> Iterator[float]:
    """On one and the same sequence."""
    begin(model, SETTINGS)
    ids = torch.arange(6)[None]

    def losses(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return loss + (auxiliary(torch.ones(1)).sum() if auxiliary else 0), loss

    yield from train_steps(model, SETTINGS, losses, auxiliary=auxiliary.parameters() if auxiliary else ())


def test_muon_takes_the_matrices_within_the_layers_and_adamw_all_else(built) -> None:
    model, beside = built[0], nn.Linear(2, 2)
    adamw, muon = (
        {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in make_optimizers(model, SETTINGS, beside.parameters())
    )
    projections = {id(module.weight) for module in model.model.layers.modules() if isinstance(module, nn.Linear)}
    assert muon == projections
    assert adamw == {id(parameter) for parameter in (*model.parameters(), *beside.parameters())} - projections


def test_the_rate_warms_up_and_ends_at_three_percent() -> None:
    settings = Settings(steps=100, batch_size=1, warmup_steps=10)
    rates = [rate_factor(step, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.1, abs=0.001)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.03)


def test_auxiliary_weights_are_trained_beside_the_model(built) -> None:
    beside = nn.Linear(1, 1)
    before = [parameter.clone() for parameter in (*built[0].parameters(), *beside.parameters())]
    losses = list(training(built[0], beside))
    assert losses[-1] < losses[0]
    after = [*built[0].parameters(), *beside.parameters()]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_is_written_is_what_was_trained_and_measured(built, tmp_path: Path) -> None:
    model, tokenizer = built
    losses = list(training(build_tiny_qwen2(["tôi đi"], SMALLEST_TEXT, seed=1)[0]))

    def measure(written: PreTrainedModel, _: Any) -> dict[str, Any]:
        assert written.dtype == torch.float32
        return {"truthfulqa": sum(parameter.sum().item() for parameter in written.parameters()), "qmsum": 0}

    base = tmp_path / "base"
    pretrain(SETTINGS, base, model, tokenizer, training(model), measure=measure, card="moe.md")
    record = json.loads((base / "pretraining.json").read_text())
    assert record["settings"]["steps"] == len(losses)
    assert record["first_losses"] == [round(loss, 4) for loss in losses[:FIRST_STEPS]]
    assert record["final_loss"] == pytest.approx(sum(losses[-25:]) / 25, abs=1e-4)
    assert record["model_sha256"] == hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    check_model_folder(base)
    # save_model has rounded `model` to what it wrote.
    rounded = sum(parameter.float().sum().item() for parameter in model.parameters())
    assert record["figures"]["truthfulqa"] == pytest.approx(rounded, rel=1e-6)
    assert (base / "README.md").read_text() == model_card("moe.md", record)


def test_nothing_is_written_of_a_training_that_fails(built, tmp_path: Path) -> None:
    def measure(written: PreTrainedModel, _: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    (tmp_path / "base").mkdir()
    (tmp_path / "base/old").touch()
    with pytest.raises(KeyboardInterrupt):
        pretrain(SETTINGS, tmp_path / "base", built[0], built[1], iter([1.0]), measure=measure, card="moe.md")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["base", "base/old"]


def test_a_command_takes_its_defaults_from_the_task() -> None:
    @click.command
    @options(SETTINGS)
    def command(out_dir: Path, settings: Settings) -> None:
        click.echo(settings.steps)

    assert CliRunner().invoke(command, ["--out", "x"]).output == f"{SETTINGS.steps}\n"
    assert CliRunner().invoke(command, ["--out", "x", "--steps", "7"]).output == "7\n"
    assert "0 is not in the range x>=1" in CliRunner().invoke(command, ["--out", "x", "--steps", "0"]).output
