"""`python -m tools.compare` over experiments that are folders of runs, and one that DVC made."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stages.core.errors import UserError
from stages.core.lineage import json_digest
from stages.reporting.runs import report_runs_dir
from tests import ROOT
from tests.made_up_records import PROVENANCE
from tests.made_up_runs import (
    made_up_ious,
    names_of,
    project_params,
    write_made_up_record,
    write_made_up_run,
)
from tests.stage_runs import read_params, write_params, write_workspace
from tools.compare import __main__ as command
from tools.compare.experiments import Experiment, conditions, named_revisions, unlike

OF_STORY = {"base-vlm": 0.1, "r1-llm-only": 0.5, "r2-vision-only": 0.55, "r3-two-stage": 0.6, "r4-joint": 0.7}
MEANS = {name: OF_STORY.get(name, 0.4) for name in names_of("detection")}


def write_experiment(
    folder: Path, seed: int, *, leave_out: tuple[str, ...] = (), base: str = "ba5e" * 16
) -> Experiment:
    """Runs and records of a whole comparison under a seed; the base is the same under each."""
    params, lock = replace(project_params(), seed=seed), {}
    for number, (name, mean) in enumerate(MEANS.items()):
        if name not in leave_out:
            trained = name in params.recipes
            ious = made_up_ious(mean, 60, seed=10 * seed + number if trained else number)
            write_made_up_run(report_runs_dir(folder, "detection"), name, ious, params=params if trained else None)
            lock[params.evaluation_stage(name)] = locked({"data/bases/vlm": base}, params={"seed": seed})
    return Experiment(name=folder.name, data_dir=folder, lock=lock)


def locked(
    deps: dict[str, str], outs: dict[str, str] | None = None, *, code: str = "c0", params: Any = None
) -> dict[str, Any]:
    """The entry of a stage in dvc.lock. deps, outs: digests by path."""

    def entries(digests: dict[str, str]) -> list[dict[str, str]]:
        return [{"path": path, "hash": "md5", "md5": digest} for path, digest in digests.items()]

    return {
        "deps": entries({**deps, "stages/train.py": code}),
        "outs": entries(outs or {}),
        "params": {"params.yaml": params or {}},
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command where these experiments are HEAD's; returns its output on one line a paragraph."""
    monkeypatch.setenv("COLUMNS", "400")
    write_workspace(tmp_path, read_params(ROOT / "params.yaml"))
    monkeypatch.chdir(tmp_path)

    def run(experiments: list[Experiment], *arguments: str, failed: dict[str, str] | None = None) -> str:
        by_name = {each.name: each for each in experiments}
        revisions = {name: name for name in by_name}, dict(failed or {})
        monkeypatch.setattr("tools.compare.experiments.named_revisions", lambda: revisions)
        monkeypatch.setattr("tools.compare.experiments.fetch", lambda name, *_: by_name[name])
        return CliRunner().invoke(command.main, ["detection", *arguments]).output

    return run


def test_recipes_are_compared_over_the_seeds_of_the_experiments(run: Any, tmp_path: Path) -> None:
    experiments = [
        write_experiment(tmp_path / f"exp-{seed}", seed, leave_out=("r1-llm-only",) if seed == 45 else ())
        for seed in (42, 43, 44, 45)
    ]
    plan = report_runs_dir(tmp_path / "exp-45", "detection") / "r2-vision-only/plan.yaml"
    plan.write_text(plan.read_text().replace("name: r2-vision-only", "name: r0-renamed"))
    plan.parent.rename(plan.parent.with_name("r0-renamed"))
    output = run(experiments)
    assert "r4-joint is best: mean IoU 0.7" in output
    assert "Joint against LLM-only: r4-joint is better than r1-llm-only by +0.2" in output
    assert "Seeds 42, 43, 44, 45, of 4 experiments: exp-42, exp-43, exp-44, exp-45." in output
    assert "r1-llm-only was not evaluated in exp-45." in output
    assert "r0-renamed was evaluated, but is not in params.yaml: left out." in output
    assert "trained once" not in output
    page = (tmp_path / "data/report/detection/over-seed/index.html").read_text(encoding="utf-8")
    assert "Each dot is one training" in page
    assert "Relative" in page
    assert "called as good" not in output
    raw = read_params()
    del raw["compare"]["matters"]["mean_iou"]
    write_params(raw)
    assert "No recipe is called as good: params.yaml has no compare.matters.mean_iou." in run(experiments)


def test_other_conditions_are_left_out_by_name_and_refused_if_named(run: Any, tmp_path: Path) -> None:
    experiments = [
        write_experiment(tmp_path / name, seed, base=base)
        for name, seed, base in (("exp-42", 42, "one"), ("exp-43", 43, "one"), ("other", 44, "new"))
    ]
    experiments.append(Experiment(name="empty", data_dir=tmp_path / "empty", lock={}))
    output = run(experiments, failed={"sad-kiln": "failed"})
    assert "Seeds 42, 43, of 2 experiments: exp-42, exp-43." in output
    assert (
        "Left out: sad-kiln (failed); empty (no model of task detection); other (unlike exp-42 in data/bases/vlm)."
        in output
    )
    assert "data/bases/vlm: one (exp-42); new (other)" in run(experiments, "exp-42", "other")
    assert "run: dvc repro compare@detection" in run(experiments[-1:])


@pytest.mark.parametrize(
    ("bases", "left_out"),
    [("abb", "e42 (unlike e43 in "), ("aabb", "e44, e45 (unlike e42 in "), ("abc", "e43, e44 (unlike e42 in ")],
)
def test_experiments_compare_with_the_one_that_leaves_out_the_fewest(
    run: Any, tmp_path: Path, bases: str, left_out: str
) -> None:
    """The first is the workspace, which may have been changed since the others were queued."""
    output = run(
        [write_experiment(tmp_path / f"e{seed}", seed, base=base) for seed, base in enumerate(bases, start=42)]
    )
    assert f"Left out: {left_out}data/bases/vlm)" in output
    assert ("only one seed was run, in e42 (" in output) == (bases == "abc")
    assert ("run --queue -S 'seed=43,44' compare@detection, then: dvc queue start" in output) == (bases == "abc")
    assert "params.yaml has other settings" not in output


def test_an_experiment_without_a_recipe_joins_no_two_that_differ_in_it(run: Any, tmp_path: Path) -> None:
    lacking = {44: ("r2-vision-only",)}
    experiments = [
        write_experiment(tmp_path / f"e{seed}", seed, leave_out=lacking.get(seed, ())) for seed in range(42, 47)
    ]
    for each, rate in zip(experiments, (5e-4, 5e-4, None, 9e-4, 9e-4), strict=True):
        if rate:
            settings = each.lock["evaluate@r2-vision-only"]["params"]["params.yaml"]
            settings["recipes.r2-vision-only"] = {"learning_rate": rate}
    output = run(experiments)
    assert "Seeds 42, 43, 44, of 3 experiments: e42, e43, e44." in output
    assert "Left out: e45, e46 (unlike e42 in evaluate@r2-vision-only: recipes.r2-vision-only.learning_rate)" in output


def test_a_metric_that_ranks_nothing_is_refused_with_the_nearest(run: Any) -> None:
    Path("params.yaml").write_text(
        (ROOT / "params.yaml").read_text().replace("{mean_iou: ", "{iou_over_50: 0.1, mean_iuo: ")
    )
    refused = run([])
    assert "compare.matters.mean_iuo: ranks the recipes of no task (did you mean 'mean_iou'?)" in refused
    assert "compare.matters.iou_over_50: ranks the recipes of no task\n" in refused


def test_one_seed_is_refused(run: Any, tmp_path: Path) -> None:
    twice = [write_experiment(tmp_path / name, 42, leave_out=("r4-joint",)) for name in ("exp-a", "exp-b")]
    assert "only one seed was run, in exp-a, exp-b" in run(twice)
    for each, mean in zip(twice, (0.7, 0.6), strict=True):
        ious = made_up_ious(mean, 60, seed=5)
        write_made_up_run(report_runs_dir(each.data_dir, "detection"), "r4-joint", ious, params=project_params())
    assert "r4-joint gave different models under the same seed (42)" in run(twice)


def write_rates(folder: Path, rates: dict[str, str], mean: dict[str, float], *, split: str | None) -> Experiment:
    """An experiment of recipes with learning rates, scored on a split; None for the validation split."""
    lock = {}
    for number, (name, rate) in enumerate(rates.items()):
        ious = made_up_ious(mean[name], 60, seed=round(1e6 * float(rate)) + number)
        run_dir = write_made_up_run(report_runs_dir(folder, "detection"), name, ious, params=project_params())
        if split:
            metrics = json.loads((run_dir / "metrics.json").read_text())
            (run_dir / "metrics.json").write_text(json.dumps(metrics | {"split": split}))
        recipe = read_params(ROOT / "params.yaml")["recipes"][name] | {"learning_rate": float(rate), "epochs": 99}
        settings = {"scored": split or "val", f"recipes.{name}": recipe}
        lock[f"evaluate@{name}"] = locked({}, params=settings | {"data": {"selection": 0.15, "skip_invalid": False}})
    return Experiment(name=folder.name, data_dir=folder, commit="0123456789abcdef", lock=lock)


def test_the_best_learning_rate_of_each_recipe_is_chosen(run: Any, tmp_path: Path) -> None:
    experiments = [write_rates(tmp_path / "on-val", {"r1-llm-only": "1e-4"}, {"r1-llm-only": 0.9}, split=None)]
    for rate, one, other in (("1e-4", 0.5, 0.7), ("2e-4", 0.6, 0.5)):
        rates, means = dict.fromkeys(("r1-llm-only", "r4-joint"), rate), {"r1-llm-only": one, "r4-joint": other}
        experiments.append(write_rates(tmp_path / f"rate-{rate}", rates, means, split="selection"))
    output = run(experiments, "--over", "recipes.*.learning_rate")
    rows = [line.split() for line in output.splitlines() if line.startswith(("r1", "r4"))]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("r1-llm-only", "learning_rate=0.0002", "chosen"),
        ("r1-llm-only", "learning_rate=0.0001", "1"),
        ("r4-joint", "learning_rate=0.0001", "chosen"),
        ("r4-joint", "learning_rate=0.0002", "1"),
    ]
    assert "Left out: on-val (not scored on the selection split)." in output
    by_seed = run(experiments)
    assert (
        "only one seed was run, in on-val (Left out: rate-1e-4, rate-2e-4 (scored on the selection split))" in by_seed
    )
    assert (
        "dvc exp run --queue -S ++recipes.r1-llm-only.learning_rate=0.0002 -S ++recipes.r4-joint.learning_rate=0.0001 "
        "-S data.selection=0.15 -S scored=val -S 'seed=42,43,44' compare@detection\n"
        "First: params.yaml has other settings by now: recipes.r1-llm-only.epochs, recipes.r4-joint.epochs (git diff "
        "0123456789ab -- params.yaml)\n" in output
    )
    one_value = run(experiments[:2], "--over", "recipes.*.learning_rate")
    assert "no recipe was run with several values of recipes.*.learning_rate" in one_value
    assert "no model was scored on the selection split" in run(experiments, "on-val", "--over", "recipes.*.rank")


def recorded(
    folder: Path, *, seed: int = 42, rank: int = 64, code: str = "c0de", data: str = "da7a", torch: str = "2.13.0"
) -> Experiment:
    """One recipe with the records of all that it was made by, and of a training that it does not depend on."""
    write_made_up_run(report_runs_dir(folder, "detection"), "r1", made_up_ious(0.5, 10, seed=1))
    plan = {"data/runs/r1/plan.yaml": f"{seed}"}
    trained, reported = {"data/runs/r1/trained": f"{seed}"}, {"data/report/detection/runs/r1": f"{seed}"}
    settings = {"seed": seed, "recipes.r1": {"lora": {"rank": rank}}}
    prepared = {"data/prepared/tables": data}
    assert PROVENANCE.machine is not None
    machine = replace(PROVENANCE.machine, packages={"torch": torch})
    write_made_up_record(folder, "train@r1", machine=machine)
    lock = {
        "prepare@tables": locked({}, prepared),
        "plan@r1": locked({"data/prepared/tables/train.parquet": data}, plan, params=settings),
        "train@r1": locked(plan, trained, code=code),
        "evaluate@r1": locked(trained, reported),
        "train@r2": locked({"data/other": "2"}, {"data/runs/r2/trained": "2"}),
    }
    return Experiment(name=folder.name, data_dir=folder, lock=lock)


def code_digest(code: str) -> str:
    return json_digest({"stages/train.py": code})[:12]


def differences(*arguments: Any) -> dict[str, dict[str, list[str]]]:
    return {str(condition): names for condition, names in unlike(*arguments).items()}


def test_conditions_are_settings_and_all_that_no_stage_made(tmp_path: Path) -> None:
    stages = ("evaluate@r1", "plan@r1", "prepare@tables", "train@r1")
    found = conditions(recorded(tmp_path / "one"), "detection")
    assert {str(condition): value for condition, value in found.items()} == {
        **{f"code of {stage}": code_digest("c0de" if stage == "train@r1" else "c0") for stage in stages},
        **{f"inputs of {stage}": "as made" for stage in stages},
        "data/prepared/tables": "da7a",
        "package torch": "2.13.0",
        "plan@r1: recipes.r1.lora.rank": "64",
        "plan@r1: seed": "42",
        "record of r1": "yes",
    }


def test_only_the_seed_is_no_difference(tmp_path: Path) -> None:
    one = recorded(tmp_path / "one")
    assert differences([one, recorded(tmp_path / "other", seed=43)], "detection") == {}
    changed = recorded(tmp_path / "changed", rank=8, code="new", data="other data", torch="2.14.0")
    differing = {
        "code of train@r1": {code_digest("c0de"): ["one"], code_digest("new"): ["changed"]},
        "data/prepared/tables": {"da7a": ["one"], "other data": ["changed"]},
        "package torch": {"2.13.0": ["one"], "2.14.0": ["changed"]},
        "plan@r1: recipes.r1.lora.rank": {"64": ["one"], "8": ["changed"]},
    }
    assert differences([one, changed], "detection") == differing
    del differing["plan@r1: recipes.r1.lora.rank"]
    assert differences([one, changed], "detection", "recipes.*.rank") == differing


def test_a_stale_card_is_no_seed(tmp_path: Path) -> None:
    one, stale, lost = (recorded(tmp_path / name) for name in ("one", "stale", "lost"))
    stale.lock["train@r1"]["outs"][0]["md5"] = "new"
    found = differences([one, stale], "detection")["inputs of evaluate@r1"]
    assert found == {"as made": ["one"], "data/runs/r1/trained was replaced since": ["stale"]}
    lost = replace(lost, lock={stage: entry for stage, entry in lost.lock.items() if stage != "evaluate@r1"})
    assert differences([one, lost], "detection")["record of r1"] == {"yes": ["one"], "none": ["lost"]}


def test_dvc_is_asked_again_while_its_queue_makes_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "Experiment,rev,typ,State\n,main,baseline,\ntight-pomp,0123456,branch_commit,Success\n"
    shown += "sad-kiln,89abcde,branch_base,Failed\n"
    error = "failed to show experiments - directory '.dvc/tmp/exps/tmpa/.dvc' does not exist"
    answers: Iterator[Any] = iter(
        [subprocess.CompletedProcess([], 255, "", error), subprocess.CompletedProcess([], 0, shown, "")]
    )
    monkeypatch.setattr("tools.compare.experiments.subprocess.run", lambda *_, **__: next(answers))
    monkeypatch.setattr("tools.compare.experiments.time.sleep", lambda _: None)
    monkeypatch.setattr("tools.compare.experiments.all_experiments", lambda: {"tight-pomp", "older"})
    finished, others = named_revisions()
    assert finished == {"workspace": "workspace", "tight-pomp": "0123456"}
    elsewhere = "of other commits than HEAD; EXPERIMENTS= names those to compare"
    assert others == {"sad-kiln": "failed; dvc queue logs NAME says why", "older": elsewhere}
    foreign = "ERROR: unexpected error - .git: repository path 'x' is not owned by current user\n\nHaving any troubles?"
    for failure, message in (
        (error, "failed to show experiments - .* does not exist$"),
        (foreign, r"\.git: repository path 'x' is not owned by current user; .* another account's"),
    ):
        answers = itertools.repeat(subprocess.CompletedProcess([], 255, "", failure))
        with pytest.raises(UserError, match=f"cannot show its experiments: {message}"):
            named_revisions()
