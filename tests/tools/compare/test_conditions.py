from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.provenance import Machine
from stages.kit.reporting.runs import cards_dir
from tests.made_up_runs import made_up_ious, project_params, write_made_up_record, write_made_up_run
from tools.compare.conditions import conditions, unlike
from tools.compare.experiments import Experiment


def lock(*, seed: int = 42, rank: int = 64, code: str = "c0de", data: str = "da7a") -> dict[str, Any]:
    """Of a recipe, in the shape of dvc.lock."""

    def stage(deps: dict[str, str], outs: dict[str, str], **params: Any) -> dict[str, Any]:
        listed = {"deps": deps, "outs": outs}
        entry: dict[str, Any] = {
            kind: [{"path": path, "md5": digest} for path, digest in files.items()] for kind, files in listed.items()
        }
        return entry | {"params": {"params.yaml": params}} if params else entry

    settings = {"lora": {"rank": rank}, "task": "detection"}
    return {
        "check": stage({"params.yaml": f"{seed}{rank}"}, {"data/checked.txt": "0"}),
        "prepare@tables": stage({"stages/core": "c0", "data/checked.txt": "0"}, {"data/prepared/tables": data}),
        "plan@r1": stage(
            {"data/prepared/tables/train.parquet": data}, {"data/runs/r1/plan.yaml": f"{seed}"},
            seed=seed, **{"recipes.r1": settings},
        ),
        "train@r1": stage(
            {"stages/kit/training": code, "data/runs/r1/plan.yaml": f"{seed}"}, {"data/runs/r1/trained": f"{seed}"}
        ),
        "evaluate@r1": stage({"data/runs/r1/trained": f"{seed}"}, {"data/report/detection/runs/r1": f"{seed}"}),
        "train@r2": stage({"stages/kit/training": "of another recipe"}, {"data/runs/r2/trained": "2"}),
    }  # fmt: skip


def experiment(tmp_path: Path, name: str, **changes: Any) -> Experiment:
    write_made_up_run(cards_dir(tmp_path / name, "detection"), "r1", made_up_ious(0.5, 10, seed=1))
    return Experiment(name=name, data_dir=tmp_path / name, lock=lock(**changes))


def test_conditions_are_what_no_stage_made_of_the_stages_that_the_cards_come_from(tmp_path: Path) -> None:
    assert conditions(experiment(tmp_path, "one"), "detection") == {
        "data/prepared/tables": "da7a",
        "plan@r1: recipes.r1.lora.rank": "64",
        "plan@r1: recipes.r1.task": '"detection"',
        "plan@r1: seed": "42",
        "record of r1 in dvc.lock": "yes",
        "stages/core": "c0",
        "stages/kit/training": "c0de",
    }


def test_the_seed_is_no_difference_and_all_else_is(tmp_path: Path) -> None:
    one, other = experiment(tmp_path, "one"), experiment(tmp_path, "other", seed=43)
    assert unlike([one, other], "detection") == {}
    changed = experiment(tmp_path, "changed", rank=8, code="new", data="other data")
    assert unlike([one, changed], "detection") == {
        "data/prepared/tables": {"da7a": ["one"], "other data": ["changed"]},
        "plan@r1: recipes.r1.lora.rank": {"64": ["one"], "8": ["changed"]},
        "stages/kit/training": {"c0de": ["one"], "new": ["changed"]},
    }


def test_packages_of_other_versions_are_a_difference(tmp_path: Path) -> None:
    machine = Machine(
        python="3.12", packages={"torch": "2.13.0"}, cuda=None, system="Linux", cpu="A CPU", arithmetic="avx2", cores=2,
        memory_gib=16.0,
    )  # fmt: skip
    both = [experiment(tmp_path, name) for name in ("one", "other")]
    for each, version in zip(both, ("2.13.0", "2.14.0"), strict=True):
        of_version = Machine(**{**vars(machine), "packages": {"torch": version}})
        write_made_up_record(each.data_dir, "train@r1", machine=of_version)
    assert unlike(both, "detection") == {"package torch": {"2.13.0": ["one"], "2.14.0": ["other"]}}


def test_a_card_that_was_left_behind_is_seen_by_its_plan(tmp_path: Path) -> None:
    def planned(name: str, rate: float) -> Experiment:
        params = project_params()
        recipes = {**params.recipes, "r1-llm-only": replace(params.recipe("r1-llm-only"), learning_rate=rate)}
        cards = cards_dir(tmp_path / name, "detection")
        write_made_up_run(cards, "r1-llm-only", made_up_ious(0.5, 10, seed=1), params=replace(params, recipes=recipes))
        return Experiment(name=name, data_dir=tmp_path / name, lock={"evaluate@r1-llm-only": {}})

    both = [planned("one", 1e-4), planned("other", 2e-4)]
    assert list(unlike(both, "detection")) == ["r1-llm-only: plan of its card: schedule.learning_rates.llm"]
    assert unlike(both, "detection", "recipes.*.learning_rate") == {}
    assert "record of r1-llm-only in dvc.lock" in unlike([both[0], replace(both[1], lock={})], "detection")
