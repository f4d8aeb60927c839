"""From a dense base to experts, their mixture, and a recipe on the mixture, by the shipped recipes on a tiny base."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.build import probes_of
from stages.core.errors import UserError
from stages.core.lineage import read_lineage
from stages.core.params import load_params
from stages.core.params.schema import ExpertParams
from tests import ROOT
from tests.kit.mixture.dense import save_base
from tests.stage_runs import all_the_way, done, read_params, refused, run, small_params, write_params

pytestmark = pytest.mark.pipeline

EXPERTS = ("moe-expert-truthfulqa", "moe-expert-qmsum")
AFTER = "moe-finetune"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with a mixture of two experts, and a recipe that started from it."""
    workspace = tmp_path_factory.mktemp("workspace")
    raw = small_params()
    raw["profiles"]["tiny"]["bases"]["dense"] = f"folder:{save_base(workspace / 'dense', max_position_embeddings=4096)}"
    for recipe in (*EXPERTS, AFTER):
        raw["recipes"][recipe]["max_steps"] = 2
    raw["recipes"][AFTER].update(base="builds/moe", data="both-domains")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(raw)
        done("base", "dense")
        for dataset in ("truthfulqa", "qmsum", "only-truthfulqa", "only-qmsum", "both-domains"):
            done("prepare", dataset)
        for recipe in EXPERTS:
            for stage in ("plan", "train", "merge"):
                done(stage, recipe)
        done("build", "moe")
        done("evaluate", "base-moe")
        all_the_way(AFTER)
        yield workspace


@pytest.fixture
def workspace(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A moved copy, to damage."""
    moved = tmp_path / "moved workspace"
    shutil.copytree(built, moved)
    monkeypatch.chdir(moved)
    return moved


def test_a_build_is_certified_and_has_its_lineage(built: Path) -> None:
    folder = built / "data/builds/moe"
    lineage = read_lineage(folder)
    assert (lineage.kind, lineage.name) == ("built", "moe")
    assert lineage.parents.keys() == {"base", *(f"expert/{name}" for name in EXPERTS)}
    certificate = json.loads((built / "data/builds/moe.json").read_text())
    assert certificate["built_digest"] == lineage.digest
    for name in EXPERTS:
        parent = lineage.parents[f"expert/{name}"]
        assert (folder / parent.path).resolve() == built / "data/runs" / name / "merged"
        assert parent.lineage == read_lineage(built / "data/runs" / name / "merged")
        assert certificate["changes"][name]["outside"] == 0 < certificate["changes"][name]["mlp"]
        assert certificate["domains"][name]["forced_deviation"] < 1e-5
        assert sum(certificate["domains"][name]["routing"]["load"]) == pytest.approx(1)
    memory = json.loads((built / "data/report/moe/memory/moe/build.json").read_text())
    assert 0 < memory["after_load"]["used_bytes"] <= memory["end"]["peak_bytes"]


def test_a_recipe_trains_all_of_a_build_but_the_shared_expert(built: Path) -> None:
    lineage = read_lineage(built / f"data/runs/{AFTER}/merged")
    assert lineage.parents["base"].lineage == read_lineage(built / "data/builds/moe")
    assert lineage.root() == read_lineage(built / "data/bases/dense")
    trained = load_file(built / f"data/runs/{AFTER}/merged/model.safetensors")
    before = load_file(built / "data/builds/moe/model.safetensors")
    assert trained.keys() == before.keys()
    unchanged = {name for name in before if trained[name].equal(before[name])}
    assert unchanged == {name for name in before if "shared_expert" in name}
    model = AutoModelForCausalLM.from_pretrained(built / f"data/runs/{AFTER}/merged")
    assert type(model).__name__ == "Qwen2MoeForCausalLM"


def test_experts_that_changed_more_than_mlps_are_built_with_a_warning(workspace: Path) -> None:
    raw = read_params()
    del raw["recipes"][EXPERTS[1]]["full_targets"]
    write_params(raw)
    for stage in ("plan", "train", "merge"):
        done(stage, EXPERTS[1])
    output = run("build", "moe").output
    assert re.search(rf"expert {EXPERTS[1]} changed all else by \S+ of its norm, which is lost", output)
    assert f"expert {EXPERTS[0]} changed all else" not in output


def test_unfit_experts_are_refused_and_the_last_build_stays(workspace: Path) -> None:
    before = read_lineage(Path("data/builds/moe"))
    one, two = (Path("data/runs") / name / "merged" for name in EXPERTS)
    shutil.rmtree(two)
    shutil.copytree(one, two)
    assert f"experts {EXPERTS[0]} and {EXPERTS[1]} are the same model" in refused("build", "moe")
    assert read_lineage(Path("data/builds/moe")) == before
    assert not Path("data/builds/.moe.partial").exists()


@pytest.mark.parametrize(
    ("damaged", "fix", "stages"),
    [
        (f"runs/{EXPERTS[1]}/merged", f"merge@{EXPERTS[1]}", [("build", "moe")]),
        ("bases/dense", "base@dense", [("build", "moe")]),
        ("builds/moe", "build@moe", [("train", AFTER), ("evaluate", "base-moe")]),
    ],
)
def test_changed_content_is_refused_with_the_stage_that_rebuilds_it(
    workspace: Path, damaged: str, fix: str, stages: list[tuple[str, str]]
) -> None:
    (Path("data") / damaged / "config.json").open("a").write(" ")
    for stage, name in stages:
        assert f"rebuild it with: dvc repro -f -s {fix}" in refused(stage, name)


def test_a_domain_of_a_task_without_domains_is_refused() -> None:
    params = load_params(ROOT / "params.yaml")
    with pytest.raises(UserError, match="expert amr-ptr has the domain x, but task amr has none"):
        probes_of(ExpertParams(recipe="amr-ptr", domain="x"), params.recipe("amr-ptr"))
