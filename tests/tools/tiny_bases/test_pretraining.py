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
from tools.tiny_bases.architecture import SMALLEST_TEXT, build_tiny_qwen2
from tools.tiny_bases.pretraining import (
    FIRST_STEPS,
    Settings,
    begin,
    how_made,
    make_optimizers,
    options,
    pretrain,
    rate_factor,
    train_steps,
)

SETTINGS = Settings(steps=FIRST_STEPS + 10, batch_size=1, warmup_steps=2, threads=1)


@pytest.fixture(autouse=True)
def _other_tests_keep_their_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def built() -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    return build_tiny_qwen2(["tôi đi"], SMALLEST_TEXT, seed=1)


def training(
    model: Qwen2ForCausalLM, settings: Settings = SETTINGS, auxiliary: nn.Module | None = None
) -> Iterator[float]:
    """On one and the same sequence."""
    begin(model, settings)
    ids = torch.arange(6)[None]

    def losses(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return loss + (auxiliary(torch.ones(1)).sum() if auxiliary else 0), loss

    yield from train_steps(model, settings, losses, auxiliary=auxiliary.parameters() if auxiliary else ())


def test_muon_takes_the_matrices_within_the_layers_and_adamw_all_else(
    built: tuple[Qwen2ForCausalLM, Qwen2Tokenizer],
) -> None:
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


def test_auxiliary_weights_are_trained_beside_the_model(built: tuple[Qwen2ForCausalLM, Qwen2Tokenizer]) -> None:
    beside = nn.Linear(1, 1)
    before = [parameter.clone() for parameter in (*built[0].parameters(), *beside.parameters())]
    losses = list(training(built[0], Settings(steps=2, batch_size=1, threads=1), beside))
    after = [*built[0].parameters(), *beside.parameters()]
    assert losses[1] < losses[0]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_is_written_is_what_was_trained_and_measured(
    built: tuple[Qwen2ForCausalLM, Qwen2Tokenizer], tmp_path: Path
) -> None:
    model, tokenizer = built
    losses = list(training(build_tiny_qwen2(["tôi đi"], SMALLEST_TEXT, seed=1)[0]))

    def measure(written: PreTrainedModel) -> dict[str, Any]:
        assert written.dtype == torch.float32
        return {"sum": sum(parameter.sum().item() for parameter in written.parameters())}

    def card(record: dict[str, Any]) -> str:
        return how_made(record, samples="words", command="make it")

    pretrain(model, tokenizer, SETTINGS, tmp_path / "base", losses=training(model), measure=measure, card=card)
    record = json.loads((tmp_path / "base/pretraining.json").read_text())
    assert record["settings"]["steps"] == len(losses)
    assert record["first_losses"] == [round(loss, 4) for loss in losses[:FIRST_STEPS]]
    assert record["final_loss"] == pytest.approx(sum(losses[-25:]) / 25, abs=1e-4)
    assert record["model_sha256"] == hashlib.sha256((tmp_path / "base/model.safetensors").read_bytes()).hexdigest()
    check_model_folder(tmp_path / "base")
    # save_model has rounded `model` to what it wrote.
    assert record["figures"]["sum"] == pytest.approx(sum(p.float().sum().item() for p in model.parameters()), rel=1e-6)
    written = (tmp_path / "base/README.md").read_text()
    assert written.endswith("in 0 minutes on 1 CPU cores:\n30 steps of 1 words, seed 0.\n\n    make it\n")


def test_nothing_is_written_of_a_training_that_fails(
    built: tuple[Qwen2ForCausalLM, Qwen2Tokenizer], tmp_path: Path
) -> None:
    def measure(written: PreTrainedModel) -> dict[str, Any]:
        raise KeyboardInterrupt

    (tmp_path / "base").mkdir()
    (tmp_path / "base/old").touch()
    with pytest.raises(KeyboardInterrupt):
        pretrain(*built, SETTINGS, tmp_path / "base", losses=iter([1.0]), measure=measure, card=str)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["base", "base/old"]


def test_a_command_takes_its_defaults_from_the_task() -> None:
    @click.command
    @options(Settings(steps=7, batch_size=3))
    def command(**given: object) -> None:
        click.echo(given)

    assert "'steps': 7" in CliRunner().invoke(command, ["--out", "x"]).output
    assert "0 is not in the range x>=1" in CliRunner().invoke(command, ["--out", "x", "--steps", "0"]).output
    assert "Missing option '--out'" in CliRunner().invoke(command, []).output
