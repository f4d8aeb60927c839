"""dvc.yaml as a whole: what each stage depends on, and that every profile has what the stages ask for."""

import re
import shutil
from pathlib import Path
from typing import Any

import networkx as nx
import pyarrow as pa
import pytest
from dvc.dependency.param import ParamsDependency
from dvc.output import OutputIsIgnoredError
from dvc.repo import Repo
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.kit.data.prepared import read_prepared
from stages.kit.launcher.images import STAGE_TARGETS, image_inputs, read_pins
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages, stage_of_command
from tests import ROOT
from tests.closure import import_closure, task_modules
from tests.documents import write_yaml

PARAMS: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
READ = load_params(ROOT / "params.yaml")
PIPELINE = {stage.name: stage for stage in declared_stages(ROOT)}


@pytest.fixture(scope="module")
def dvc_repo(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """What DVC itself makes of dvc.yaml and params.yaml, nothing run."""
    folder = tmp_path_factory.mktemp("repo")
    for name in ("dvc.yaml", "params.yaml"):
        (folder / name).write_text((ROOT / name).read_text())
    return Repo.init(str(folder), no_scm=True)


def entry_point(stage: DeclaredStage) -> str:
    return "stages." + stage.command.split()[1]


def compares(stage: DeclaredStage) -> bool:
    """Whether it reads all runs of a task, with their times: the comparison, and the model card that shows it."""
    return entry_point(stage) in ("stages.compare", "stages.publish")


def declared_code(stage: DeclaredStage) -> set[str]:
    """The project's files that a stage declares, folders spread out, empty files left out."""
    declared: set[str] = set()
    for dep in stage.deps:
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


def test_dvc_reads_dvc_yaml_as_the_launcher_does(dvc_repo: Repo) -> None:
    def paths(parts: list[Any]) -> set[str]:
        inside = (Path(part.def_path) for part in parts if not isinstance(part, ParamsDependency))
        return {str(path) for path in inside}

    read_by_dvc = {stage.name: (paths(stage.deps), paths(stage.outs)) for stage in dvc_repo.index.stages}
    assert read_by_dvc == {stage.name: (set(stage.deps), set(stage.outs)) for stage in PIPELINE.values()}
    for stage in dvc_repo.index.stages:
        name = stage.name.partition("@")[2]
        assert f"{stage.cmd} {name}".strip() == f"exec {PIPELINE[stage.name].command}"


def test_a_build_waits_for_its_experts_and_what_starts_from_it_for_the_build(dvc_repo: Repo) -> None:
    graph = dvc_repo.index.graph
    waits_for = {stage.name: {other.name for other in graph.successors(stage)} for stage in dvc_repo.index.stages}
    assert waits_for["build@moe"] == {"check", "base@dense", "merge@moe-expert-truthfulqa", "merge@moe-expert-qmsum"}
    for name in ("plan@moe-gate-labels", "train@moe-gate-labels", "merge@moe-gate-labels", "baseline@base-moe"):
        assert "build@moe" in waits_for[name]
        assert "base@dense" not in waits_for[name]


def test_every_expert_of_a_build_is_among_what_it_depends_on() -> None:
    """DVC takes no list from params.yaml: dvc.yaml names experts by their number."""
    for name, build in READ.builds.items():
        experts = {f"data/runs/{recipe}/merged" for recipe in build.recipes}
        assert experts <= set(PIPELINE[f"build@{name}"].deps), name


def test_a_mix_waits_for_what_it_is_made_of_on_every_profile() -> None:
    for profile in READ.profiles.values():
        for name, dataset in profile.datasets.items():
            assert {f"data/prepared/{part}" for part in dataset.mix or ()} <= set(PIPELINE[f"prepare@{name}"].deps), (
                name
            )


@pytest.mark.parametrize("name", READ.active.datasets)
def test_data_that_is_missing_or_damaged_is_made_by_the_stage_that_is_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    with pytest.raises(UserError) as missing:
        read_prepared(folder, "train", pa.schema([]), lambda row, _: row)
    folder.mkdir()
    (folder / "train.parquet").write_text("")
    with pytest.raises(UserError) as damaged:
        read_prepared(folder, "train", pa.schema([]), lambda row, _: row)
    for error in (missing, damaged):
        stage = error.value.message.rpartition("dvc repro ")[2].removeprefix("-f -s ")
        assert f"data/prepared/{name}" in PIPELINE[stage].outs


def test_a_command_that_dvc_yaml_does_not_have_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(
        UserError, match=r"no stage of dvc\.yaml runs `docker/run train r1`.*docker/run train r1-llm-only"
    ):
        stage_of_command(declared_stages(ROOT), "train", ["r1"])


def needed_code(stage: DeclaredStage) -> set[str]:
    """What the stage runs, and what decides about its environment."""
    module = entry_point(stage)
    needed = set(import_closure(module) | import_closure("stages.core.environment"))
    for used in task_modules(module):
        task = next(match[1] for dep in stage.deps if (match := re.match(rf"stages/tasks/([^/]+)/{used}", dep)))
        needed |= import_closure(f"stages.tasks.{task}.{used}")
    return needed


@pytest.mark.parametrize("name", PIPELINE)
def test_a_stage_depends_on_the_code_it_runs(name: str) -> None:
    stage = PIPELINE[name]
    assert sorted(needed_code(stage) - declared_code(stage)) == [], "used, but not declared"
    # Stages of one kind are declared together, and tasks use different parts of the kit.
    of_its_kind = [other for other in PIPELINE.values() if other.name.partition("@")[0] == name.partition("@")[0]]
    used = {Path(path) for other in of_its_kind for path in needed_code(other)}
    declared = [dep for dep in stage.deps if dep.startswith("stages/")]
    assert [dep for dep in declared if not any(path.is_relative_to(dep) for path in used)] == [], "declared, not used"


def test_every_stage_depends_on_all_that_images_are_built_from_and_on_nothing_else_of_docker() -> None:
    pins = read_pins(ROOT)
    inputs = {
        path
        for target in STAGE_TARGETS
        for path in image_inputs(ROOT, target, pins, pins.bases.python)
        if path.startswith("docker/")
    }
    seen = Repo(str(ROOT)).dvcfs.find("docker", dvc_only=False)
    assert {path.removeprefix("/") for path in seen} == inputs | {"docker/images.yaml"}
    assert [stage.name for stage in PIPELINE.values() if "docker" not in stage.deps] == []


@pytest.mark.parametrize("profile", PARAMS["profiles"])
def test_every_profile_has_the_parameters_that_the_stages_read(profile: str) -> None:
    paths = {path.replace("${profile}", profile) for stage in PIPELINE.values() for path in stage.params}
    # A profile without a task's base or data leaves that task's stages out.
    asked = [path for path in paths if ".bases." not in path and ".datasets." not in path]
    assert len(asked) > 40
    assert [path for path in asked if not is_there(PARAMS, path.split("."))] == []


def is_there(tree: Any, path: list[str]) -> bool:
    return not path or (path[0] in tree and is_there(tree[path[0]], path[1:]))


def test_every_command_is_one_call_of_the_launcher() -> None:
    one_call = re.compile(r"docker/run ([a-z]+ [A-Za-z0-9_-]+|check)")
    assert [stage.command for stage in PIPELINE.values() if not one_call.fullmatch(stage.command)] == []


def test_no_shell_stays_between_dvc_and_the_launcher_and_none_reads_a_name() -> None:
    """It would outlive a killed dvc, and the stage with it; and run what a name of params.yaml has in it."""
    commands = re.findall(r"^ *cmd: (.*)", (ROOT / "dvc.yaml").read_text(), re.MULTILINE)
    assert commands
    assert [command for command in commands if not re.fullmatch("exec docker/run [a-z]+", command)] == []


def test_all_that_is_named_in_params_yaml_waits_until_that_is_checked(dvc_repo: Repo) -> None:
    """DVC removes a stage's outputs before it runs it, wherever a name leads."""
    entries = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]
    named = {kind for kind, entry in entries.items() if str(entry.get("foreach", "")).startswith("${")}
    assert len(named) == 8
    stages = {stage.name: stage for stage in dvc_repo.index.stages}
    waiting = {stage.name for stage in nx.ancestors(dvc_repo.index.graph, stages["check"])}
    assert {name for name in stages if name.partition("@")[0] in named} <= waiting


HOSTILE = [
    ("recipes", "../../tests"),
    ("recipes", "../visempar"),
    ("baselines", "../../../tests"),
    ("builds", "../../tests"),
    ("builds", "../visempar"),
    ("predictions", "../../README"),
]


@pytest.mark.parametrize(("group", "name"), HOSTILE)
def test_dvc_itself_refuses_a_name_that_leads_an_output_elsewhere_in_the_checkout(
    group: str, name: str, tmp_path: Path
) -> None:
    """Before it runs or removes anything: `dvc checkout`, which `dvc exp run` begins with, removes too."""
    params = YAML(typ="safe").load(ROOT / "params.yaml")
    params[group][name] = next(iter(params[group].values()))
    write_yaml(params, tmp_path / "params.yaml")
    Repo.init(str(tmp_path), no_scm=True)
    for file in ("dvc.yaml", ".dvcignore"):
        shutil.copy(ROOT / file, tmp_path)
    repo = Repo(str(tmp_path))
    with pytest.raises(OutputIsIgnoredError, match=re.escape(name)):
        assert repo.index.stages


def test_every_output_of_the_pipeline_is_where_dvc_may_write() -> None:
    ignored = Repo(str(ROOT)).dvcignore
    outs = [ROOT / out for stage in PIPELINE.values() for out in stage.outs]
    assert [out for out in outs if ignored.check_ignore(str(out)).match] == []


def test_a_new_rank_reruns_its_branch_and_what_compares_and_nothing_else(dvc_repo: Repo) -> None:
    """What DVC itself makes of dvc.yaml, without running it."""
    graph = dvc_repo.index.graph
    rank = "recipes.r1-llm-only.lora.rank"
    touched = {
        stage
        for stage in dvc_repo.index.stages
        for dep in stage.deps
        if isinstance(dep, ParamsDependency) and any(f"{rank}.".startswith(f"{name}.") for name in dep.params)
    }
    # An edge leads from a stage to what it depends on.
    rerun = touched.union(*(nx.ancestors(graph, stage) for stage in touched))
    branch = {f"{stage}@r1-llm-only" for stage in ("plan", "train", "merge", "evaluate")}
    # Every comparison reads the recipes of all tasks, for DVC cannot choose among them.
    comparisons = {stage.name for stage in PIPELINE.values() if compares(stage)}
    assert {stage.name for stage in rerun} == branch | comparisons


def test_the_only_metrics_are_those_of_comparisons(dvc_repo: Repo) -> None:
    """DVC shows every figure of every metrics file side by side, and it names those that one file alone has bare."""
    metrics = {out.def_path for stage in dvc_repo.index.stages for out in stage.outs if out.metric}
    assert metrics == {f"data/report/{task}/comparison.json" for task in ("detection", "amr", "moe", "chat")}


def test_compare_waits_for_every_recipe_and_baseline_of_its_task() -> None:
    for stage in PIPELINE.values():
        if entry_point(stage) != "stages.compare":
            continue
        task = stage.name.partition("@")[2]
        runs = {
            name for group in ("recipes", "baselines") for name, run in PARAMS[group].items() if run["task"] == task
        }
        outs = [Path(out) for other in PIPELINE.values() for out in other.outs]
        records, report = Path("data/provenance", task), Path("data/report", task)
        cards, memory = report / "runs", report / "memory"
        assert {records, cards, memory} == set(map(Path, stage.inputs("data")))
        assert {out.name for out in outs if out.parent == cards} == runs
        assert {out.stem.partition("@")[2] for out in outs if out.parent == records} == runs


def test_every_stage_has_a_record_of_its_own_which_the_launcher_writes() -> None:
    for name, stage in PIPELINE.items():
        assert stage.provenance is not None, name
        assert Path(stage.provenance).name == f"{name}.json"
        assert stage.provenance not in stage.written


def test_no_stage_but_what_compares_depends_on_what_holds_times() -> None:
    """A rerun that gives the same bytes has another record, and must not rerun what comes after it."""
    for name, stage in PIPELINE.items():
        assert bool(stage.inputs("data/provenance")) == compares(stage), name


def test_what_stages_held_is_kept_and_changes_nothing_but_what_compares() -> None:
    """It differs from run to run: whoever depended on it would run anew with every run."""
    stages = PIPELINE.values()
    holders = {"train", "merge", "build", "evaluate"}
    kept = {stage.name: out for stage in stages for out in stage.outs if "/memory/" in out}
    assert set(kept) == {stage.name for stage in stages if stage.command.split()[1] in holders}
    for name, out in kept.items():
        readers = {stage.name for stage in stages if any(Path(out).is_relative_to(dep) for dep in stage.deps)}
        task = Path(out).parts[2]
        cards = {f"publish@{recipe}" for recipe, found in PARAMS["recipes"].items() if found["task"] == task}
        assert readers == {f"compare@{task}", *cards}, name
