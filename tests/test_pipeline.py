"""dvc.yaml as a whole: each stage declares what it uses, and every profile has what the stages read."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from dvc.dependency.param import ParamsDependency
from dvc.output import OutputIsIgnoredError
from dvc.repo import Repo
from ruamel.yaml import YAML

from stages.core.params import load_params
from stages.launcher.images import STAGE_TARGETS, image_inputs
from stages.launcher.pipeline import DeclaredStage, _instances, declared_stages
from tests import ROOT
from tests.closure import has_code, import_closure, task_modules
from tests.documents import write_yaml

PARAMS: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
READ = load_params(ROOT / "params.yaml")
IGNORED = Repo(str(ROOT)).dvcignore
PIPELINE = {stage.name: stage for stage in declared_stages(ROOT)}
MADE_UP = {
    "exports": {"made-up": {"recipe": "chat-lora", "task": "chat", "data": "conversations"}},
    "guards": {"made-up": {"source": "folder:data/tiny/general"}},
}
STAGES = PIPELINE | {
    stage.name: stage
    for kind in ("export", "exported", "guard", "published")  # params.yaml has no entry for them
    for stage in _instances(kind, YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"][kind], MADE_UP)
}
TASKS = sorted(path.parent.name for path in ROOT.glob("stages/tasks/*/report.py"))


@pytest.fixture(scope="module")
def dvc_repo(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """DVC's own view of dvc.yaml and params.yaml; nothing has run."""
    folder = tmp_path_factory.mktemp("repo")
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, folder)
    return Repo.init(str(folder), no_scm=True)


@cache
def ignored_by_dvc(path: Path) -> bool:
    return bool(IGNORED.check_ignore(str(path)).match)


def entry_point(stage: DeclaredStage) -> str:
    return stage.command.split()[1]


def reads_all_runs(stage: DeclaredStage) -> bool:
    """The comparison reads all runs of a task with their times, and so does the model card that shows it."""
    return entry_point(stage) in ("compare", "publish")


def declared_code(stage: DeclaredStage) -> set[str]:
    """The project's files with code below the folders that a stage declares."""
    paths = [ROOT / dep for dep in stage.deps if dep.startswith("stages/")]
    assert [path for path in paths if not path.exists()] == []
    files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
    files = (file for file in files if file.is_file() and not ignored_by_dvc(file))
    return {str(file.relative_to(ROOT)) for file in files if has_code(file)}


def code_of_kind(name: str, code: Callable[[DeclaredStage], set[str]]) -> set[str]:
    """The code of all stages that dvc.yaml declares together with a stage, such as train@r1-llm-only."""
    kind = name.partition("@")[0]
    return set().union(*(code(stage) for other, stage in STAGES.items() if other.partition("@")[0] == kind))


def needed_code(stage: DeclaredStage) -> set[str]:
    """The files that the stage imports, and those that set its environment."""
    module = f"stages.{entry_point(stage)}"
    needed = set(import_closure(module) | import_closure("stages.core.environment"))
    tasks = {match[1] for dep in stage.deps if (match := re.match(r"stages/tasks/([^/]+)/", dep))}
    for task, used in product(tasks, task_modules(module)):
        needed |= import_closure(f"stages.tasks.{task}.{used}")
    return needed


def waiting_for(graph: nx.DiGraph, name: str) -> set[str]:
    """Names of the stages that depend on a stage, directly or through others. Edges lead from a stage to its inputs."""
    stage = next(each for each in graph.nodes if each.name == name)
    return {other.name for other in nx.ancestors(graph, stage)}


# The launcher's reading of dvc.yaml


def test_the_launcher_reads_dvc_yaml_as_dvc_does(dvc_repo: Repo) -> None:
    def paths(parts: list[Any]) -> set[str]:
        inside = (Path(part.def_path) for part in parts if not isinstance(part, ParamsDependency))
        return {str(path) for path in inside}

    read_by_dvc = {stage.name: (paths(stage.deps), paths(stage.outs)) for stage in dvc_repo.index.stages}
    assert read_by_dvc == {stage.name: (set(stage.deps), set(stage.outs)) for stage in PIPELINE.values()}
    for stage in dvc_repo.index.stages:
        name = stage.name.partition("@")[2]
        assert f"{stage.cmd} {name}".strip() == f"exec {PIPELINE[stage.name].command}"


def test_no_command_has_a_name_in_it_or_keeps_a_shell() -> None:
    """DVC puts names into commands unquoted; a shell between dvc and the launcher would outlive a killed dvc."""
    commands = re.findall(r"^ *cmd: (.*)", (ROOT / "dvc.yaml").read_text(), re.MULTILINE)
    assert commands
    assert [command for command in commands if not re.fullmatch("exec docker/run [a-z]+", command)] == []


# Dependencies


@pytest.mark.parametrize("name", STAGES)
def test_stage_declares_the_code_it_runs(name: str) -> None:
    stage = STAGES[name]
    assert sorted(needed_code(stage) - declared_code(stage)) == [], "used, but not declared"
    # Stages of one kind are declared together, and tasks use different parts of the kit.
    used = {Path(path) for path in code_of_kind(name, needed_code)}
    declared = [dep for dep in stage.deps if dep.startswith("stages/")]
    assert [dep for dep in declared if not any(path.is_relative_to(dep) for path in used)] == [], "declared, not used"


@pytest.mark.parametrize("kind", ["train", "merge", "evaluate", "baseline"])
def test_a_comment_in_code_of_prepare_alone_reruns_nothing_that_runs_a_model(kind: str) -> None:
    declared = {path for name in PIPELINE if name.partition("@")[0] == kind for path in declared_code(PIPELINE[name])}
    alone = ("folder", "given_images", "hub", "near", "prepared", "sources")
    assert declared & {f"stages/data/{module}.py" for module in alone} == set()


@pytest.mark.parametrize("kind", ["train", "merge"])
def test_a_comment_trains_and_merges_nothing_that_does_not_run_it(kind: str) -> None:
    recipes = [name for name in PIPELINE if name.partition("@")[0] == kind]
    declared, needed = (code_of_kind(recipes[0], code) for code in (declared_code, needed_code))
    # Core is small, and a part of it is a folder of every stage.
    assert {path for path in declared - needed if not path.startswith(("stages/core/", "stages/internals/"))} == set()
    rooms = ("memory", "reporting", "publishing", "launcher", "evaluation/vllm")
    predictions = ("cards.py", "disk.py", "prediction.py", "resolve.py")
    foreign = (*(f"stages/{room}/" for room in rooms), *(f"stages/planning/{module}" for module in predictions))
    assert {path for path in declared if path.startswith(foreign)} == set()
    for name in recipes:
        task = PARAMS["recipes"][name.partition("@")[2]]["task"]
        of_tasks = {path for path in declared_code(PIPELINE[name]) if path.startswith("stages/tasks/")}
        assert {path.split("/")[2] for path in of_tasks} == {task}


def test_stages_depend_on_all_that_images_are_built_from_and_nothing_else_of_docker() -> None:
    inputs = {path for target in STAGE_TARGETS for path in image_inputs(ROOT, target)}
    seen = Repo(str(ROOT)).dvcfs.find("docker", dvc_only=False)
    assert {path.removeprefix("/") for path in seen} == {
        *(path for path in inputs if path.startswith("docker/")),
        "docker/images.yaml",
        "docker/flash-attn.lock",  # of an image that is built by choice
    }
    assert [stage.name for stage in PIPELINE.values() if "docker" not in stage.deps] == []


def test_builds_and_mixes_wait_for_all_their_parts() -> None:
    """DVC takes no list from params.yaml, so dvc.yaml names experts by number and the parts of a mix by name."""
    for name, build in READ.builds.items():
        assert {f"data/runs/{recipe}/merged" for recipe in build.recipes} <= set(PIPELINE[f"build@{name}"].deps)
    for profile in READ.profiles.values():
        for name, dataset in profile.datasets.items():
            assert {f"data/prepared/{part}" for part in dataset.mix or ()} <= set(PIPELINE[f"prepare@{name}"].deps)


@pytest.mark.parametrize("profile", PARAMS["profiles"])
def test_every_profile_has_the_parameters_that_stages_read(profile: str) -> None:
    paths = {path.replace("${profile}", profile) for stage in PIPELINE.values() for path in stage.params}
    # A profile without a task's base or data leaves that task's stages out.
    required = [path for path in paths if ".bases." not in path and ".datasets." not in path]
    assert len(required) > 30
    assert [path for path in required if not has_path(PARAMS, path.split("."))] == []


def test_another_card_reruns_plans_baselines_and_builds_and_what_follows_from_them() -> None:
    reading = {kind.partition("@")[0] for kind, stage in PIPELINE.items() if {"gpu", "gpus"} & set(stage.params)}
    assert reading == {"plan", "baseline", "build"}


def has_path(tree: Any, path: list[str]) -> bool:
    return not path or (path[0] in tree and has_path(tree[path[0]], path[1:]))


def test_new_rank_reruns_only_its_recipe_and_the_comparisons(dvc_repo: Repo) -> None:
    graph = dvc_repo.index.graph
    rank = "recipes.r1-llm-only.lora.rank."
    touched = {
        stage.name
        for stage in dvc_repo.index.stages
        for dep in stage.deps
        if isinstance(dep, ParamsDependency) and any(rank.startswith(f"{name}.") for name in dep.params)
    }
    rerun = touched.union(*(waiting_for(graph, name) for name in touched))
    recipe = {f"{stage}@r1-llm-only" for stage in ("plan", "train", "merge", "evaluate")}
    # Every comparison reads the recipes of all tasks, for DVC cannot choose among them.
    assert rerun == recipe | {stage.name for stage in PIPELINE.values() if reads_all_runs(stage)}


# Names from params.yaml


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("recipes", "../../tests"),
        ("recipes", "../visempar"),
        ("baselines", "../../../tests"),
        ("builds", "../../tests"),
        ("predictions", "../../README"),
    ],
)
def test_dvc_refuses_a_name_that_leads_out_of_its_folders(group: str, name: str, tmp_path: Path) -> None:
    """It does so before it runs or removes anything; `dvc checkout`, the start of `dvc exp run`, removes too."""
    params = YAML(typ="safe").load(ROOT / "params.yaml")
    params[group][name] = next(iter(params[group].values()))
    write_yaml(params, tmp_path / "params.yaml")
    Repo.init(str(tmp_path), no_scm=True)
    for file in ("dvc.yaml", ".dvcignore"):
        shutil.copy(ROOT / file, tmp_path)
    with pytest.raises(OutputIsIgnoredError, match=re.escape(name)):
        assert Repo(str(tmp_path)).index.stages


# Outputs


def test_guards_rerun_plans_and_evaluations_and_train_nothing() -> None:
    reading = {stage.name.partition("@")[0] for stage in STAGES.values() if "data/guards" in stage.deps}
    assert reading == {"plan", "evaluate", "baseline", "exported"}
    made = {out for stage in STAGES.values() if stage.name == "guard@made-up" for out in stage.written}
    assert made == {"data/guards/made-up"}


def test_every_output_is_where_dvc_may_write() -> None:
    ignored = Repo(str(ROOT)).dvcignore
    outs = [ROOT / out for stage in PIPELINE.values() for out in stage.outs]
    assert [out for out in outs if ignored.check_ignore(str(out)).match] == []


def test_only_comparisons_write_dvc_metrics() -> None:
    """DVC shows every figure of every metrics file side by side: with those of each run its table is unreadable."""
    entries = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]
    assert [kind for kind, entry in entries.items() if "metrics" in entry.get("do", entry)] == ["compare"]


@pytest.mark.parametrize("task", TASKS)
def test_compare_waits_for_every_run_of_its_task(task: str) -> None:
    runs = {name for group in ("recipes", "baselines") for name, run in PARAMS[group].items() if run["task"] == task}
    outs = [Path(out) for stage in PIPELINE.values() for out in stage.outs]
    records, cards, memory = (
        Path("data/provenance", task),
        *(Path("data/report", task, each) for each in ("runs", "memory")),
    )
    assert set(map(Path, PIPELINE[f"compare@{task}"].inputs("data"))) == {records, cards, memory}
    assert {out.name for out in outs if out.parent == cards} == runs
    assert {out.stem.partition("@")[2] for out in outs if out.parent == records} == runs


def test_every_stage_has_a_record_that_only_comparisons_read() -> None:
    """Records hold times: a rerun that gives the same bytes must not rerun the stages after it."""
    for name, stage in PIPELINE.items():
        assert stage.provenance is not None, name
        assert Path(stage.provenance).name == f"{name}.json"
        assert stage.provenance not in stage.written
        assert bool(stage.inputs("data/provenance")) == reads_all_runs(stage), name


def test_measured_memory_is_kept_and_only_comparisons_read_it() -> None:
    """It differs between runs, like times."""
    stages = PIPELINE.values()
    measured = {stage.name: out for stage in stages for out in stage.outs if "/memory/" in out}
    assert set(measured) == {
        stage.name for stage in stages if entry_point(stage) in ("train", "merge", "build", "evaluate")
    }
    for out in measured.values():
        readers = [stage for stage in stages if any(Path(out).is_relative_to(dep) for dep in stage.deps)]
        assert readers
        assert all(map(reads_all_runs, readers)), out
