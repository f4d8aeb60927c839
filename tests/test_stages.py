"""All stages of the detection recipes, as the pipeline runs them, on the smallest model: chaining, certificates,
refusals."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from ruamel.yaml import YAML
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

import stages.train
from stages.core.errors import UserError
from stages.core.lineage import read_lineage, true_base, verified_lineage, write_lineage
from stages.models.certificate import MergeCertificate
from stages.models.folders import remove_weights, weight_files
from stages.planning.plan import read_plan
from stages.train import read_base, read_inputs
from tests.damage import flip
from tests.memory.test_fit import predicted
from tests.stage_runs import (
    ANSWER_TOKENS,
    all_the_way,
    done,
    made,
    made_up_memory,
    read_params,
    refused,
    small_params,
    write_params,
)
from tests.training.two_processes import run_two

pytestmark = pytest.mark.pipeline

RECIPES = {"r1-llm-only": "nf4", "r2-vision-only": "none", "r3-two-stage": "nf4"}
"""With the quantization that they are trained on. Stage 2 of r3 learns by DoRA and LoRA+."""
MOVED = "moved workspace"


@pytest.fixture(scope="module")
def finished(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace in which the base was evaluated, and r1 and r3 in its two stages went all the way."""
    workspace = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        raw = small_params(tiny_vlm)
        raw["recipes"]["r3-two-stage"]["lora"] |= {"dora": True, "loraplus_lr_ratio": 4.0}
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        done("evaluate", "base-vlm")
        for recipe in RECIPES:
            all_the_way(recipe)
        done("compare", "detection")
        yield workspace


@pytest.fixture
def workspace(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A moved copy of the finished workspace, to damage."""
    moved = tmp_path / MOVED
    shutil.copytree(finished, moved)
    monkeypatch.chdir(moved)
    return moved


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_run_leaves_its_metrics_predictions_examples_curves_and_report(finished: Path) -> None:
    for name in ("base-vlm", *RECIPES):
        run_dir = finished / "data/runs" / name
        metrics = read(run_dir / "metrics.json")
        assert metrics["samples"] == 5
        for figure in (
            *("mean_iou", "median_iou", "min_iou", "max_iou", "detection_rate", "iou_over_50", "iou_over_70"),
            *("parse_failure_rate", "map_50_95", "samples_per_second"),
        ):
            assert isinstance(metrics[figure], int | float), figure
        assert pq.read_table(run_dir / "predictions.parquet").num_rows == 5
        failures = {
            name.removeprefix("failure_") for name, value in metrics.items() if value and name.startswith("failure_")
        }
        shown = {path.name.split("-")[0] for path in (run_dir / "examples").iterdir()}
        assert shown == {"best", "worst", "random", *failures}
    training_dir = finished / "data/runs/r1-llm-only/training"
    assert read(training_dir / "training.json")["num_steps"] == 3
    assert len((training_dir / "trace.csv").read_text().splitlines()) == 1 + 3
    assert (training_dir / "plots/metrics/train/loss.tsv").is_file()
    assert "Validation score by optimizer step" in (finished / "data/report/detection/index.html").read_text()
    text = (finished / "data/report/detection/comparison.md").read_text()
    assert "dvc repro evaluate@r4-joint" in text  # which has no result


def test_a_baseline_in_16_bits_is_evaluated_in_two_batch_sizes(workspace: Path) -> None:
    raw = read_params()
    raw["profiles"]["tiny"]["memory"]["precision"] = "bf16"
    write_params(raw)
    done("evaluate", "base-vlm")
    metrics = read(workspace / "data/runs/base-vlm/metrics.json")
    assert (metrics["rebatched_batch_size"], 0 <= metrics["rebatched_changed"] <= 1) == (1, True)
    assert 0 <= metrics["rebatched_mean_iou"] <= 1
    done("compare", "detection")
    text = (workspace / "data/report/detection/table.txt").read_text()
    assert "In batches of half the size," in text
    assert "rebatched" not in (workspace / "data/runs/r1-llm-only/metrics.json").read_text()


def test_the_predicted_memory_is_the_measured_one(finished: Path) -> None:
    for recipe in RECIPES:
        run_dir = finished / "data/runs" / recipe
        planned, metrics = read(run_dir / "memory.json"), read(run_dir / "metrics.json")
        measured_bytes = read(run_dir / "training/training.json")["peak_memory_bytes"]
        assert (planned["verdict"], planned["usable_bytes"], planned["changes"]) == ("fits", None, [])
        predicted_bytes = planned["prediction"]["allocated_bytes"]
        assert metrics["memory_predicted_gib"] == pytest.approx(predicted_bytes / 2**30, abs=1e-6)
        assert metrics["memory_measured_gib"] == pytest.approx(measured_bytes / 2**30, abs=1e-6)
        assert abs(metrics["memory_error"]) < 0.01, recipe


def test_an_adapter_that_starts_as_a_part_of_its_base_goes_all_the_way(workspace: Path) -> None:
    """On what stage 1 trained. What is saved is an adapter for the base as it is, with plain PEFT."""
    recipe, raw = "r3-two-stage", read_params()
    raw["recipes"][recipe]["quantization"] = "none"
    raw["recipes"][recipe]["lora"] |= {"rank": 8, "init": "pissa", "dora": False, "rslora": True}
    write_params(raw)
    all_the_way(recipe)
    run_dir, base_dir = workspace / "data/runs" / recipe, workspace / "data/runs/r2-vision-only/merged"
    assert abs(read(run_dir / "metrics.json")["memory_error"]) < 0.01
    assert MergeCertificate.read(run_dir / "merge.json", fix="").logit_deviation < 1e-3
    kind = AutoModelForImageTextToText.from_pretrained
    merged = PeftModel.from_pretrained(kind(base_dir), run_dir / "trained/adapter").merge_and_unload().state_dict()
    before = kind(base_dir).state_dict()
    changed = {name for name, tensor in kind(run_dir / "merged").state_dict().items() if tensor.ne(before[name]).any()}
    assert len(changed) == MergeCertificate.read(run_dir / "merge.json", fix="").changed_modules
    for name, tensor in kind(run_dir / "merged").state_dict().items():
        torch.testing.assert_close(merged[name], tensor)


def test_stage_2_was_trained_on_the_result_of_stage_1(finished: Path) -> None:
    runs = finished / "data/runs"
    lineage = read_lineage(runs / "r3-two-stage/merged")
    assert lineage.parents["base"].lineage == read_lineage(runs / "r2-vision-only/merged")
    assert [*lineage.bases()][-1] == read_lineage(finished / "data/bases/vlm")
    assert true_base(runs / "r3-two-stage/trained") == runs / "r2-vision-only/merged"


def test_a_merged_folder_loads_with_plain_transformers(finished: Path) -> None:
    folder = finished / "data/runs/r3-two-stage/merged"
    model, loaded = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "Qwen2VLForConditionalGeneration"
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert read(folder / "processor_config.json")["processor_class"] == "Qwen2VLProcessor"


def test_a_moved_workspace_goes_on_and_a_second_merge_changes_no_input_of_others(workspace: Path) -> None:
    """A merge's memory differs each time, and must not make an evaluation run again."""
    run_dir = workspace / "data/runs/r3-two-stage"
    certificate, memory = run_dir / "merge.json", workspace / "data/report/detection/memory/r3-two-stage/merge.json"
    before = certificate.read_bytes(), read_lineage(run_dir / "merged").digest
    memory.unlink()
    done("merge", "r3-two-stage")
    assert (certificate.read_bytes(), read_lineage(run_dir / "merged").digest) == before
    assert memory.is_file()
    done("evaluate", "r3-two-stage")


def test_a_merge_out_of_4_bits_records_its_cost_and_the_report_shows_it(finished: Path) -> None:
    for recipe, quantization in RECIPES.items():
        certificate = MergeCertificate.read(finished / "data/runs" / recipe / "merge.json", fix="")
        cost = certificate.quantization_cost
        assert certificate.trained_quantization == quantization
        if quantization == "none":
            assert cost is None
            continue
        assert cost is not None
        # The merge itself is exact. Quantization moved the base's logits, more than so short a training did.
        assert cost.logit_deviation is not None
        assert certificate.logit_deviation < 1e-3 < 0.01 < cost.logit_deviation
        assert 0 <= cost.same_completions <= cost.samples == 5
        # Merge and evaluation generate the same completions.
        evaluated = read(finished / "data/runs" / recipe / "metrics.json")
        assert cost.merged == {key: evaluated[key] for key in cost.merged}
        assert cost.trained.keys() == cost.merged.keys()
    report_dir = finished / "data/report/detection"
    assert "Mean IoU as trained" in (report_dir / "table.txt").read_text()
    for page in ("index.html", "comparison.md"):
        assert "Merged out of 4 bits" in (report_dir / page).read_text()


def test_an_adapter_is_never_merged_into_another_base(workspace: Path) -> None:
    """The r3 accident: the base under the plan's path is not the one that stage 2 was trained on."""
    merged = workspace / "data/runs/r2-vision-only/merged"
    shutil.rmtree(merged)
    shutil.copytree(workspace / "data/bases/vlm", merged)
    wanted = read_lineage(workspace / "data/runs/r3-two-stage/trained").parents["base"].lineage.digest
    message = refused("merge", "r3-two-stage")
    assert wanted[:12] in message
    assert read_lineage(merged).digest[:12] in message


def test_a_damaged_base_is_refused_by_the_first_process(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = read_lineage(workspace / "data/bases/vlm")
    flip(workspace / "data/bases/vlm/model.safetensors")
    message = refused("train", "r1-llm-only")
    assert "data/bases/vlm was recorded with content" in message
    assert "dvc repro -f -s base@vlm" in message
    with pytest.raises(UserError):
        read_base("data/bases/vlm")
    monkeypatch.setenv("RANK", "1")  # the files are read by one process of several
    assert read_base("data/bases/vlm") == recorded


def test_what_was_not_certified_is_not_evaluated(workspace: Path) -> None:
    run_dir = workspace / "data/runs/r1-llm-only"
    shutil.rmtree(run_dir / "merged")
    shutil.copytree(workspace / "data/bases/vlm", run_dir / "merged")
    write_lineage(run_dir / "merged", kind="merged", name="r1-llm-only")
    assert "merge.json certifies" in refused("evaluate", "r1-llm-only")
    (run_dir / "merge.json").unlink()
    assert "dvc repro -f -s merge@r1-llm-only" in refused("evaluate", "r1-llm-only")


def without_merged_models() -> None:
    raw = read_params()
    raw["models"]["keep_merged"] = False
    write_params(raw)


def test_a_merge_without_weights_is_evaluated_to_the_same_predictions(workspace: Path) -> None:
    run_dir = workspace / "data/runs/r1-llm-only"
    kept = MergeCertificate.read(run_dir / "merge.json", fix="")
    before = (run_dir / "predictions.parquet").read_bytes()
    without_merged_models()
    done("merge", "r1-llm-only")
    assert not list((run_dir / "merged").glob("*.safetensors*"))
    lineage = verified_lineage(run_dir / "merged", fix="")
    certificate = MergeCertificate.read(run_dir / "merge.json", fix="")
    assert certificate == replace(kept, merged_digest=lineage.digest)
    (run_dir / "predictions.parquet").unlink()
    done("evaluate", "r1-llm-only")
    assert (run_dir / "predictions.parquet").read_bytes() == before

    # A second merge gives the certified model, or nothing is evaluated.
    replace(certificate, weights_digest="0" * 64).write(run_dir / "merge.json")
    assert "000000000000" in refused("evaluate", "r1-llm-only")
    certificate.write(run_dir / "merge.json")
    parents = {"base": (base := Path("data/bases/vlm"), read_lineage(base))}
    write_lineage(run_dir / "trained", kind="trained", name="another training", parents=parents)
    assert "merged was merged from" in refused("evaluate", "r1-llm-only")
    flip(run_dir / "trained/adapter/adapter_model.safetensors")
    assert "trained was recorded with content" in refused("evaluate", "r1-llm-only")


def test_a_merge_that_others_start_from_keeps_its_weights(workspace: Path) -> None:
    without_merged_models()
    merged_dir = workspace / "data/runs/r2-vision-only/merged"
    digest = read_lineage(merged_dir).digest
    done("merge", "r2-vision-only")
    assert read_lineage(merged_dir).digest == digest
    remove_weights(merged_dir)
    message = refused("plan", "r3-two-stage")
    assert "data/runs/r2-vision-only/merged has no weights" in message
    assert "dvc repro -f -s merge@r2-vision-only" in message


def test_a_large_merged_model_in_several_files_is_the_same(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = workspace / "data/runs/r2-vision-only"
    certified = MergeCertificate.read(run_dir / "merge.json", fix="")
    assert weight_files(run_dir / "merged") == {"model.safetensors"}
    monkeypatch.setattr("stages.models.merge.MAX_SHARD_SIZE", "300KB")
    done("merge", "r2-vision-only")
    assert len(weight_files(run_dir / "merged")) > 1
    again = MergeCertificate.read(run_dir / "merge.json", fix="")
    assert again.weights_digest == certified.weights_digest
    assert again.merged_digest == verified_lineage(run_dir / "merged", fix="").digest != certified.merged_digest


def train_sharded(rank: int, folder: Path) -> None:
    """The stage in one of the processes that torchrun starts for it."""
    os.chdir(folder / MOVED)
    stages.train.main(["r2-vision-only"], standalone_mode=False)


def test_two_sharded_processes_train_as_one_does(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For real, on two CPU processes. ddp and resuming: tests/training; torchrun: test_processes.py there."""
    recipe, trained = "r2-vision-only", Path("data/runs/r2-vision-only/trained")
    raw = read_params()
    tiny = raw["profiles"]["tiny"]
    tiny["memory"]["quantization"] = "none"
    raw["recipes"][recipe]["max_steps"] = 2
    write_params(raw)
    with made_up_memory():
        done("plan", recipe)
    done("train", recipe)
    alone = load_file(trained / "weights.safetensors")

    tiny["device"]["count"], tiny["memory"]["placement"] = 2, "sharded"
    write_params(raw)
    with made_up_memory():
        done("plan", recipe)
    started: list[tuple[int, list[str]]] = []
    with monkeypatch.context() as patch:
        patch.setattr(stages.train, "run_workers", lambda device, command: started.append((device.count, command)))
        stages.train.main([recipe, "--attempt", "1"], standalone_mode=False)
    assert started == [(2, ["stages.train", recipe, "--attempt", "1"])]
    run_two(train_sharded, workspace.parent)
    assert read(trained.parent / "training/training.json")["num_steps"] == 2
    together = load_file(trained / "weights.safetensors")
    assert together.keys() == alone.keys()
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=2e-5)
    assert verified_lineage(trained, fix="").name == recipe


def test_a_recipe_that_does_not_fit_is_refused_with_what_would_or_lowered(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GiB is predicted for each sample of a micro-batch."""
    monkeypatch.setattr("stages.memory.predict.predict", lambda plan, *_: predicted(plan.memory.micro_batch))
    raw, run_dir = read_params(), workspace / "data/runs/r1-llm-only"
    raw["profiles"]["tiny"]["evaluation"]["max_new_tokens"] = ANSWER_TOKENS

    def set_fit(fit: str, memory_gb: float) -> None:
        raw["profiles"]["tiny"]["memory"]["fit"] = fit
        raw["profiles"]["tiny"]["device"] = {"kind": "cuda", "count": 1, "memory_gb": memory_gb}
        write_params(raw)

    set_fit("refuse", 1.5)
    (run_dir / "plan.yaml").unlink()
    message = refused("plan", "r1-llm-only")
    assert "micro_batch 2 -> 1, grad_accumulation 2 -> 4" in message
    assert "profiles.tiny.memory.fit=off" in message
    assert not (run_dir / "plan.yaml").exists()
    set_fit("off", 1.5)
    done("plan", "r1-llm-only")
    assert (read(run_dir / "memory.json")["verdict"], read(run_dir / "memory.json")["changes"]) == ("does not fit", [])
    set_fit("auto", 1.5)
    done("plan", "r1-llm-only")
    assert read(run_dir / "memory.json")["changes"] == ["micro_batch 2 -> 1", "grad_accumulation 2 -> 4"]
    plan = YAML(typ="safe").load(run_dir / "plan.yaml")
    assert (plan["memory"]["micro_batch"], plan["schedule"]["grad_accumulation"]) == (1, 4)


def test_samples_that_are_too_long_are_all_named_in_a_file_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made(tmp_path, raw := small_params(), ("base", "assistant"), ("prepare", "conversations")))
    run_dir, recipe = Path("data/runs/chat-lora"), raw["recipes"]["chat-lora"]

    def named(max_length: int) -> list[int]:
        recipe["max_length"] = max_length
        write_params(raw)
        assert f"more than max_length {max_length}" in refused("plan", "chat-lora")
        return sorted(int(line.split("\t")[1]) for line in (run_dir / "too-long.tsv").read_text().splitlines())

    lengths = named(9)
    assert len(lengths) == 10
    limit = max(length for length in lengths if length < lengths[-1])
    assert named(limit) == (longer := [length for length in lengths if length > limit])
    recipe["skip_too_long"] = True
    write_params(raw)
    with made_up_memory():
        done("plan", "chat-lora")
    assert not (run_dir / "too-long.tsv").exists()
    plan = read_plan("chat-lora")
    assert plan.schedule.train_samples == len(read_inputs(plan)[0]["collator"].records) == 10 - len(longer)


@pytest.mark.parametrize(
    ("stage", "name", "changes", "message"),
    [
        ("base", "vml", {}, "'vml' (did you mean 'vlm'?)"),
        ("plan", "r1", {}, "no recipe is called 'r1'"),
        ("plan", "r1-llm-only", {"max_length": 9}, "more than max_length 9"),
        ("train", "r4-joint", {}, "dvc repro -f -s plan@r4-joint"),
        ("evaluate", "r4-joint", {}, "dvc repro -f -s plan@r4-joint"),
    ],
)
def test_a_missing_name_or_step_and_a_setting_that_cannot_be_trained_are_refused(
    workspace: Path, stage: str, name: str, changes: dict[str, Any], message: str
) -> None:
    raw = read_params()
    raw["recipes"].get(name, {}).update(changes)
    write_params(raw)
    assert message in refused(stage, name)
