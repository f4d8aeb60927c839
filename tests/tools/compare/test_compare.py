from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from stages.core.errors import UserError
from stages.core.params.schema import Params
from stages.kit.reporting.runs import cards_dir
from tests import ROOT
from tests.made_up_runs import DETECTION_NAMES, made_up_ious, project_params, write_made_up_run
from tools.compare import __main__ as command
from tools.compare import truth
from tools.compare.__main__ import compare_experiments
from tools.compare.experiments import Experiment, fetch, named_revisions

MEANS = dict(zip(DETECTION_NAMES, (0.1, 0.5, 0.55, 0.6, 0.7), strict=True))


def write_experiment(folder: Path, seed: int, *, leave_out: tuple[str, ...] = ()) -> Experiment:
    """Cards of a whole comparison under a seed; only the base is the same under each."""
    params = replace(project_params(), seed=seed)
    for number, (name, mean) in enumerate(MEANS.items()):
        if name in leave_out:
            continue
        drawn = number if name == "base-vlm" else 10 * seed + number
        write_made_up_run(
            cards_dir(folder, "detection"), name, made_up_ious(mean, 60, seed=drawn),
            params=None if name == "base-vlm" else params,
        )  # fmt: skip
    return Experiment(name=folder.name, data_dir=folder, lock={})


def compared(
    monkeypatch: pytest.MonkeyPatch,
    experiments: list[Experiment],
    *names: str,
    failed: dict[str, str] | None = None,
    params: Params | None = None,
) -> str:
    """What is printed; the experiments are those of HEAD."""
    by_name = {each.name: each for each in experiments}
    monkeypatch.chdir(experiments[0].data_dir.parent)
    monkeypatch.setattr(command, "named_revisions", lambda: ({name: name for name in by_name}, dict(failed or {})))
    monkeypatch.setattr(command, "fetch", lambda name, *_: by_name[name])
    console = Console(file=io.StringIO(), width=200)
    compare_experiments(params or project_params(), "detection", names, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_recipes_are_compared_over_the_seeds_of_the_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = compared(monkeypatch, [write_experiment(tmp_path / f"exp-{seed}", seed) for seed in (42, 43, 44)])
    assert "r4-joint is best: mean IoU 0.7" in shown
    assert "Joint against LLM-only: r4-joint is better than r1-llm-only by +0.2" in shown
    assert "Seeds 42, 43, 44, of 3 experiments: exp-42, exp-43, exp-44." in shown
    assert "trained once" not in shown
    page = (tmp_path / "data/report/detection/over-seed/index.html").read_text(encoding="utf-8")
    assert "Each dot is one training" in page
    assert "Seeds, if it is real" in page


def test_what_does_not_compare_is_left_out_by_name_and_refused_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (write_experiment(tmp_path / f"exp-{seed}", seed) for seed in (42, 43))
    third = replace(
        write_experiment(tmp_path / "rank-8", 44), lock={"evaluate@r4-joint": {"deps": [{"path": "x", "md5": "8"}]}}
    )
    first = replace(first, lock={"evaluate@r4-joint": {"deps": [{"path": "x", "md5": "64"}]}})
    second = replace(second, lock=first.lock)
    empty = Experiment(name="empty", data_dir=tmp_path / "empty", lock={})
    experiments = [first, second, third, empty]
    shown = compared(monkeypatch, experiments, failed={"sad-kiln": "failed"})
    assert "Seeds 42, 43, of 2 experiments: exp-42, exp-43." in shown
    assert "Left out: sad-kiln (failed), empty (no model of task detection), rank-8 (unlike exp-42 in x)." in shown
    with pytest.raises(UserError, match=r"differ in more than the seed, .*\n  x: 64 \(exp-42\); 8 \(rank-8\)"):
        compared(monkeypatch, experiments, "exp-42", "rank-8")


def test_one_seed_is_refused_however_often_it_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [write_experiment(tmp_path / name, 42) for name in ("exp-a", "exp-b")]
    with pytest.raises(UserError, match=r"only one seed was run, in exp-a, exp-b .*; run more with: dvc exp run"):
        compared(monkeypatch, twice)


def test_another_model_of_the_same_seed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_experiment(tmp_path / "one", 42, leave_out=("r4-joint",))
    other = write_experiment(tmp_path / "other", 42, leave_out=("r4-joint",))
    for each, mean in ((one, 0.7), (other, 0.6)):
        write_made_up_run(
            cards_dir(each.data_dir, "detection"), "r4-joint", made_up_ious(mean, 60, seed=5), params=project_params()
        )
    with pytest.raises(UserError, match=r"r4-joint gave different models under the same seed \(42\)"):
        compared(monkeypatch, [one, other])


def test_a_recipe_that_an_experiment_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = [
        write_experiment(tmp_path / f"exp-{seed}", seed, leave_out=("r1-llm-only",) if seed == 44 else ())
        for seed in (42, 43, 44)
    ]
    shown = compared(monkeypatch, experiments)
    assert "r1-llm-only was not evaluated in exp-44." in shown


def test_a_recipe_that_is_gone_from_params_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = [write_experiment(tmp_path / name, seed) for name, seed in (("a", 42), ("b", 43), ("c", 43))]
    for each in experiments[:2]:
        runs_dir = cards_dir(each.data_dir, "detection")
        plan = runs_dir / "r1-llm-only/plan.yaml"
        plan.write_text(plan.read_text().replace("recipe: r1-llm-only", "recipe: r0-renamed"))
        plan.parent.rename(runs_dir / "r0-renamed")
    shown = compared(monkeypatch, experiments)
    assert "r0-renamed was evaluated, but is not in params.yaml: left out." in shown
    assert "r1-llm-only was not evaluated in a, b." in shown


def test_models_that_two_experiments_have_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = [write_experiment(tmp_path / name, seed) for name, seed in (("a", 42), ("b", 43), ("c", 43))]
    shown = compared(monkeypatch, experiments)
    assert "c has the same models as b: counted once." in shown
    assert shown.count("counted once") == 1


def test_nothing_at_all_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Experiment(name="workspace", data_dir=tmp_path / "data", lock={})
    with pytest.raises(UserError, match=r"no experiment has a model of task detection .*; run: dvc repro compare@"):
        compared(monkeypatch, [empty])


WRITE_CARDS = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.tools.compare.test_compare import write_experiment
seed = int(next(line for line in Path("params.yaml").read_text().splitlines() if line.startswith("seed:")).split()[1])
write_experiment(Path("data"), seed)
"""


def test_experiments_come_from_dvc_and_those_that_have_not_ended_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*command: str) -> None:
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr

    (tmp_path / "params.yaml").write_text("seed: 42\n", encoding="utf-8")
    (tmp_path / "write_cards.py").write_text(WRITE_CARDS.format(root=str(ROOT)), encoding="utf-8")
    stage = {"cmd": f"{sys.executable} write_cards.py", "params": ["seed"], "outs": ["data/report/detection/runs"]}
    (tmp_path / "dvc.yaml").write_text(f"stages: {{evaluate: {stage}}}", encoding="utf-8")
    dvc = (sys.executable, "-m", "dvc")
    run("git", "init", "-q")
    run("git", "config", "user.email", "someone@example.org")
    run("git", "config", "user.name", "someone")
    run(*dvc, "init", "-q")
    run(*dvc, "repro", "-q")
    run("git", "add", ".")
    run("git", "commit", "-qm", "results")
    run(*dvc, "exp", "run", "-q", "--temp", "-n", "seed-43", "-S", "seed=43")
    run(*dvc, "exp", "run", "-q", "--queue", "-n", "seed-44", "-S", "seed=44")
    monkeypatch.chdir(tmp_path)
    revisions, others = named_revisions()
    assert list(revisions) == ["workspace", "seed-43"]
    assert others == {"seed-44": "queued"}
    found = [fetch(name, revision, "detection", tmp_path / "fetched") for name, revision in revisions.items()]
    assert [each.evaluated("detection") for each in found] == [sorted(DETECTION_NAMES)] * 2
    assert [next(iter(each.lock["evaluate"]["params"].values())) for each in found] == [{"seed": 42}, {"seed": 43}]
    with pytest.raises(UserError, match="experiment seed-45 cannot be read"):
        fetch("seed-45", "seed-45", "detection", tmp_path / "fetched")


def test_a_recipe_is_compared_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_seeds(seeds: Sequence[int], *, other_rate: int | None = None) -> str:
        by_name = {}
        for seed in seeds:
            name, rate = f"exp-{seed}", {"learning_rate": 2e-4 if seed == other_rate else 1e-4}
            lock = {"evaluate@r1-llm-only": {"params": {"params.yaml": rate}}}
            by_name[name] = Experiment(name=name, data_dir=tmp_path / name, lock=lock)
        monkeypatch.setattr(command, "named_revisions", lambda: ({name: name for name in by_name}, {}))
        monkeypatch.setattr(command, "fetch", lambda name, *_: by_name[name])
        return CliRunner().invoke(truth.main, ["r1-llm-only", "--splits", "200"]).output

    for seed in range(8):
        params = replace(project_params(), seed=seed)
        scores = np.clip(made_up_ious(0.6, 40, seed=seed) + np.random.default_rng(seed).normal(0, 0.1), 0, 1)
        write_made_up_run(cards_dir(tmp_path / f"exp-{seed}", "detection"), "r1-llm-only", scores, params=params)
    monkeypatch.chdir(ROOT)
    lines = of_seeds(range(8)).splitlines()
    assert re.fullmatch(r"r1-llm-only, 8 trainings: mean IoU 0\.\d{3} to 0\.\d{3}", lines[0])
    shares = [float(line.split(": ")[1].split("%")[0]) for line in lines[1:]]
    assert shares[0] > 50, "a lucky training is truly a better model"
    assert max(shares[1:]) <= 10, "of four arms of eight trainings, few can be told apart"
    assert "trained under 3 seeds, and two arms of it take 4 at least" in of_seeds(range(3))
    told, first, *_ = of_seeds(range(8), other_rate=7).splitlines()
    assert told == "Left out: exp-7 (unlike exp-0 in evaluate@r1-llm-only: learning_rate)."
    assert first.startswith("r1-llm-only, 7 trainings: ")
