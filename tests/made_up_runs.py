"""Made-up run folders, with the files that training and evaluation leave."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from stages.core.lineage import LINEAGE_FILE, write_lineage
from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.provenance import records_dir
from stages.models.certificate import QuantizationCost
from stages.planning.memory_use import StageMemory, stage_memory_path
from stages.planning.resolve import resolve_plan
from stages.reporting.runs import EXAMPLE_COLUMN, EXAMPLE_KINDS, MODEL_LINEAGE_FILE, ORDERED_BY
from stages.tasks.detection.report import REPORT
from tests.made_up_records import CERTIFICATE, PROVENANCE, TRAINING

MIB = 2**20
PARAMS_PATH = Path(__file__).parent.parent / "params.yaml"


def project_params() -> Params:
    return load_params(PARAMS_PATH)


def names_of(task: str) -> list[str]:
    """The baselines and recipes of a task in params.yaml."""
    params = project_params()
    return [name for name in (*params.baselines, *params.recipes) if params.subject(name).task == task]


def made_up_ious(mean: float, num_samples: int, *, seed: int) -> NDArray[np.float64]:
    """Scores in 0..1 that share the hardness of each sample, like those of real models; (num_samples,)."""
    hardness = np.random.default_rng(0).normal(0, 0.12, num_samples)
    own = np.random.default_rng(seed).normal(0, 0.05, num_samples)
    return np.clip(mean + hardness + own, 0, 1)


def write_made_up_run(
    runs_dir: Path,
    name: str,
    ious: Sequence[float] | NDArray[np.float64],
    *,
    params: Params | None = None,
    image_ids: Sequence[str] | None = None,
    truth: Sequence[float] = (0.2, 0.2, 0.8, 0.8),
    num_examples: int = 1,
) -> Path:
    """An evaluated run of detection, with the columns and figures that its report declares; with `params`, also the
    plan and the training record of the recipe of that name.

    ious: the primary figure of each sample.
    """
    run_dir = runs_dir / name
    (run_dir / "examples").mkdir(parents=True)
    scores = np.asarray(ious, dtype=np.float64)
    identity = {
        "image_id": image_ids or [f"image-{index:03d}" for index in range(len(scores))],
        "truth": [[list(truth)]] * len(scores),
    }
    rows = {column: identity.get(column, scores) for column in (*REPORT.identity, *REPORT.columns)}
    rows["text"] = [f"completion {score}" for score in scores]
    marks = [[f"{kind}-{index + 1}" for kind in EXAMPLE_KINDS] for index in range(num_examples)]
    rows[EXAMPLE_COLUMN] = pa.array([*marks, *[[]] * len(scores)][: len(scores)], pa.list_(pa.string()))
    pq.write_table(pa.table(rows), run_dir / "predictions.parquet")
    figures = {
        metric.key: float(np.mean(scores if metric.evidence else scores > 0.5)) if len(scores) else 0.0
        for metric in REPORT.metrics
    }
    others = {"samples": len(scores), "samples_per_second": 12.5, ORDERED_BY: REPORT.primary.evidence[0]}
    memory = {"memory_predicted_gib": 1.25, "memory_measured_gib": 1.5} if params else {}
    _write_json(run_dir / "metrics.json", {**figures, **memory, **others})
    for mark in itertools.chain(*marks):
        _write_example(run_dir / "examples" / f"{mark}.png")
    if params is not None:
        _write_training(run_dir, name, params)
    write_lineage(run_dir, kind="base", name=name)
    (run_dir / LINEAGE_FILE).rename(run_dir / MODEL_LINEAGE_FILE)  # as a report has it
    return run_dir


def made_up_memory(stage: str, name: str, *, gpus: int = 0) -> StageMemory:
    """600 MiB before a model of 100 MiB is loaded, and 300 more for the work; on GPUs nothing before."""
    used = 0 if gpus else 600 * MIB
    return StageMemory(
        stage=stage,
        name=name,
        gpus=gpus,
        used_before_bytes=used,
        free_before_bytes=2**33 - used,
        used_loaded_bytes=used + 100 * MIB,
        free_loaded_bytes=2**33 - used - 100 * MIB,
        peak_bytes=used + 400 * MIB,
    )


def write_made_up_memory(data_dir: Path, task: str, memory: StageMemory) -> Path:
    path = stage_memory_path(data_dir, task, name=memory.name, stage=memory.stage)
    _write_json(path, asdict(memory))
    return path


def write_made_up_record(data_dir: Path, stage: str, **changes: Any) -> None:
    """The launcher's record of a stage of the task detection, such as `train@NAME`."""
    trained = stage.startswith("train")
    base = "data/bases/vlm"
    record = replace(
        PROVENANCE,
        stage=stage,
        plan={"base_dir": base, "seed": 42} if trained else None,
        inputs={base: "ba5e" * 16, "data/prepared/nutrition-tables/train.parquet": "da7a" * 16},
    )
    replace(record, **changes).write(records_dir(data_dir, "detection") / f"{stage}.json")


def _write_training(run_dir: Path, name: str, params: Params) -> None:
    plan = resolve_plan(params, name, train_samples=160)
    plan.write(run_dir / "plan.yaml")
    vision = 1_204_000 if "vision" in plan.recipe.parts.trained() else 0
    llm = 688_000 if "llm" in plan.recipe.parts.trained() else 0
    cost = QuantizationCost(
        logit_deviation=0.11,
        samples=32,
        batch_size=16,
        same_completions=30,
        trained={REPORT.primary.key: 0.68},
        merged={REPORT.primary.key: 0.66},
    )
    replace(
        CERTIFICATE,
        recipe=name,
        changed_modules=28,
        precision=plan.memory.precision,
        trained_quantization=plan.quantization,
        quantization_cost=cost if plan.quantization == "nf4" else None,
    ).write(run_dir / "merge.json")
    replace(
        TRAINING,
        recipe=name,
        profile=plan.profile,
        micro_batch=plan.memory.micro_batch,
        grad_accumulation=plan.schedule.grad_accumulation,
        gradient_checkpointing=plan.memory.gradient_checkpointing,
        optimizer=plan.memory.optimizer,
        quantization=plan.quantization,
        num_steps=plan.schedule.num_steps,
        trainable={"vision": vision, "projector": 0, "llm": llm, "total": vision + llm, "all": 3_100_000},
    ).write(run_dir / "training/training.json")
    curve = run_dir / "training" / "plots" / "metrics" / "train" / "loss.tsv"
    curve.parent.mkdir(parents=True)
    steps = np.arange(1, 31)
    losses = 0.5 + 2.0 * np.exp(-steps / 8) + np.random.default_rng(len(name)).normal(0, 0.06, len(steps))
    lines = [f"{step}\t{loss:.4f}" for step, loss in zip(steps, losses, strict=True)]
    curve.write_text("\n".join(["step\tloss", *lines]) + "\n", encoding="utf-8")
    validated = curve.parents[1] / "validation" / "loss.tsv"
    validated.parent.mkdir()
    validated.write_text("\n".join(["step\tloss", lines[14], lines[29]]) + "\n", encoding="utf-8")


def _write_example(path: Path) -> None:
    image = Image.new("RGB", (168, 224), (236, 229, 214))
    draw = ImageDraw.Draw(image)
    draw.rectangle((38, 60, 130, 190), outline=(0, 160, 60), width=3)
    draw.rectangle((44, 52, 124, 180), outline=(225, 25, 25), width=3)
    image.save(path)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
