"""Validation chooses weights and ends trainings, on the tiny profile's own base and data."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stage_runs import done, made, small_params, write_params

pytestmark = pytest.mark.pipeline

RECIPE = "r1-llm-only"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a base and with 20 samples to train on, others to choose by, and 5 to report."""
    return made(tmp_path_factory.mktemp("prepared"), params(), ("base", "vlm"), ("prepare", "nutrition-tables"))


def params(**recipe: Any) -> dict[str, Any]:
    raw = small_params()
    raw["data"]["selection"] = 0.1
    tiny = raw["profiles"]["tiny"]
    tiny["datasets"]["nutrition-tables"]["limit"] = {"train": 20, "val": 5}
    tiny["memory"]["micro_batch"] = 10
    tiny["max_epochs"], tiny["validation_limit"] = None, {"samples": 16, "score_samples": 4}
    tiny["evaluation"]["max_new_tokens"] = 48
    raw["recipes"][RECIPE].update(effective_batch=10, **recipe)
    return raw


def trained(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[int, tuple[float, float]]]:
    """The record, and (loss, score) of its validations by step."""
    write_params(raw)
    done("plan", RECIPE)
    done("train", RECIPE)
    folder = Path("data/runs") / RECIPE / "training"
    curves = []
    for name in ("loss", "score"):
        _, *lines = (folder / f"plots/metrics/validation/{name}.tsv").read_text().splitlines()
        curves.append({int(line.split("\t")[0]): float(line.split("\t")[1]) for line in lines})
    return json.loads((folder / "training.json").read_text()), {
        step: (loss, curves[1][step]) for step, loss in curves[0].items()
    }


def test_a_recipe_that_overfits_keeps_its_best_weights(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prepared)
    longer = {
        "epochs": 9,
        "learning_rate": 3.0e-4,
        "lr_schedule": "constant",
        "validation": {"every_steps": 6, "samples": 24},
    }
    record, validations = trained(params(keep="best", **longer))
    best = min(validations, key=lambda step: validations[step][0])
    assert list(validations) == [0, 6, 12, 18]
    assert record["kept_step"] == best < record["num_steps"] == 18
    assert (record["validation_loss"], record["validation_score"]) == validations[best]
    assert record["validation_split"] == "selection"
    assert record["final_loss"] < validations[best][0] < validations[18][0], "it has not overfitted"


@pytest.mark.parametrize("by", ["loss", "score"])
def test_a_learning_rate_a_hundred_times_too_high_is_stopped_early(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.chdir(prepared)
    patient = {"early_stopping": {"patience": 2}, "validation": {"every_steps": 2, "by": by}}
    record, validations = trained(params(epochs=12, learning_rate=1.0e-2, **patient))
    assert record["num_steps"] == 4 < 24
    assert record["kept_step"] is None
    untrained, peak, falling = (loss for loss, _ in validations.values())
    assert untrained < falling < peak
    assert [score for _, score in validations.values()][1:] == [0, 0]
