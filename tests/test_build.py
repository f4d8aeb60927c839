"""From a dense base to experts, their mixture, and a recipe on the mixture, with the smallest model."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.core.lineage import read_lineage
from stages.kit.data.parquet import write_rows
from stages.kit.data.prepared import to_row
from stages.tasks.amr.samples import SCHEMA, parse_record
from tests import ROOT
from tests.kit.mixture.dense import save_base
from tests.stage_runs import done, refused, run, write_params

pytestmark = pytest.mark.pipeline

EXPERTS = ("expert-full", "expert-ptr")


def params_of(base_dir: Path) -> dict[str, Any]:
    raw: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["bases"] = {"llm": f"folder:{base_dir}"}
    tiny["datasets"] = {"visempar": {"task": "amr", "source": "folder:corpus"}}
    tiny["memory"]["micro_batch"] = 2
    tiny["evaluation"] = {"batch_size": 3, "max_new_tokens": 4}
    common = {
        "task": "amr",
        "data": "visempar",
        "loss": "assistant-only",
        "learning_rate": 1e-4,
        "epochs": 1,
        "effective_batch": 4,
        "max_length": 2048,
    }
    lora = {"rank": 4, "alpha": 8, "targets": {"llm": ["gate_proj", "up_proj", "down_proj"]}}
    expert = {**common, "base": "bases/llm", "parts": {"llm": "lora"}, "lora": lora}
    raw["baselines"] = {"base-moe": {"task": "amr", "base": "builds/moe", "data": "visempar", "answer_format": "ptr"}}
    raw["recipes"] = {
        "expert-full": {**expert, "answer_format": "full"},
        "expert-ptr": {**expert, "answer_format": "ptr", "seed": 7},
        "expert-whole": {**common, "base": "bases/llm", "answer_format": "ptr", "parts": {"llm": "full"}},
        "after": {**common, "base": "builds/moe", "answer_format": "ptr", "parts": {"llm": "full"}},
    }
    raw["builds"] = {"moe": {"task": "amr", "base": "bases/llm", "experts": [{"recipe": name} for name in EXPERTS]}}
    raw.pop("predictions", None)
    return raw


def write_prepared(folder: Path) -> None:
    """Sentences of a few words each, in the form of `prepare`."""
    folder.mkdir(parents=True)
    for split, count in (("train", 8), ("val", 3)):
        sentences = [f"Tôi đọc {'rất nhiều ' * (number % 3)}sách {number} ." for number in range(count)]
        graph = "(đ / đọc :agent (t / tôi) :patient (s / sách :quant {}))"
        rows = [
            to_row(
                parse_record(f"{split}-{number}", sentence, graph.format(number), file="corpus.txt", line=number + 1),
                SCHEMA,
            )
            for number, sentence in enumerate(sentences)
        ]
        write_rows(rows, folder / f"{split}.parquet", SCHEMA)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with a mixture of two experts, and a recipe that started from it."""
    workspace = tmp_path_factory.mktemp("workspace")
    base_dir = save_base(workspace / "dense", max_position_embeddings=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(params_of(base_dir))
        done("base", "llm")
        write_prepared(Path("data/prepared/visempar"))
        for recipe in EXPERTS:
            for stage in ("plan", "train", "merge"):
                done(stage, recipe)
        done("build", "moe")
        done("evaluate", "base-moe")
        for stage in ("plan", "train", "merge", "evaluate"):
            done(stage, "after")
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
    for name in EXPERTS:
        parent = lineage.parents[f"expert/{name}"]
        assert (folder / parent.path).resolve() == built / "data/runs" / name / "merged"
        assert parent.lineage == read_lineage(built / "data/runs" / name / "merged")
    certificate = json.loads((built / "data/builds/moe.json").read_text())
    assert certificate["built_digest"] == lineage.digest
    for name in EXPERTS:
        assert certificate["changes"][name]["outside"] == 0 < certificate["changes"][name]["mlp"]
        assert certificate["domains"][name]["forced_deviation"] < 1e-5
        assert sum(certificate["domains"][name]["routing"]["load"]) == pytest.approx(1)
    held = json.loads((built / "data/report/amr/memory/moe/build.json").read_text())
    assert (held["stage"], held["name"]) == ("build", "moe")
    assert 0 < held["after_load"]["used_bytes"] <= held["end"]["peak_bytes"]


def test_a_recipe_trains_all_of_a_build_but_the_shared_expert(built: Path) -> None:
    lineage = read_lineage(built / "data/runs/after/merged")
    assert lineage.parents["base"].lineage == read_lineage(built / "data/builds/moe")
    assert lineage.root() == read_lineage(built / "data/bases/llm")
    trained = load_file(built / "data/runs/after/merged/model.safetensors")
    before = load_file(built / "data/builds/moe/model.safetensors")
    assert trained.keys() == before.keys()
    unchanged = {name for name in before if trained[name].equal(before[name])}
    assert unchanged == {name for name in before if "shared_expert" in name}
    model = AutoModelForCausalLM.from_pretrained(built / "data/runs/after/merged")
    assert type(model).__name__ == "Qwen2MoeForCausalLM"


def test_experts_that_changed_more_than_mlps_are_built_with_a_warning(workspace: Path) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["builds"]["moe"]["experts"] = [{"recipe": "expert-ptr"}, {"recipe": "expert-whole"}]
    write_params(raw)
    for stage in ("plan", "train", "merge"):
        done(stage, "expert-whole")
    output = run("build", "moe").output
    assert re.search(r"expert expert-whole changed all else by \S+ of its norm, which is lost", output)
    assert "expert expert-ptr changed all else" not in output


def test_unfit_experts_are_refused_and_the_last_build_stays(workspace: Path) -> None:
    before = read_lineage(Path("data/builds/moe"))
    raw = YAML(typ="safe").load(Path("params.yaml"))
    for number, expert in enumerate(raw["builds"]["moe"]["experts"]):
        expert["domain"] = f"domain-{number}"
    write_params(raw)
    assert "expert expert-full has the domain domain-0, but task amr has none" in refused("build", "moe")
    for expert in raw["builds"]["moe"]["experts"]:
        del expert["domain"]
    write_params(raw)
    one, two = (Path("data/runs") / name / "merged" for name in EXPERTS)
    shutil.rmtree(two)
    shutil.copytree(one, two)
    assert "experts expert-full and expert-ptr are the same model" in refused("build", "moe")
    assert read_lineage(Path("data/builds/moe")) == before
    assert not Path("data/builds/.moe.partial").exists()


@pytest.mark.parametrize(
    ("damaged", "fix"),
    [("runs/expert-ptr/merged", "merge@expert-ptr"), ("bases/llm", "base@llm"), ("builds/moe", "build@moe")],
)
def test_changed_content_is_refused_with_the_stage_that_rebuilds_it(workspace: Path, damaged: str, fix: str) -> None:
    (Path("data") / damaged / "config.json").open("a").write(" ")
    for stage, name in (
        (("train", "after"), ("evaluate", "base-moe")) if damaged.startswith("builds") else (("build", "moe"),)
    ):
        assert f"rebuild it with: dvc repro -f -s {fix}" in refused(stage, name)
