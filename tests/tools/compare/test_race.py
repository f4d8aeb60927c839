"""A race: whom each look lets go on, and one through DVC's queue that is killed in the middle."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.reporting.evidence import LOOKS
from stages.reporting.runs import Run
from tests import ROOT
from tests.documents import write_yaml
from tests.launcher.small_checkout import CALLER, commit
from tests.launcher.small_checkout import run as run_in
from tests.made_up_runs import project_params
from tests.reporting.test_compare import REPORT, run_of, scores_around
from tests.stage_runs import read_params, write_workspace
from tools.compare import __main__ as command
from tools.compare.experiments import WORKSPACE, comparable, fetch, named_revisions
from tools.compare.race import cost_words, has_workers, racing_recipes, standing

SEEDS = list(range(42, 54))


def runs(means: dict[str, float], seeds: dict[str, int], luck: float = 0.02) -> dict[str, dict[int, Run]]:
    """Runs of each recipe under the first so many seeds; luck: standard deviation between its trainings."""
    found: dict[str, dict[int, Run]] = {}
    for number, (name, mean) in enumerate(means.items()):
        drawn = np.random.default_rng(number).normal(mean, luck, len(SEEDS))
        found[name] = {
            seed: run_of(name, scores_around(drawn[at], 100 * number + at))
            for at, seed in enumerate(SEEDS[: seeds.get(name, 12)])
        }
    return found


def test_a_race_goes_on_with_those_that_can_still_win() -> None:
    means = {"a": 0.62, "b": 0.61, "c": 0.4}
    nothing = standing(REPORT, runs(means, dict.fromkeys(means, 0)), SEEDS, 0.02)
    assert nothing.missing == dict.fromkeys(SEEDS[:3], ("a", "b", "c"))
    assert nothing.words == []
    begun = standing(REPORT, runs(means, {"a": 3, "b": 2, "c": 3}), SEEDS, 0.02)
    assert begun.missing == {44: ("b",)}
    three = standing(REPORT, runs(means, dict.fromkeys(means, 3)), SEEDS, 0.02)
    assert three.missing == {45: ("a", "b")}, "c has dropped out"
    assert three.words == ["After 3 seeds a leads. Out of the race: c."]
    ended = standing(REPORT, runs(means, {"c": 3}), SEEDS, 0.02)
    assert ended.missing == {}
    assert "is the best recipe, or within 0.02 of the best" in ended.words[-1]
    assert ended.words[0] == three.words[0], "a look stays as it was when there are more seeds"


def test_a_race_that_nothing_decides_ends_after_the_last_look() -> None:
    ended = standing(REPORT, runs({"a": 0.6, "b": 0.6}, {}, luck=0.1), SEEDS, 0.001)
    assert ended.missing == {}
    assert len(ended.words) == len(LOOKS) + 1
    assert "12 seeds do not show" in ended.words[-1]


def test_a_race_counts_groups_and_not_their_samples() -> None:
    alone = runs({"a": 0.6, "b": 0.6}, {}, luck=0)
    copied = {
        name: {seed: replace(run, columns={"score": np.repeat(run.columns["score"], 3)}) for seed, run in each.items()}
        for name, each in alone.items()
    }
    groups = np.repeat(np.arange(60), 3)
    grouped = {name: {seed: replace(run, groups=groups) for seed, run in each.items()} for name, each in copied.items()}
    words = [standing(REPORT, each, SEEDS, 0.006).words for each in (alone, grouped, copied)]
    assert words[0] == words[1]
    assert words[1] != words[2]


def test_the_most_that_a_race_costs_is_said() -> None:
    assert cost_words(runs({"a": 0.6, "b": 0.6}, {"a": 3, "b": 1}), SEEDS).startswith(
        "At most 24 trainings (2 recipes under 12 seeds), of which 4 are there"
    )


def test_a_recipe_with_a_seed_of_its_own_cannot_race() -> None:
    params = project_params()
    assert "r4-joint" in racing_recipes(params, "detection")
    recipes = {**params.recipes, "r4-joint": replace(params.recipe("r4-joint"), seed=1)}
    with pytest.raises(UserError, match=r"recipes\.r4-joint\.seed"):
        racing_recipes(replace(params, recipes=recipes), "detection")


@pytest.mark.parametrize("more", [["exp-a"], ["--over", "recipes.*.lora.rank"]])
def test_a_race_takes_no_experiments_and_no_setting(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(command.main, ["detection", "--race", "0.03", *more])
    assert (ended.exit_code, "--race without" in " ".join(ended.output.split())) == (2, True), ended.output


def test_a_queue_that_nothing_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the machine DVC takes what ran then for running."""
    monkeypatch.setattr(command, "comparable", lambda *_, **__: ([], {"tight-pomp": "running", "cheap-prow": "queued"}))
    monkeypatch.setattr(command, "has_workers", lambda: False)
    monkeypatch.setattr(command, "dvc", lambda *_: pytest.fail("DVC waits forever"))
    with pytest.raises(UserError, match=r"tight-pomp, cheap-prow\. .*: dvc queue kill tight-pomp;"):
        command.hold_race(
            project_params(), replace(REPORT, task="detection"), 0.03, jobs=1, console=Console(file=io.StringIO())
        )


def test_a_queue_is_run_by_a_process_of_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC does not see one that was asked to stop and still trains."""
    worker = [sys.executable, "-c", "input()", "exp", "queue-worker", "dvc-exp-0a1b2c-1@localhost"]
    with subprocess.Popen(worker, cwd=tmp_path, stdin=subprocess.PIPE):
        assert not has_workers()
        monkeypatch.chdir(tmp_path)
        assert has_workers()
    assert not has_workers()


TRAINER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {root!r})
from stages.reporting.runs import report_runs_dir
from tests.made_up_runs import made_up_ious, project_params, write_made_up_record, write_made_up_run
name = sys.argv[1]
params, trained = project_params(), name != "base-vlm"
seed = int(next(line for line in Path("params.yaml").read_text().splitlines() if line.startswith("seed:")).split()[1])
with open({log!r}, "a") as log:
    log.write(f"{{name}} {{seed if trained else '-'}}\\n")
number = {names!r}.index(name)
ious = made_up_ious(0.3 + 0.2 * number, 60, seed=10 * seed + number if trained else 1)
params = replace(params, seed=seed) if trained else None
write_made_up_run(report_runs_dir(Path("data"), "detection"), name, ious, params=params)
stage = ("evaluate@" if trained else "baseline@") + name
write_made_up_record(Path("data"), stage, inputs={{}})
"""
NAMES = ("base-vlm", "r1-llm-only", "r4-joint")


def stage_of(kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    outs = ["data/report/detection/runs/${item}", f"data/provenance/detection/{kind}@${{item}}.json"]
    params = ["seed"] if kind == "evaluate" else []
    command = f"{sys.executable} trainer.py ${{item}}"
    return {"foreach": list(names), "do": {"cmd": command, "params": params, "deps": ["trainer.py"], "outs": outs}}


@pytest.mark.pipeline
@pytest.mark.timeout(900)
def test_a_killed_race_goes_on_and_trains_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, log = tmp_path / "workspace", tmp_path / "trained"
    workspace.mkdir()
    raw = read_params(ROOT / "params.yaml")
    raw = {**raw, "baselines": {"base-vlm": raw["baselines"]["base-vlm"]}, "builds": {}, "predictions": {}}
    raw["recipes"] = {name: raw["recipes"][name] for name in NAMES[1:]}
    write_workspace(workspace, raw)
    stages = {"evaluate": stage_of("evaluate", NAMES[1:]), "baseline": stage_of("baseline", NAMES[:1])}
    later = {"cmd": "false", "outs": ["data/provenance/later.json"]}  # as of a recipe that nobody has run
    write_yaml({"stages": {**stages, "later": later}}, workspace / "dvc.yaml")
    removed = {"cmd": "true", "outs": [{"path": "data/provenance/removed.json", "hash": "md5", "md5": "0" * 32}]}
    write_yaml({"schema": "2.0", "stages": {"removed": removed}}, workspace / "dvc.lock")  # DVC keeps it there
    (workspace / "trainer.py").write_text(TRAINER.format(root=str(ROOT), log=str(log), names=NAMES), encoding="utf-8")
    assert load_params(workspace / "params.yaml").recipes
    run = partial(run_in, workspace, PYTHONPATH=str(ROOT))
    run("git", "init", "-q")
    run("dvc", "init", "-q")
    commit(workspace)
    environment = {**CALLER, "PYTHONPATH": str(ROOT)}
    race = (sys.executable, "-m", "tools.compare", "detection", "--race", "0.03", "--jobs", "2")
    with subprocess.Popen(race, cwd=workspace, env=environment, start_new_session=True) as killed:
        while killed.poll() is None and "r4-joint 42" not in (log.read_text() if log.exists() else ""):
            time.sleep(0.2)
        assert killed.poll() is None, "the race ended before it could be killed"
        os.killpg(killed.pid, signal.SIGKILL)  # DVC's worker has a session of its own
    output = run(*race)
    assert "At most 24 trainings (2 recipes under 12 seeds), of which" in output
    assert "After 3 seeds: r4-joint is the best recipe, or within 0.03 of the best." in output
    trained = sorted(line for line in log.read_text().splitlines() if not line.startswith("base"))
    assert trained == sorted(f"{name} {seed}" for name in NAMES[1:] for seed in (42, 43, 44))
    experiments = [line for line in run("git", "for-each-ref", "refs/exps").splitlines() if "celery" not in line]
    assert len(experiments) == 3, "what was queued is not queued again"
    results = json.loads((workspace / "data/report/detection/over-seed/comparison.json").read_text())
    assert results["best"] == "r4-joint"

    run("dvc", "exp", "run", "-q", "--queue", "-n", "waiting", "-S", "seed=45")
    monkeypatch.chdir(workspace)
    revisions, others = named_revisions()
    assert (len(revisions), others) == (4, {"waiting": "queued"}), "the workspace and three experiments"
    found = [fetch(name, revision, "detection", tmp_path / "fetched") for name, revision in revisions.items()]
    entries = [each.lock["evaluate@r4-joint"] for each in found if "evaluate@r4-joint" in each.lock]
    assert {entry["params"]["params.yaml"]["seed"] for entry in entries} == {42, 43, 44}
    assert {*NAMES[1:]} <= {*found[-1].evaluated("detection")}
    with pytest.raises(UserError, match="experiment seed-45 cannot be read"):
        fetch("seed-45", "seed-45", "detection", tmp_path / "fetched")
    runs = "data/report/detection/runs/r4-joint"
    run("git", "checkout", revisions[next(name for name in revisions if name != WORKSPACE)], "--", "dvc.lock")
    run("dvc", "checkout", "-q", runs)
    assert fetch(WORKSPACE, WORKSPACE, "detection", tmp_path).changed == ""
    (Path(runs) / "metrics.json").unlink()
    (Path(runs) / "metrics.json").write_text("{}")
    with pytest.raises(UserError, match=f"workspace cannot be compared: its {runs} is not that of dvc.lock: rm -rf"):
        comparable("detection", [WORKSPACE], tmp_path)
    run("git", "commit", "-q", "--allow-empty", "-m", "next")
    _, others = named_revisions()
    assert {*revisions} - {WORKSPACE} <= {
        name for name, state in others.items() if state.startswith("of other commits")
    }
    # On a machine that has the commits of an experiment, and not its files.
    for listing in (workspace / ".dvc/cache").rglob("*.dir"):
        listing.unlink()
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    name, revision = next(each for each in revisions.items() if each[0] != WORKSPACE)
    with pytest.raises(
        UserError, match=f"experiment {name} cannot be read: failed to load directory .* dvc exp pull REMOTE {name}"
    ):
        fetch(name, revision, "detection", tmp_path / "fetched again")
