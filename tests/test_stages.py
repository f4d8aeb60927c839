"""All stages in a row, as the pipeline runs them, on the smallest model: chaining, certificates, refusals."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from ruamel.yaml import YAML
from safetensors.torch import load_file

from stages.core.lineage import read_lineage, true_base, verified_lineage, write_lineage
from stages.core.publish import publish_json
from stages.kit.memory.calibration import load_calibration
from stages.kit.models.certificate import read_certificate
from stages.kit.models.folders import remove_weights, weight_files
from tests import ROOT
from tests.documents import write_yaml

pytestmark = pytest.mark.pipeline


def run(stage: str, name: str) -> Result:
    return CliRunner().invoke(import_module(f"stages.{stage}").main, [name])


def done(stage: str, name: str) -> None:
    result = run(stage, name)
    assert result.exit_code == 0, result.output + str(result.exc_info)


def refused(stage: str, name: str) -> str:
    """The message of a stage that stops as a user's fault does: exit 1, no traceback."""
    result = run(stage, name)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    return result.output


def write_params(raw: dict[str, Any]) -> None:
    write_yaml(raw, Path("params.yaml"))


def small_params(tiny_vlm: Path) -> dict[str, Any]:
    """The shipped parameters, with less of everything."""
    raw: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["bases"]["vlm"] = f"folder:{tiny_vlm}"
    for dataset in tiny["datasets"].values():
        dataset["source"] = dataset["source"].replace("folder:", f"folder:{ROOT}/")
    tiny["datasets"]["nutrition-tables"]["limit"] = {"train": 10, "val": 5}
    tiny["images"] = {"min_pixels": 3136, "max_pixels": 12544}
    tiny["memory"]["micro_batch"] = 2
    tiny["evaluation"] = {"batch_size": 3, "max_new_tokens": 8}
    for recipe in raw["recipes"].values():
        recipe.update(effective_batch=4, epochs=1)
    return raw


@pytest.fixture(scope="module")
def finished(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace in which r1, and r3 in its two stages, went all the way."""
    workspace = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        write_params(small_params(tiny_vlm))
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        done("evaluate", "base-vlm")
        for recipe in ("r1-llm-only", "r2-vision-only", "r3-two-stage"):
            for stage in ("plan", "train", "merge", "evaluate"):
                done(stage, recipe)
        done("compare", "detection")
        yield workspace


@pytest.fixture
def workspace(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A moved copy of the finished workspace, to damage."""
    moved = tmp_path / "moved workspace"
    shutil.copytree(finished, moved)
    monkeypatch.chdir(moved)
    return moved


def test_a_run_leaves_what_others_rely_on(finished: Path) -> None:
    for name in ("base-vlm", "r1-llm-only", "r3-two-stage"):
        run_dir = finished / "data/runs" / name
        metrics = json.loads((run_dir / "metrics.json").read_text())
        assert metrics["samples"] == 5
        for figure in (
            *("mean_iou", "median_iou", "min_iou", "max_iou", "detection_rate", "iou_over_50", "iou_over_70"),
            *("parse_failure_rate", "map_50_95", "samples_per_second"),
        ):
            assert isinstance(metrics[figure], int | float), figure
        assert pq.read_table(run_dir / "predictions.parquet").num_rows == 5
        assert {path.name.split("-")[0] for path in (run_dir / "examples").iterdir()} == {"best", "worst", "random"}
    training = json.loads((finished / "data/runs/r1-llm-only/training/training.json").read_text())
    assert training["num_steps"] == 3
    assert training["peak_memory_bytes"] > 0
    assert (finished / "data/runs/r1-llm-only/training/plots/metrics/train/loss.tsv").is_file()
    assert (finished / "data/report/detection/index.html").is_file()


def test_every_stage_that_loads_a_model_says_what_it_held(finished: Path) -> None:
    memory_dir = finished / "data/report/detection/memory"
    recipes = dict.fromkeys(("r1-llm-only", "r2-vision-only", "r3-two-stage"), ("evaluate", "merge", "train"))
    stages = {"base-vlm": ("evaluate",), **recipes}
    assert sorted(memory_dir.rglob("*.json")) == [
        memory_dir / name / f"{stage}.json" for name in stages for stage in stages[name]
    ]
    for path in memory_dir.rglob("*.json"):
        held = json.loads(path.read_text())
        assert (held["kind"], held["name"], held["stage"]) == ("cpu_resident", path.parent.name, path.stem)
        assert 0 < held["before_load"]["used_bytes"] <= held["end"]["peak_bytes"]
        assert held["after_load"]["used_bytes"] <= held["end"]["peak_bytes"] < held["end"]["total_bytes"]


def test_a_plan_says_what_its_training_will_take_and_the_measure_agrees(finished: Path) -> None:
    for recipe in ("r1-llm-only", "r2-vision-only", "r3-two-stage"):
        run_dir = finished / "data/runs" / recipe
        planned = json.loads((run_dir / "memory.json").read_text())
        metrics = json.loads((run_dir / "metrics.json").read_text())
        training = json.loads((run_dir / "training/training.json").read_text())
        assert (planned["verdict"], planned["usable_gib"], planned["changes"]) == ("fits", None, [])
        assert planned["calibration"] == "this CPU"
        assert sum(planned["budget_gib"].values()) == pytest.approx(planned["total_gib"], abs=1e-5)
        assert metrics["memory_predicted_gib"] == planned["allocated_gib"]
        assert metrics["memory_measured_gib"] == pytest.approx(training["peak_memory_bytes"] / 2**30, abs=1e-6)
        assert abs(metrics["memory_error"]) < 0.01, recipe
    baseline = json.loads((finished / "data/runs/base-vlm/metrics.json").read_text())
    assert not [figure for figure in baseline if figure.startswith("memory")]


def test_recipes_without_a_result_are_named_in_the_report(finished: Path) -> None:
    text = (finished / "data/report/detection/comparison.md").read_text()
    assert "r4-joint" in text
    assert "dvc repro" in text


def test_stage_2_was_trained_on_the_result_of_stage_1(finished: Path) -> None:
    runs = finished / "data/runs"
    lineage = read_lineage(runs / "r3-two-stage/merged")
    assert lineage.parents["base"].lineage == read_lineage(runs / "r2-vision-only/merged")
    assert lineage.root() == read_lineage(finished / "data/bases/vlm")
    assert true_base(runs / "r3-two-stage/trained") == runs / "r2-vision-only/merged"


def test_a_merged_folder_loads_with_plain_transformers(finished: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    folder = finished / "data/runs/r3-two-stage/merged"
    model, loaded = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "Qwen2VLForConditionalGeneration"
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert json.loads((folder / "processor_config.json").read_text())["processor_class"] == "Qwen2VLProcessor"


def test_a_moved_workspace_goes_on_and_nothing_that_others_start_from_changes(workspace: Path) -> None:
    """What a merge held differs each time, and must not make an evaluation run anew."""
    run_dir = workspace / "data/runs/r3-two-stage"
    certificate, memory = run_dir / "merge.json", workspace / "data/report/detection/memory/r3-two-stage/merge.json"
    before = certificate.read_bytes(), read_lineage(run_dir / "merged").digest
    memory.unlink()
    done("merge", "r3-two-stage")
    assert (certificate.read_bytes(), read_lineage(run_dir / "merged").digest) == before
    assert memory.is_file()
    done("evaluate", "r3-two-stage")


def test_a_certificate_names_the_quantization_that_training_used_and_not_the_planned_one(workspace: Path) -> None:
    """They differ where memory ran out."""
    path = workspace / "data/runs/r1-llm-only/training/training.json"
    record = json.loads(path.read_text())
    assert (record["attempt"], record["quantization"]) == (0, "nf4")
    path.write_text(json.dumps({**record, "quantization": "none"}))
    done("merge", "r1-llm-only")
    certificate = read_certificate(workspace / "data/runs/r1-llm-only/merge.json", "r1-llm-only")
    assert (certificate.trained_quantization, certificate.quantization_cost) == ("none", None)


def test_a_merge_out_of_4_bits_says_what_it_costs_and_the_report_shows_it(finished: Path) -> None:
    for recipe, quantization in (("r1-llm-only", "nf4"), ("r2-vision-only", "none"), ("r3-two-stage", "nf4")):
        certificate = read_certificate(finished / "data/runs" / recipe / "merge.json", recipe)
        cost = certificate.quantization_cost
        assert certificate.trained_quantization == quantization
        if quantization == "none":
            assert cost is None
            continue
        assert cost is not None
        # The merge itself is exact. Quantization moved the base's logits, more than so short a training did.
        assert cost.logit_deviation is not None
        assert certificate.logit_deviation < 1e-3 < 0.01 < cost.logit_deviation
        assert 0 <= cost.same_answers <= cost.samples == 5
        # Nothing but the number of samples limits what is asked: merge and evaluation answer alike.
        evaluated = json.loads((finished / "data/runs" / recipe / "metrics.json").read_text())
        assert cost.merged == {key: evaluated[key] for key in cost.merged}
        assert cost.trained.keys() == cost.merged.keys()
    table = (finished / "data/report/detection/table.txt").read_text()
    assert "Mean IoU as trained" in table
    assert "Merged out of 4 bits" in (finished / "data/report/detection/index.html").read_text()
    assert "## Merged out of 4 bits" in (finished / "data/report/detection/comparison.md").read_text()


def test_what_a_merge_out_of_4_bits_costs_is_seen_by_its_answers(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merged model that answers other things than the trained one did must not look the same."""
    answers = iter([["as merged"] * 5, ["as trained"] * 4 + ["as merged"]])
    monkeypatch.setattr("stages.kit.evaluation.answer.generate_answers", lambda *_, **__: next(answers))
    done("merge", "r1-llm-only")
    cost = read_certificate(workspace / "data/runs/r1-llm-only/merge.json", "r1-llm-only").quantization_cost
    assert cost is not None
    assert (cost.samples, cost.same_answers) == (5, 1)


def test_an_adapter_is_never_merged_into_another_base(workspace: Path) -> None:
    """The r3 accident: the base under the plan's path is not the one that stage 2 was trained on."""
    merged = workspace / "data/runs/r2-vision-only/merged"
    shutil.rmtree(merged)
    shutil.copytree(workspace / "data/bases/vlm", merged)
    wanted = read_lineage(workspace / "data/runs/r3-two-stage/trained").parents["base"].lineage.digest
    message = refused("merge", "r3-two-stage")
    assert f"trained on base {wanted[:12]}" in message
    assert f"holds {read_lineage(merged).digest[:12]}" in message


def test_a_damaged_base_is_refused_before_training(workspace: Path) -> None:
    weights = workspace / "data/bases/vlm/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    message = refused("train", "r1-llm-only")
    assert "data/bases/vlm was recorded with content" in message
    assert "dvc repro -f -s base@vlm" in message


def test_what_was_not_certified_is_not_evaluated(workspace: Path) -> None:
    run_dir = workspace / "data/runs/r1-llm-only"
    shutil.rmtree(run_dir / "merged")
    shutil.copytree(workspace / "data/bases/vlm", run_dir / "merged")
    write_lineage(run_dir / "merged", kind="merged", name="r1-llm-only")
    assert "merge.json certifies" in refused("evaluate", "r1-llm-only")
    (run_dir / "merge.json").unlink()
    assert "merge.json is missing; rebuild it with: dvc repro merge@r1-llm-only" in refused("evaluate", "r1-llm-only")


def without_merged_models() -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["models"]["keep_merged"] = False
    write_params(raw)


def test_a_merge_that_keeps_no_weights_is_evaluated_to_the_same_answers(workspace: Path) -> None:
    run_dir = workspace / "data/runs/r1-llm-only"
    kept = read_certificate(run_dir / "merge.json", "r1-llm-only")
    before = (run_dir / "predictions.parquet").read_bytes()
    without_merged_models()
    done("merge", "r1-llm-only")
    assert {"config.json", "tokenizer.json", "lineage.json"} <= {path.name for path in (run_dir / "merged").iterdir()}
    assert not list((run_dir / "merged").glob("*.safetensors*"))
    lineage = verified_lineage(run_dir / "merged", fix="")
    certificate = read_certificate(run_dir / "merge.json", "r1-llm-only")
    assert certificate == replace(kept, merged_digest=lineage.digest)
    (run_dir / "predictions.parquet").unlink()
    done("evaluate", "r1-llm-only")
    assert (run_dir / "predictions.parquet").read_bytes() == before

    # What is merged again is the certified model, or nothing is evaluated.
    publish_json(replace(certificate, weights_digest="0" * 64), run_dir / "merge.json")
    assert "but 000000000000 were certified" in refused("evaluate", "r1-llm-only")
    publish_json(certificate, run_dir / "merge.json")
    adapter = run_dir / "trained/adapter/adapter_model.safetensors"
    content = bytearray(adapter.read_bytes())
    content[-1] ^= 1
    adapter.write_bytes(content)
    assert "trained was recorded with content" in refused("evaluate", "r1-llm-only")


def test_a_merge_that_others_start_from_keeps_its_weights_and_one_that_did_not_is_refused(workspace: Path) -> None:
    without_merged_models()
    digest = read_lineage(workspace / "data/runs/r2-vision-only/merged").digest
    done("merge", "r2-vision-only")
    assert read_lineage(workspace / "data/runs/r2-vision-only/merged").digest == digest
    remove_weights(workspace / "data/runs/r2-vision-only/merged")
    message = refused("plan", "r3-two-stage")
    assert "data/runs/r2-vision-only/merged has no weights" in message
    assert "dvc repro -f -s merge@r2-vision-only" in message


def test_a_failed_training_leaves_the_last_result_alone(workspace: Path) -> None:
    before = read_lineage(workspace / "data/runs/r1-llm-only/trained")
    plan = workspace / "data/runs/r1-llm-only/plan.yaml"
    plan.write_text(plan.read_text().replace("max_length: 2048", "max_length: 9"))
    assert "more than max_length 9" in refused("train", "r1-llm-only")
    assert read_lineage(workspace / "data/runs/r1-llm-only/trained") == before
    assert not list((workspace / "data/runs/r1-llm-only").glob(".*partial"))


def test_two_processes_share_the_effective_batch(workspace: Path) -> None:
    """For real, on two CPU processes: the launch, the one writer, the same number of steps.

    With ddp: test_interrupted.py, test_running_out.py; its steps: kit/memory/test_step.py.
    """
    recipe, weights = "r2-vision-only", "weights.safetensors"
    raw = YAML(typ="safe").load(Path("params.yaml"))
    raw["profiles"]["tiny"]["device"]["count"] = 2
    raw["profiles"]["tiny"]["memory"] |= {"placement": "sharded", "quantization": "none"}
    raw["recipes"][recipe]["max_steps"] = 2
    one = {**raw["profiles"]["tiny"], "device": {"kind": "cpu"}}
    one["memory"] = {**one["memory"], "placement": "single"}
    write_params({**raw, "profiles": {"tiny": one}})
    done("plan", recipe)
    done("train", recipe)
    run_dir = Path("data/runs") / recipe
    alone = load_file(run_dir / "trained" / weights)

    write_params(raw)
    done("plan", recipe)
    command = [sys.executable, "-m", "stages.train", recipe]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    log = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stderr
    assert log.count(f"trained {recipe}") == 1
    training = json.loads((run_dir / "training/training.json").read_text())
    assert training["num_steps"] == 2
    together = load_file(run_dir / "trained" / weights)
    assert together.keys() == alone.keys()
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=2e-5)
    assert verified_lineage(run_dir / "trained", fix="").name == recipe
    done("merge", recipe)

    raw["profiles"]["tiny"]["device"] |= {"count": 1, "nodes": 2}
    write_params(raw)
    done("plan", recipe)
    assert "a training over 2 nodes is started on each of them" in refused("train", recipe)
    before = (run_dir / "trained" / weights).read_bytes()
    (run_dir / "trained" / weights).unlink()
    environment |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(command, env={**environment, "PET_NODE_RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    logs = [node.communicate()[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    assert [log.count(f"trained {recipe}") for log in logs] == [1, 0]
    assert (run_dir / "trained" / weights).read_bytes() == before


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port: int = listening.getsockname()[1]
        return port


@pytest.fixture
def on_a_tiny_gpu(workspace: Path) -> dict[str, Any]:
    """Parameters of a profile whose GPU has hardly any memory, to be written once memory.fit is set."""
    raw: dict[str, Any] = YAML(typ="safe").load(Path("params.yaml"))
    tiny = raw["profiles"]["tiny"]
    tiny["device"] = {"kind": "cuda", "count": 1, "memory_gb": 0.001}
    # All but the last rung of the ladder is taken already: each takes a prediction of its own.
    tiny["memory"] |= {"precision": "bf16", "quantization": None, "attn": "auto"}
    tiny["memory"] |= {"gradient_checkpointing": True, "optimizer": "paged_adamw_8bit"}
    # With features and without padding a micro-batch is too small to matter.
    tiny["memory"] |= {"features_gb": 0, "padding_free": "off"}
    (workspace / "data/runs/r1-llm-only/plan.yaml").unlink()
    return raw


def planned(raw: dict[str, Any], fit: str, *, memory_gb: float = 0.001) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan and the memory record of r1 under this memory.fit."""
    raw["profiles"]["tiny"]["memory"]["fit"] = fit
    raw["profiles"]["tiny"]["device"]["memory_gb"] = memory_gb
    write_params(raw)
    done("plan", "r1-llm-only")
    run_dir = Path("data/runs/r1-llm-only")
    return YAML(typ="safe").load(run_dir / "plan.yaml"), json.loads((run_dir / "memory.json").read_text())


def test_a_recipe_that_does_not_fit_is_refused_with_its_budget(on_a_tiny_gpu: dict[str, Any]) -> None:
    write_params(on_a_tiny_gpu)
    message = refused("plan", "r1-llm-only")
    for line in (
        "recipe r1-llm-only does not fit the GPU of profile tiny:",
        "H overhead",
        "verdict   does not fit",
        "the least is with micro_batch 2 -> 1, grad_accumulation 2 -> 4: 0.",
        "dvc exp run -S ++profiles.tiny.memory.fit=off",
    ):
        assert line in message, line
    assert not Path("data/runs/r1-llm-only/plan.yaml").exists()


def test_memory_fit_off_goes_on_and_auto_takes_the_cheapest_change_that_fits(on_a_tiny_gpu: dict[str, Any]) -> None:
    usable_share = load_calibration().usable_share.value
    plan, record = planned(on_a_tiny_gpu, "off")
    assert (plan["schedule"]["micro_batch"], plan["schedule"]["grad_accumulation"]) == (2, 2)
    assert (record["verdict"], record["changes"]) == ("does not fit", [])
    assert record["calibration"] == "assumed"
    assert record["total_gib"] > record["reserved_gib"] > record["allocated_gib"]

    # Just too little for the plan as it is, even at the lower end of what is expected.
    memory_gb = record["low_gib"] / usable_share * 0.9999
    plan, changed = planned(on_a_tiny_gpu, "auto", memory_gb=memory_gb)
    assert changed["verdict"] in ("fits", "too close")
    assert changed["changes"] == ["micro_batch 2 -> 1", "grad_accumulation 2 -> 4"]
    assert changed["total_gib"] < record["total_gib"]
    assert (plan["schedule"]["micro_batch"], plan["schedule"]["grad_accumulation"]) == (1, 4)

    roomy, record = planned(on_a_tiny_gpu, "refuse", memory_gb=24)
    assert (record["verdict"], record["changes"], roomy["schedule"]["micro_batch"]) == ("fits", [], 2)


def test_what_cannot_be_trained_is_refused_while_it_is_planned(workspace: Path) -> None:
    raw = YAML(typ="safe").load(Path("params.yaml"))
    recipe = raw["recipes"]["r1-llm-only"]
    recipe["max_length"] = 9
    write_params(raw)
    assert "more than max_length 9" in refused("plan", "r1-llm-only")
    recipe.update(max_length=2048, effective_batch=1)
    write_params(raw)
    assert "effective_batch is 1, which is not a multiple of micro_batch 2" in refused("plan", "r1-llm-only")


def test_a_disk_that_fills_up_leaves_no_half_of_a_base(
    tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills_up(_source: Path, target: Path) -> None:
        target.write_bytes(b"0")
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.chdir(tmp_path)
    write_params(small_params(tiny_vlm))
    monkeypatch.setattr("stages.kit.models.folders.shutil.copyfile", fills_up)
    assert isinstance(run("base", "vlm").exception, OSError)
    assert list(Path("data/bases").iterdir()) == []


def test_a_large_merged_model_is_the_same_in_several_files(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = Path("data/runs/r2-vision-only")
    assert weight_files(run_dir / "merged") == {"model.safetensors"}
    certified = read_certificate(run_dir / "merge.json", "r2-vision-only")
    monkeypatch.setattr("stages.kit.models.merge.MAX_SHARD_SIZE", "300KB")
    done("merge", "r2-vision-only")
    assert len(weight_files(run_dir / "merged")) > 1
    again = read_certificate(run_dir / "merge.json", "r2-vision-only")
    assert again.weights_digest == certified.weights_digest
    assert again.merged_digest == verified_lineage(run_dir / "merged", fix="").digest != certified.merged_digest
    done("evaluate", "r2-vision-only")


@pytest.mark.parametrize(
    ("stage", "name", "message"),
    [
        ("base", "vml", "no base of profile tiny is called 'vml' (did you mean 'vlm'?)"),
        ("prepare", "tables", "no dataset of profile tiny is called 'tables'"),
        ("build", "mo", "no build is called 'mo' (did you mean 'moe'?)"),
        ("plan", "r1", "no recipe is called 'r1'"),
        ("train", "r4-joint", "dvc repro -f -s plan@r4-joint"),
        ("merge", "r4-joint", "dvc repro -f -s plan@r4-joint"),
        ("evaluate", "r4-joint", "data/runs/r4-joint/merged is not there; make it with: dvc repro merge@r4-joint"),
        ("evaluate", "base-text", "no recipe or baseline is called 'base-text'"),
        ("compare", "detecting", "detecting"),
    ],
)
def test_a_name_or_step_that_is_missing_is_named(workspace: Path, stage: str, name: str, message: str) -> None:
    assert message in " ".join(refused(stage, name).split())
