"""Each format of each family from a merged model to a row of the table, by the stages in this process."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages.core.errors import UserError
from stages.core.lineage import read_lineage, write_lineage
from stages.core.params import load_params
from stages.core.provenance import records_dir
from stages.core.tasks import load_task
from stages.exporting.certificate import TOLERANCE
from stages.planning.resolve import resolve_plan
from stages.publish import publish_run
from stages.publishing.check import check_published
from tests import tiny_families
from tests.architectures import config_of
from tests.made_up_records import CERTIFICATE, PROVENANCE, TRAINING
from tests.stage_runs import done, refused, small_params, write_workspace
from tests.tiny_families import save_tiny_family
from tools.try_run.__main__ import load_models

pytest.importorskip("xllamacpp", reason="needs llama.cpp (make setup EXTRAS='dev llamacpp')")

from stages.exporting import gguf_file, quantized_folder
from stages.exporting.gguf_file import ARCHITECTURES

EXPORTS = {
    f"{family}-{quantization}": (family, kind, quantization)
    for family in ARCHITECTURES
    for kind, quantizations in {"gguf": ("f16", "q8_0", "q4_0"), "bitsandbytes": ("nf4", "int8")}.items()
    for quantization in quantizations
    if kind == "gguf" or "moe" not in family
}
UNKNOWN = "qwen2_moe-nf4"
"""An export that is refused: its experts would stay as they are."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recipe for each family, made up as if it were trained, merged and evaluated, and its exports as rows."""
    folder, raw = tmp_path_factory.mktemp("workspace"), small_params(max_new_tokens=3)
    chat = raw["recipes"]["chat-full"]
    raw["recipes"] = dict.fromkeys(ARCHITECTURES, chat)
    raw.update(baselines={}, builds={}, predictions={})
    raw["profiles"]["tiny"]["datasets"]["conversations"]["limit"] = {"train": 2, "val": 2}
    raw["exports"] = {
        name: {"recipe": family, "task": "chat", "data": "conversations", "format": kind, "quantization": quantization}
        for name, (family, kind, quantization) in {**EXPORTS, UNKNOWN: ("qwen2_moe", "bitsandbytes", "nf4")}.items()
    }
    write_workspace(folder, raw)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        # bitsandbytes' kernels for CPUs read rows of whole blocks of 64 alone.
        monkeypatch.setitem(tiny_families.TEXT, "intermediate_size", 128)
        monkeypatch.setattr("stages.evaluate.read_memory", lambda _: SimpleNamespace(evaluation_batch_size=4))
        done("prepare", "conversations")
        done("base", "assistant")
        base = Path("data/bases/assistant"), read_lineage(Path("data/bases/assistant"))
        for family in ARCHITECTURES:
            run_dir = Path("data/runs") / family
            save_tiny_family(family, run_dir / "merged")
            (run_dir / "trained").mkdir()
            (run_dir / "trained/weights.safetensors").touch()
            trained = write_lineage(run_dir / "trained", kind="trained", name=family, parents={"base": base})
            parents = {"base": base, "trained": (run_dir / "trained", trained)}
            lineage = write_lineage(run_dir / "merged", kind="merged", name=family, parents=parents)
            resolve_plan(load_params(), family, train_samples=2).write(run_dir / "plan.yaml")
            replace(CERTIFICATE, recipe=family, merged_digest=lineage.digest).write(run_dir / "merge.json")
            replace(TRAINING, recipe=family, attempt=1).write(run_dir / "training/training.json")
            done("evaluate", family)
            write_records(f"train@{family}", f"merge@{family}")
        for name in EXPORTS:
            done("export", name)
            done("evaluate", name)
            write_records(f"export@{name}", f"exported@{name}")
        done("compare", "chat")
        yield folder


def write_records(*stages: str) -> None:
    """Write the launcher's records of these stages."""
    plan = {"base_dir": "data/bases/assistant", "data_dir": "data/prepared/conversations", "seed": 42}
    for stage in stages:
        settings = {"profiles.tiny.evaluation": {"max_new_tokens": 3}}
        record = replace(PROVENANCE, stage=stage, params=settings, plan=plan if stage.startswith("train") else None)
        record.write(records_dir(Path("data"), "chat") / f"{stage}.json")


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_a_row_of_the_table_with_a_certificate(workspace: Path, name: str) -> None:
    family, kind, quantization = EXPORTS[name]
    certificate = json.loads((workspace / f"data/exports/{name}.json").read_text())
    assert certificate["exported_digest"] == read_lineage(workspace / "data/exports" / name).digest
    assert 0.4 < certificate["deviation"] <= certificate["tolerance"] == TOLERANCE[quantization]
    report = (workspace / "data/report/chat/comparison.md").read_text()
    assert any(line.startswith(f"| {name} |") and f"| {family} |" in line for line in report.splitlines())
    assert f"- {name} against {family}:" in report
    metrics = json.loads((workspace / f"data/runs/{name}/metrics.json").read_text())
    assert metrics["engine"].startswith({"gguf": "llama.cpp", "bitsandbytes": "transformers"}[kind])
    assert metrics["size_bytes"] == certificate["size_bytes"]


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)


@pytest.mark.usefixtures("here")
def test_a_file_with_rows_that_are_not_interleaved_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_lineage(Path("data/exports/llama-q8_0"))
    monkeypatch.setattr(gguf_file, "interleaved", lambda rows, head_rows: rows)
    message = refused("export", "llama-q8_0")
    assert "the export llama-q8_0 is not the model of llama: 4 tensors differ from its own" in message
    assert "(docs/deployment.md#limits)" in message
    assert read_lineage(Path("data/exports/llama-q8_0")) == before


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "granitemoehybrid"])
def test_a_mixture_whose_experts_would_stay_as_they_are_is_not_quantized(model_type: str, tmp_path: Path) -> None:
    config_of(model_type).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{model_type} is not exported by bitsandbytes: .* its experts"):
        quantized_folder.write_quantized(tmp_path, tmp_path / "export", "nf4")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        ("swapped", {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2)}),
        ("lost", {"model.layers.0.self_attn.o_proj.weight"}),
        ("rounded", {"model.embed_tokens.weight"}),
    ],
)
def test_a_wrong_tensor_of_a_quantized_folder_is_seen_by_the_check(
    tmp_path: Path, quantization: str, damage: str, wrong: set[str]
) -> None:
    tensors: dict[str, Any] = load_file(f"data/exports/llama-{quantization}/model.safetensors")
    ours, others = ([name for name in tensors if f".{layer}.self_attn.o_proj." in name] for layer in range(2))
    if damage == "swapped":
        tensors |= dict(zip((*ours, *others), [tensors[name] for name in (*others, *ours)], strict=True))
    elif damage == "lost":
        for name in ours:
            del tensors[name]
    else:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    off = quantized_folder.largest_deviations(Path("data/runs/llama/merged"), tmp_path)
    assert {name for name, steps in off.items() if not steps <= TOLERANCE[quantization]} == wrong
    assert max(off.values()) > 3
    assert damage == "swapped" or max(off.values()) == math.inf


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["llama-q4_0", "llama-nf4"])
def test_a_published_export_has_its_own_score_and_certificate(tmp_path: Path, name: str) -> None:
    published = tmp_path / "published"
    publish_run(load_params(), name, published)
    card = ModelCard.load(published / "README.md")
    metrics = json.loads(Path(f"data/runs/{name}/metrics.json").read_text())
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert scores
    assert scores == {key: metrics[key] for key in scores}
    exported_as = " ".join(EXPORTS[name][1:])
    assert f"fine-tuned by the recipe `llama`, exported as {exported_as}" in " ".join(card.content.split())
    assert f"- {name} against llama: " in card.content
    assert ("llama-server -m model.gguf" in card.content) == (published / "model.gguf").is_file() == ("q4" in name)
    records = check_published(published).records
    assert {f"{kind}@llama" for kind in ("train", "merge")} | {f"export@{name}", f"exported@{name}"} == {
        record.stage for record in records
    }
    assert (published / "evidence/export.json").read_bytes() == Path(f"data/exports/{name}.json").read_bytes()
    assert "- Seed: 42\n" in card.content
    if "nf4" in name:
        AutoModelForCausalLM.from_pretrained(published, device_map={"": "cpu"})


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("change", [{"quantization": "q8_0"}, {"recipe": "qwen2"}, None])
def test_an_export_from_before_a_change_is_not_published_or_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any] | None
) -> None:
    params = load_params()
    if change:
        now = replace(params.exports["llama-q4_0"], **change)
        params = replace(params, exports={**params.exports, "llama-q4_0": now})
    else:
        retrained = replace(read_lineage(Path("data/runs/llama/merged")), digest="0" * 64)
        monkeypatch.setattr("stages.exporting.certificate.read_lineage", lambda _: retrained)
    with pytest.raises(UserError, match=r"q4_0 of llama as it was.*dvc repro exported@llama-q4_0"):
        publish_run(params, "llama-q4_0", tmp_path / "published")
    monkeypatch.setattr("stages.evaluate.load_params", lambda: params)
    assert "dvc repro exported@llama-q4_0" in refused("evaluate", "llama-q4_0")


@pytest.mark.usefixtures("here")
def test_an_export_is_asked_beside_its_model() -> None:
    page = pytest.importorskip("tools.try_run.page", reason="needs Gradio (make setup EXTRAS='dev try')")
    models = load_models(load_params(), "llama-q8_0", alone=False)
    assert [model.name.split()[0] for model in models] == ["llama", "llama-q8_0"]
    samples = load_task("chat", "samples")
    for index, record in enumerate(samples.read_split(Path("data/prepared/conversations"), "val")):
        question = samples.conversation(record, answered=False, answer_format=None)
        for model in models:
            scored = pq.read_table(f"data/runs/{model.name.split()[0]}/predictions.parquet").to_pylist()[index]
            assert page.complete(model, question) == scored["text"]


@pytest.mark.usefixtures("here")
def test_a_mixture_is_refused_by_a_format_that_leaves_its_experts_as_they_are() -> None:
    assert "leaves the weights of its experts unquantized; format: gguf takes some mixtures" in refused(
        "export", UNKNOWN
    )
