"""Experts by their MLPs alone, then their mixture's gate by labels and by the next token: each a run of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

from stages.core.lineage import read_lineage
from tests import ROOT
from tests.kit.mixture.dense import save_base
from tests.stage_runs import done, refused, write_params

pytestmark = pytest.mark.pipeline

EXPERTS = {"expert-facts": "facts", "expert-meetings": "meetings"}
GATES = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


def experts(*domains: str) -> list[dict[str, str]]:
    return [{"recipe": recipe, "domain": domain} for recipe, domain in zip((*EXPERTS, "third"), domains, strict=False)]


def params_of(base_dir: Path) -> dict[str, Any]:
    raw: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["bases"] = {"llm": f"folder:{base_dir}"}
    size = {"train": 8, "val": 3}
    tiny["datasets"] = {
        "facts": {"task": "moe", "source": f"folder:{ROOT / 'data/tiny/truthfulqa'}", "limit": size},
        "meetings": {"task": "moe", "source": f"folder:{ROOT / 'data/tiny/qmsum'}", "limit": size},
        "both": {"task": "moe", "source": "mix", "mix": {"facts": None, "meetings": 6}},
    }
    tiny["memory"]["micro_batch"] = 2
    tiny["evaluation"] = {"batch_size": 3, "max_new_tokens": 4, "max_length": 256}
    common = {"task": "moe", "loss": "assistant-only", "learning_rate": 1e-4, "epochs": 1, "effective_batch": 4}
    common |= {"max_length": 256, "parts": {"llm": "full"}}
    mlp = {"llm": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]}
    gate = {**common, "data": "both", "full_targets": {"llm": ["mlp.gate"]}}
    labels = {"base": "builds/moe", "loss": "router-labels"}
    raw["baselines"] = {}
    raw["recipes"] = {
        **{name: {**common, "base": "bases/llm", "data": data, "full_targets": mlp} for name, data in EXPERTS.items()},
        "gate-labels": {**gate, **labels},
        "gate": {**gate, "base": "runs/gate-labels/merged"},
    }
    raw["builds"] = {"moe": {"task": "moe", "base": "bases/llm", "experts": experts("truthfulqa", "qmsum")}}
    raw.pop("predictions", None)
    return raw


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    workspace = tmp_path_factory.mktemp("workspace")
    base_dir = save_base(workspace / "dense", max_position_embeddings=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(params_of(base_dir))
        done("base", "llm")
        for dataset in ("facts", "meetings", "both"):
            done("prepare", dataset)
        for recipe in EXPERTS:
            for stage in ("plan", "train", "merge"):
                done(stage, recipe)
        done("build", "moe")
        for recipe in ("gate-labels", "gate"):
            for stage in ("plan", "train", "merge"):
                done(stage, recipe)
        done("evaluate", "gate")
        yield workspace


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed(before: Path, after: Path) -> set[str]:
    one, other = weights(before), weights(after)
    assert one.keys() == other.keys()
    return {name for name in one if not one[name].equal(other[name])}


def test_experts_change_their_mlps_and_a_mixture_has_them_whole(finished: Path) -> None:
    for name in EXPERTS:
        assert all(".mlp." in each for each in changed(Path("data/bases/llm"), Path("data/runs") / name / "merged"))
        assert read(Path("data/runs") / name / "merge.json")["changed_modules"] == 2 * 3
    certificate = read(Path("data/builds/moe.json"))
    assert {change["outside"] for change in certificate["changes"].values()} == {0}
    assert all(not weights(Path("data/builds/moe"))[name].any() for name in GATES)
    assert max(domain["forced_deviation"] for domain in certificate["domains"].values()) < 1e-5


def test_a_gate_is_all_that_its_recipes_change_one_after_the_other(finished: Path) -> None:
    built, labelled, trained = (
        Path("data") / folder for folder in ("builds/moe", "runs/gate-labels/merged", "runs/gate/merged")
    )
    assert changed(built, labelled) == changed(labelled, trained) == GATES
    for recipe in ("gate-labels", "gate"):
        certificate = read(Path("data/runs") / recipe / "merge.json")
        assert (certificate["changed_modules"], certificate["unexpected_modules"]) == (len(GATES), [])
        assert load_file(Path("data/runs") / recipe / "trained/weights.safetensors").keys() == GATES
    assert read_lineage(trained).root() == read_lineage(Path("data/bases/llm"))


def test_what_a_gate_takes_is_foreseen_and_how_well_it_chooses_is_recorded(finished: Path) -> None:
    for recipe in ("gate-labels", "gate"):
        run_dir = Path("data/runs") / recipe
        training = read(run_dir / "training/training.json")
        assert training["trainable"]["llm"] == training["trainable"]["total"] == 2 * 2 * 32
        assert training["peak_memory_bytes"] / 2**30 == pytest.approx(
            read(run_dir / "memory.json")["allocated_gib"], rel=0.01
        )
        curve = run_dir / "training/plots/metrics/train/router_accuracy.tsv"
        assert curve.is_file() == (recipe == "gate-labels")
        assert (training["router_accuracy"] is not None) == (recipe == "gate-labels")
    # With labels nothing is kept for a backward pass.
    taken = {recipe: read(Path(f"data/runs/{recipe}/memory.json"))["budget_gib"] for recipe in ("gate-labels", "gate")}
    assert taken["gate-labels"]["activations"] < taken["gate"]["activations"]


@pytest.mark.parametrize(
    ("domains", "problem"),
    [
        (("truthfulqa", "meetings"), "both has 6 of 14 training samples of the domain qmsum"),
        (("truthfulqa", "qmsum", "more"), "both has no training sample of the domain more"),
    ],
)
def test_labels_that_the_experts_do_not_have_are_refused_before_anything_is_launched(
    finished: Path, domains: tuple[str, ...], problem: str
) -> None:
    before = Path("params.yaml").read_text()
    raw = params_of(Path("dense"))
    raw["recipes"]["third"] = raw["recipes"]["expert-facts"]
    raw["builds"]["moe"]["experts"] = experts(*domains)
    plan = Path("data/runs/gate-labels/plan.yaml").read_text()
    write_params(raw)
    try:
        assert problem in refused("plan", "gate-labels")
    finally:
        Path("params.yaml").write_text(before)
    assert Path("data/runs/gate-labels/plan.yaml").read_text() == plan


def test_a_bleurt_that_cannot_measure_is_refused_before_anything_is_answered(finished: Path) -> None:
    Path("data/bleurt").mkdir()
    try:
        said = refused("evaluate", "gate")
    finally:
        Path("data/bleurt").rmdir()
    assert "data/bleurt: " in said
    assert "config.json of a BERT" in said
    assert "answered" not in said
