from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from stages.kit.reporting.runs import cards_dir
from tests import ROOT
from tests.made_up_runs import made_up_ious, project_params, write_made_up_run
from tools.compare import __main__ as command
from tools.compare.experiments import Experiment


def write_experiment(folder: Path, rates: dict[str, str], means: dict[str, float], *, split: str | None) -> Experiment:
    """Of recipes with learning rates, scored on a split; None for the validation split."""
    lock = {}
    for number, (name, rate) in enumerate(rates.items()):
        params = replace(project_params(), seed=42)
        seed = round(1e6 * float(rate)) + number
        run_dir = write_made_up_run(
            cards_dir(folder, "detection"), name, made_up_ious(means[name], 60, seed=seed), params=params
        )
        if split:
            metrics = json.loads((run_dir / "metrics.json").read_text())
            (run_dir / "metrics.json").write_text(json.dumps(metrics | {"split": split}))
        settings = {"scored": split or "val", f"recipes.{name}": {"learning_rate": float(rate)}}
        lock[f"evaluate@{name}"] = {"params": {"params.yaml": settings | {"data": {"selection": 0.15}}}}
    return Experiment(name=folder.name, data_dir=folder, lock=lock)


def chosen(monkeypatch: pytest.MonkeyPatch, experiments: list[Experiment], *names: str) -> str:
    by_name = {each.name: each for each in experiments}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "named_revisions", lambda: ({name: name for name in by_name}, {}))
    monkeypatch.setattr(command, "fetch", lambda name, *_: by_name[name])
    ended = CliRunner().invoke(command.main, ["detection", *names, "--over", "recipes.*.learning_rate"])
    return ended.output


def test_the_best_learning_rate_of_each_recipe_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    means = {"1e-4": (0.5, 0.7), "2e-4": (0.6, 0.5)}
    experiments = [write_experiment(tmp_path / "on-val", {"r1-llm-only": "1e-4"}, {"r1-llm-only": 0.9}, split=None)]
    for rate, (one, other) in means.items():
        rates = {"r1-llm-only": rate, "r4-joint": rate}
        folder = tmp_path / f"rate-{rate}"
        experiments.append(write_experiment(folder, rates, {"r1-llm-only": one, "r4-joint": other}, split="selection"))
    shown = chosen(monkeypatch, experiments)
    rows = [line.split() for line in shown.splitlines() if line.startswith(("r1", "r4"))]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("r1-llm-only", "learning_rate=0.0002", "chosen"),
        ("r1-llm-only", "learning_rate=0.0001", "1"),
        ("r4-joint", "learning_rate=0.0001", "chosen"),
        ("r4-joint", "learning_rate=0.0002", "1"),
    ]
    assert "Left out: on-val (not scored on the selection split)." in shown
    assert (
        "dvc exp run --queue -S ++recipes.r1-llm-only.learning_rate=0.0002 -S ++recipes.r4-joint.learning_rate=0.0001 "
        "-S data.selection=0.15 -S scored=val -S 'seed=42,43,44' compare@detection" in shown
    )


def test_nothing_is_chosen_by_the_samples_of_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = [
        write_experiment(tmp_path / rate, {"r1-llm-only": rate}, {"r1-llm-only": 0.5}, split=None)
        for rate in ("1e-4", "2e-4")
    ]
    assert "no model was scored on the selection split" in chosen(monkeypatch, experiments, "1e-4", "2e-4")


def test_one_value_is_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_experiment(tmp_path / "one", {"r1-llm-only": "1e-4"}, {"r1-llm-only": 0.5}, split="selection")
    assert "no recipe was run with several values of recipes.*.learning_rate" in chosen(monkeypatch, [one])
