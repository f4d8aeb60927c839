"""dvc.yaml as a whole: what each stage depends on, and that every profile has what the stages ask for."""

import re
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from dvc.dependency.param import ParamsDependency
from ruamel.yaml import YAML

from tests.closure import ROOT, import_closure, task_faces

PIPELINE: dict[str, Any] = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]
PARAMS: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")


def instances(stage: str) -> list[dict[str, Any]]:
    """The `do` blocks of a foreach stage with its items put in, as DVC does; `${profile}` is left."""
    entry = PIPELINE[stage]
    items = entry["foreach"]
    if isinstance(items, str):
        items = PARAMS[items.removeprefix("${").removesuffix("}")]
    if isinstance(items, list):
        return [_filled(entry["do"], {"item": item}) for item in items]
    return [
        _filled(entry["do"], {"key": key, **{f"item.{name}": value for name, value in item.items()}})
        for key, item in items.items()
    ]


def _filled(value: Any, names: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {_filled(key, names): _filled(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, names) for inner in value]
    if isinstance(value, str):
        return re.sub(r"\$\{([^}]+)\}", lambda match: str(names.get(match[1], match[0])), value)
    return value


def entry_point(do: dict[str, Any]) -> str:
    return "stages." + do["cmd"].split()[1]


def declared_code(do: dict[str, Any]) -> set[str]:
    """The project's files that a stage declares, folders spread out, empty files left out."""
    declared: set[str] = set()
    for dep in do["deps"]:
        path = ROOT / dep
        if dep.startswith("stages/"):
            assert path.exists(), dep
            files = [path] if path.is_file() else [file for file in path.rglob("*") if "__pycache__" not in file.parts]
            declared |= {
                str(file.relative_to(ROOT))
                for file in files
                if file.is_file() and file.read_text(encoding="utf-8").strip()
            }
    return declared


@pytest.mark.parametrize("stage", PIPELINE)
def test_a_stage_depends_on_exactly_the_code_it_runs(stage: str) -> None:
    for do in instances(stage):
        module = entry_point(do)
        needed = import_closure(module) | import_closure("stages.kit.containers.environment")
        for face in task_faces(module):
            task = next(match[1] for dep in do["deps"] if (match := re.match(rf"stages/tasks/([^/]+)/{face}", dep)))
            needed |= import_closure(f"stages.tasks.{task}.{face}")
        declared = declared_code(do)
        assert sorted(declared - needed) == [], f"{do['cmd']}: declared, but not used"
        assert sorted(needed - declared) == [], f"{do['cmd']}: used, but not declared"


@pytest.mark.parametrize("profile", PARAMS["profiles"])
@pytest.mark.parametrize("stage", PIPELINE)
def test_every_profile_has_the_parameters_that_the_stages_read(stage: str, profile: str) -> None:
    for do in instances(stage):
        for name in _filled(do.get("params", []), {"profile": profile}):
            here: Any = PARAMS
            for step in name.split("."):
                # A profile without this task's base or data leaves that task's stages out.
                if (step not in here and ".bases." in name) or (step not in here and ".datasets." in name):
                    break
                assert step in here, f"{do['cmd']} reads {name}"
                here = here[step]


@pytest.mark.parametrize("stage", PIPELINE)
def test_every_command_is_one_call_of_the_launcher(stage: str) -> None:
    for do in instances(stage):
        assert re.fullmatch(r"docker/run [a-z]+ [A-Za-z0-9._-]+", do["cmd"])


def test_a_new_rank_reruns_its_branch_and_the_comparison_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What DVC itself makes of dvc.yaml, without running it."""
    from dvc.repo import Repo

    for name in ("dvc.yaml", "params.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    repo = Repo.init(str(tmp_path), no_scm=True)
    graph = repo.index.graph
    rank = "recipes.r1-llm-only.lora.rank"
    touched = {
        stage
        for stage in repo.index.stages
        for dep in stage.deps
        if isinstance(dep, ParamsDependency) and any(f"{rank}.".startswith(f"{name}.") for name in dep.params)
    }
    # An edge leads from a stage to what it depends on.
    rerun = touched.union(*(nx.ancestors(graph, stage) for stage in touched))
    branch = {f"{stage}@r1-llm-only" for stage in ("plan", "train", "merge", "evaluate")}
    assert {stage.name for stage in rerun} == branch | {"compare@detection"}


def test_compare_waits_for_every_recipe_and_baseline_of_its_task() -> None:
    for do in instances("compare"):
        task = do["cmd"].split()[-1]
        runs = {
            name for group in ("recipes", "baselines") for name, run in PARAMS[group].items() if run["task"] == task
        }
        outs = [out for stage in ("evaluate", "baseline") for other in instances(stage) for out in other["outs"]]
        (cards,) = (dep for dep in do["deps"] if dep.startswith("data/"))
        assert {Path(out).name for out in outs if Path(out).parent == Path(cards)} == runs
