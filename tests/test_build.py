"""From a dense base to experts, their mixture, its gate, and a recipe on it, by the shipped recipes on a tiny base."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.core.lineage import read_lineage
from tests.mixture.dense import save_base
from tests.stage_runs import all_the_way, done, made_up_memory, read_params, refused, small_params, write_params

pytestmark = pytest.mark.pipeline

EXPERTS = ("moe-expert-truthfulqa", "moe-expert-qmsum")
GATE_RECIPES = ("moe-gate-labels", "moe-gate")
AFTER = "moe-finetune"
GATES = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with a mixture of two experts, its gate trained by labels and by the next token, then all of it."""
    workspace = tmp_path_factory.mktemp("workspace")
    raw = small_params()
    raw["profiles"]["tiny"]["bases"]["dense"] = f"folder:{save_base(workspace / 'dense', max_position_embeddings=4096)}"
    for recipe in (*EXPERTS, *GATE_RECIPES, AFTER):
        raw["recipes"][recipe]["max_steps"] = 2
    raw["recipes"][AFTER].update(data="both-domains")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(raw)
        done("base", "dense")
        for dataset in ("truthfulqa", "qmsum", "only-truthfulqa", "only-qmsum", "both-domains"):
            done("prepare", dataset)
        with made_up_memory():
            for recipe in EXPERTS:
                for stage in ("plan", "train", "merge"):
                    done(stage, recipe)
        done("build", "moe")
        done("evaluate", "base-moe")
        for recipe in GATE_RECIPES:
            for stage in ("plan", "train", "merge"):
                done(stage, recipe)
        all_the_way(AFTER)
        done("compare", "moe")
        yield workspace


@pytest.fixture
def workspace(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A moved copy, to damage."""
    moved = tmp_path / "moved workspace"
    shutil.copytree(built, moved)
    monkeypatch.chdir(moved)
    return moved


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed(before: Path, after: Path) -> set[str]:
    one, other = weights(before), weights(after)
    assert one.keys() == other.keys()
    return {name for name in one if not one[name].equal(other[name])}


def test_a_build_is_certified_and_has_its_lineage(built: Path) -> None:
    folder = built / "data/builds/moe"
    lineage = read_lineage(folder)
    assert (lineage.kind, lineage.name) == ("built", "moe")
    assert lineage.parents.keys() == {"base", *(f"expert/{name}" for name in EXPERTS)}
    certificate = read(built / "data/builds/moe.json")
    assert certificate["built_digest"] == lineage.digest
    for name in EXPERTS:
        merged, parent = built / "data/runs" / name / "merged", lineage.parents[f"expert/{name}"]
        assert (folder / parent.path).resolve() == merged
        assert parent.lineage == read_lineage(merged)
        assert all(".mlp." in each for each in changed(built / "data/bases/dense", merged))
        assert certificate["changes"][name]["outside"] == 0 < certificate["changes"][name]["mlp"]
        assert certificate["domains"][name]["forced_deviation"] < 1e-5
        assert sum(certificate["domains"][name]["routing"]["load"]) == pytest.approx(1)
    assert all(not weights(folder)[name].any() for name in GATES)
    memory = read(built / "data/report/moe/memory/moe/build.json")
    assert 0 < memory["used_loaded_bytes"] <= memory["peak_bytes"]


def test_a_gate_is_all_that_its_recipes_change_one_after_the_other(built: Path) -> None:
    runs, before = built / "data/runs", built / "data/builds/moe"
    for recipe in GATE_RECIPES:
        assert changed(before, runs / recipe / "merged") == GATES
        before = runs / recipe / "merged"
        certificate, training = read(runs / recipe / "merge.json"), read(runs / recipe / "training/training.json")
        assert (certificate["changed_modules"], certificate["unexpected_modules"]) == (len(GATES), [])
        assert load_file(runs / recipe / "trained/weights.safetensors").keys() == GATES
        assert training["trainable"]["llm"] == training["trainable"]["total"] == 2 * 2 * 32
        predicted = read(runs / recipe / "memory.json")["prediction"]
        assert training["peak_memory_bytes"] == pytest.approx(predicted["allocated_bytes"], rel=0.01)
        curve = runs / recipe / "training/plots/metrics/train/router_accuracy.tsv"
        assert curve.is_file() == (training["router_accuracy"] is not None) == (recipe == "moe-gate-labels")


def test_a_recipe_trains_all_of_a_mixture_but_the_shared_expert_and_is_compared(built: Path) -> None:
    run_dir, base = built / "data/runs" / AFTER, built / "data/runs/moe-gate/merged"
    lineage = read_lineage(run_dir / "merged")
    assert lineage.parents["base"].lineage == read_lineage(base)
    assert [*lineage.bases()][-1] == read_lineage(built / "data/bases/dense")
    assert changed(base, run_dir / "merged") == {name for name in weights(base) if "shared_expert" not in name}
    assert type(AutoModelForCausalLM.from_pretrained(run_dir / "merged")).__name__ == "Qwen2MoeForCausalLM"
    metrics = read(run_dir / "metrics.json")
    assert metrics["perplexity"] > 1
    assert abs(metrics["memory_error"]) < 0.01
    rows = (built / "data/report/moe/table.txt").read_text().splitlines()
    assert {"base-moe", AFTER} <= {row.split()[0] for row in rows if row}


@pytest.mark.parametrize(
    ("damaged", "fix", "stages"),
    [
        ("bases/dense", "base@dense", [("build", "moe")]),
        ("builds/moe", "build@moe", [("train", "moe-gate-labels"), ("evaluate", "base-moe")]),
    ],
)
def test_changed_content_is_refused_with_the_stage_that_rebuilds_it(
    workspace: Path, damaged: str, fix: str, stages: list[tuple[str, str]]
) -> None:
    (Path("data") / damaged / "config.json").open("a").write(" ")
    for stage, name in stages:
        assert f"rebuild it with: dvc repro -f -s {fix}" in refused(stage, name)


def test_a_mixture_is_exported_and_scored_by_llama_cpp(workspace: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs llama.cpp (make setup EXTRAS='dev llamacpp')")
    raw = read_params()
    export = {"recipe": AFTER, "task": "moe", "data": "both-domains", "format": "gguf"}
    raw["exports"] = {f"moe-{kind}": {**export, "quantization": kind} for kind in ("f16", "q4_0")}
    write_params(raw)
    ours = read(Path("data/runs") / AFTER / "metrics.json")
    for name in raw["exports"]:
        done("export", name)
        assert read_lineage(Path("data/exports") / name).parents["merged"].lineage.name == AFTER
        done("evaluate", name)
    exported = read(Path("data/runs/moe-f16/metrics.json"))
    assert exported["perplexity"] == pytest.approx(ours["perplexity"], rel=1e-3)
    assert exported["samples"] == ours["samples"]
    done("compare", "moe")
    table = Path("data/report/moe/comparison.md").read_text()
    assert f"- moe-q4_0 against {AFTER}: the model of moe-q4_0 is worse" in table
    assert "| moe-f16 | " in table
    flip = Path("data/exports/moe-f16/model.gguf")
    flip.write_bytes(flip.read_bytes()[:-1] + b"!")
    assert "data/exports/moe-f16 was recorded with content" in refused("evaluate", "moe-f16")
