"""Validation chooses weights, on the tiny profile's own base and data."""

import json
from pathlib import Path

import pytest

from tests.stage_runs import made, made_up_memory, small_params

RECIPE = "chat-full"


@pytest.mark.pipeline
def test_a_recipe_that_overfits_keeps_its_best_weights(tmp_path: Path) -> None:
    """10 samples to train on, others to choose by, and 5 to report."""
    raw = small_params(max_new_tokens=16)
    raw["data"]["selection"] = 0.3
    tiny = raw["profiles"]["tiny"]
    tiny["datasets"]["conversations"]["reader"] = {"metrics": ["chrf"]}
    tiny["memory"]["micro_batch"] = 5
    tiny["max_epochs"], tiny["validation_limit"] = None, {"samples": 16, "score_samples": 4}
    longer = {"epochs": 20, "effective_batch": 5, "learning_rate": 2.0e-4, "lr_schedule": "constant"}
    raw["recipes"][RECIPE] |= {**longer, "keep": "best", "validation": {"every_steps": 20, "samples": 24}}
    stages = (("base", "assistant"), ("prepare", "conversations"), ("plan", RECIPE), ("train", RECIPE))
    with made_up_memory():
        folder = made(tmp_path, raw, *stages) / "data/runs" / RECIPE / "training"
    record = json.loads((folder / "training.json").read_text())
    losses, scores = (
        {int(step): float(figure) for step, figure in (line.split("\t") for line in path.read_text().splitlines()[1:])}
        for path in (folder / f"plots/metrics/validation/{name}.tsv" for name in ("loss", "score"))
    )
    best = min(losses, key=lambda step: losses[step])
    assert list(losses) == [0, 20, 40]
    assert record["kept_step"] == best < record["num_steps"] == 40
    assert (record["validation_loss"], record["validation_score"]) == (losses[best], scores[best])
    assert record["validation_split"] == "selection"
    assert record["final_loss"] < losses[best] < losses[40], "it has not overfitted"
