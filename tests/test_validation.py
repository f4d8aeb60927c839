"""Validation chooses weights, on the tiny profile's own base and data."""

import json
from pathlib import Path

import pytest

from tests.stage_runs import made, small_params

RECIPE = "r1-llm-only"


@pytest.mark.pipeline
def test_a_recipe_that_overfits_keeps_its_best_weights(tmp_path: Path) -> None:
    """20 samples to train on, others to choose by, and 5 to report."""
    raw = small_params()
    raw["data"]["selection"] = 0.1
    tiny = raw["profiles"]["tiny"]
    tiny["datasets"]["nutrition-tables"]["limit"] = {"train": 20, "val": 5}
    tiny["memory"]["micro_batch"] = 10
    tiny["max_epochs"], tiny["validation_limit"] = None, {"samples": 16, "score_samples": 4}
    tiny["evaluation"]["max_new_tokens"] = 48
    longer = {"epochs": 18, "effective_batch": 10, "learning_rate": 2.0e-4, "lr_schedule": "constant"}
    raw["recipes"][RECIPE] |= {**longer, "keep": "best", "validation": {"every_steps": 12, "samples": 24}}
    stages = (("base", "vlm"), ("prepare", "nutrition-tables"), ("plan", RECIPE), ("train", RECIPE))
    folder = made(tmp_path, raw, *stages) / "data/runs" / RECIPE / "training"
    record = json.loads((folder / "training.json").read_text())
    losses, scores = (
        {int(step): float(figure) for step, figure in (line.split("\t") for line in path.read_text().splitlines()[1:])}
        for path in (folder / f"plots/metrics/validation/{name}.tsv" for name in ("loss", "score"))
    )
    best = min(losses, key=lambda step: losses[step])
    assert list(losses) == [0, 12, 24, 36]
    assert record["kept_step"] == best < record["num_steps"] == 36
    assert (record["validation_loss"], record["validation_score"]) == (losses[best], scores[best])
    assert record["validation_split"] == "selection"
    assert record["final_loss"] < losses[best] < losses[36], "it has not overfitted"
