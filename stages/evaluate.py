"""Generate a model's completions of the validation samples, and score them; or score those of a file.

Reads   data/runs/RECIPE/merged/ and its certificate (or, for a baseline, the base itself or data/answers/FILE; for an
        export, data/exports/NAME/, with its recipe's tokenizer), the prepared data
Writes  data/runs/RECIPE/{metrics.json, predictions.parquet, examples/}; the files of the run that a report needs to
        data/report/TASK/runs/RECIPE/, with the certificate of vLLM if it generates; the process memory to
        data/report/TASK/memory/RECIPE/evaluate.json
Run     docker/run evaluate r1-llm-only
        docker/run evaluate base-vlm
        docker/run evaluate chat-lora-q8

Exits with code 79 on out-of-memory; the launcher restarts it with half the batch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from stages.core.atomic import atomic_folder, atomic_write
from stages.core.errors import configure_logging
from stages.core.lineage import Lineage, file_digest
from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.records import rebuild
from stages.core.tasks import load_task
from stages.data.groups import groups_of
from stages.data.guards import GUARD, GUARDS_FILE, read_guard
from stages.data.parquet import write_rows
from stages.evaluation.generate import TextGenerator, batch_size_for, load_generator
from stages.evaluation.llama_cpp import LlamaCpp, load_exported
from stages.evaluation.score import Task, failures, mark_examples, read_completions, rebatched, summary
from stages.evaluation.statistics import figures, perplexity
from stages.evaluation.vllm.engine import CERTIFICATE_FILE, EngineCertificate, VllmEngine
from stages.exporting.certificate import exported_model
from stages.models.certificate import certified_model
from stages.models.prompts import tokenizer_of
from stages.planning.ladder import MAX_BATCH_SIZE
from stages.planning.memory_use import MemoryLog, recognised_out_of_memory
from stages.planning.plan import read_plan
from stages.planning.prediction import PlannedMemory, prediction_metrics, read_memory
from stages.reporting.runs import (
    EXAMPLE_COLUMN,
    FAILURE,
    GROUP_COLUMN,
    ORDERED_BY,
    REBATCHED,
    copy_to_report,
    report_runs_dir,
)
from stages.reporting.tracking import track_evaluation
from stages.training.records import TrainingSummary

log = logging.getLogger("stages")

GUARDED = pa.schema([("guard", pa.string()), ("id", pa.string()), ("nats", pa.float64()), ("tokens", pa.float64())])
"""Columns of guards.parquet: `nats` is the negative log-likelihood of a row's answers, `tokens` their number."""


@click.command(help=__doc__)
@click.argument("name")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Times to halve the batch.  [default: 0]")
@recognised_out_of_memory()
def main(name: str, attempt: int) -> None:
    configure_logging(f"evaluate {name}")
    params = load_params()
    task = task_of(params, name)
    evaluation = evaluate(params, name, task, attempt=attempt)
    metrics = evaluation.metrics | {ORDERED_BY: task.scoring.ordered_by(task.records[0])}
    metrics |= {} if params.scored == "val" else {"split": params.scored}
    metrics |= {f"{FAILURE}{kind}": len(rows) for kind, rows in failures(evaluation.rows, task.scoring).items()}
    for guard in params.guards if evaluation.guarded else ():
        values = [(row["nats"], row["tokens"]) for row in evaluation.guarded if row["guard"] == guard]
        metrics |= figures(f"{GUARD}{guard}", np.array(values), perplexity)
    rows = write(evaluation, metrics, name, task)
    log.info("%s: %s", name, summary(metrics, task.scoring))
    examples, examples_dir = [row for row in rows if row[EXAMPLE_COLUMN]], Path("data/runs") / name / "examples"
    track_evaluation(params.tracking, name, metrics, examples, examples_dir, model=evaluation.lineage)


def task_of(params: Params, name: str) -> Task:
    """The task of a run. Raises UserError for a damaged model of the task's own."""
    subject = params.subject(name)
    samples, scoring = load_task(subject.task, "samples"), load_task(subject.task, "scoring")
    answer_format = subject.answer_format
    if name not in params.baselines:
        answer_format = read_plan(params.recipe_name(name)).recipe.answer_format
    return Task(
        name=subject.task,
        answer_format=answer_format,
        records=samples.read_split(Path("data/prepared") / subject.data, params.scored),
        models=scoring.models() if hasattr(scoring, "models") else {},
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    metrics: dict[str, Any]
    rows: list[dict[str, Any]]
    """One row per sample, as in predictions.parquet."""
    lineage: Lineage
    memory: MemoryLog
    certificate: EngineCertificate | None = None
    guarded: Sequence[dict[str, Any]] = ()
    """One row per row of a guard, as in guards.parquet; none for completions of a file."""


def evaluate(params: Params, name: str, task: Task, *, attempt: int) -> Evaluation:
    """Score a recipe's model or a baseline, an export, or the completions of a file."""
    Path("data/runs", name).mkdir(parents=True, exist_ok=True)
    if name in params.baselines and (path := params.baselines[name].answers):
        return evaluate_file(name, task, Path(path))
    how = evaluate_export if name in params.exports else evaluate_model
    return how(params, name, task, attempt=attempt)


def evaluate_model(params: Params, name: str, task: Task, *, attempt: int) -> Evaluation:
    """Generate the completions of a recipe's model or a baseline, and score them."""
    run_dir = Path("data/runs") / name
    model_dir, lineage = certified_model(params, name)
    profile = params.active
    options = params.baselines[name].template_options if name in params.baselines else {}
    planned = read_memory(name) if name in params.recipes else None
    largest = planned.evaluation_batch_size if planned else MAX_BATCH_SIZE
    batch_size = batch_size_for(profile.evaluation, len(task.questions), largest=largest, attempt=attempt)
    engine = by_vllm = certificate = completions = None
    if profile.evaluation.engine == "vllm":  # it has ended before our own model takes the device
        engine = VllmEngine(
            name=name,
            model_dir=model_dir,
            model_digest=lineage.digest,
            profile=profile,
            questions=task.questions,
            template_options=options,
            attempt=attempt,
        )
        by_vllm = engine.generate(run_dir)
    generator, memory = load_generator(
        *(model_dir, profile, task.samples),
        answer_format=task.answer_format,
        batch_size=batch_size,
        template_options=options,
    )
    if engine and by_vllm:
        certificate, completions = engine.certify(by_vllm, generator)
    scored = task.score(generator, completions)
    metrics = scored.metrics | {
        "samples_per_second": round(len(task.records) / (by_vllm.seconds if by_vllm else scored.generation_s), 3),
        "batch_size": generator.batch_size,
        "attempt": attempt,
        **({"engine": certificate.engine} if certificate else {}),
        **(memory_metrics(run_dir, planned) if planned else {}),
    }
    if not (planned or by_vllm or profile.memory.precision == "fp32"):
        metrics |= {f"{REBATCHED}{key}": value for key, value in rebatched(generator, task, scored).items()}
    made: dict[str, Any] = {"lineage": lineage, "memory": memory, "certificate": certificate}
    return Evaluation(metrics=metrics, rows=scored.rows, guarded=guard_rows(params.guards, generator), **made)


def evaluate_export(params: Params, name: str, task: Task, *, attempt: int) -> Evaluation:
    """Generate an export's completions by what will serve it, and score them."""
    _, lineage, certificate = exported_model(params, name)
    num_questions, largest = len(task.questions), MAX_BATCH_SIZE
    batch_size = batch_size_for(params.active.evaluation, num_questions, largest=largest, attempt=attempt)
    generator, memory = load_exported(
        *(params, name, task.samples, task.questions), answer_format=task.answer_format, batch_size=batch_size
    )
    scored = task.score(generator)
    tokens = sum(map(len, tokenizer_of(generator.processor)(scored.completions, add_special_tokens=False)["input_ids"]))
    metrics = scored.metrics | {
        "samples_per_second": round(len(task.records) / scored.generation_s, 3),
        "tokens_per_second": round(tokens / scored.generation_s, 1),
        "batch_size": batch_size,
        "attempt": attempt,
        "engine": generator.engine,
        "size_bytes": certificate.size_bytes,
    }
    guarded = guard_rows(params.guards, generator)
    return Evaluation(metrics=metrics, rows=scored.rows, lineage=lineage, memory=memory, guarded=guarded)


def evaluate_file(name: str, task: Task, path: Path) -> Evaluation:
    """Score another system's completions, from an answers file; no model is loaded."""
    memory = MemoryLog(())
    memory.loaded()
    completions = read_completions(path, task)
    metrics, rows = task.scoring.score(task.records, completions, answer_format=task.answer_format)
    lineage = Lineage(kind="answers", name=name, digest=file_digest(path), source={"file": str(path)})
    return Evaluation(metrics=metrics | {"answers": str(path)}, rows=rows, lineage=lineage, memory=memory)


def guard_rows(guards: Iterable[str], generator: TextGenerator | LlamaCpp) -> list[dict[str, Any]]:
    """Rows of GUARDED, by this model, which reads the guards' rows one by one."""
    rows = [(guard, row) for guard in guards for row in read_guard(guard)]
    found = replace(generator, batch_size=1).likelihoods([row for _, row in rows])
    return [
        {"guard": guard, "id": row.sample_id, "nats": -each.sum_logprob, "tokens": float(each.num_tokens)}
        for (guard, row), each in zip(rows, found, strict=True)
    ]


def memory_metrics(run_dir: Path, planned: PlannedMemory) -> dict[str, float]:
    """Training's predicted and measured memory; empty if memory ran out and training used other settings."""
    training = TrainingSummary.read(run_dir / "training/training.json", fix=rebuild(f"train@{run_dir.name}"))
    if training.attempt:
        return {}
    on_cpu = training.memory_kind == "cpu_allocated"
    return prediction_metrics(planned.prediction, training.peak_memory_bytes, on_cpu=on_cpu)


def write(evaluation: Evaluation, metrics: dict[str, Any], name: str, task: Task) -> list[dict[str, Any]]:
    """Write the files of the run, and those of its report. Returns the rows of predictions.parquet."""
    run_dir, report_run_dir = Path("data/runs") / name, report_runs_dir(Path("data"), task.name) / name
    with atomic_folder(run_dir / "examples") as examples_dir:
        marks = mark_examples(task.records, evaluation.rows, task.scoring, examples_dir)
    rows = [row | {EXAMPLE_COLUMN: each} for row, each in zip(evaluation.rows, marks, strict=True)]
    schema = task.scoring.PREDICTIONS.append(pa.field(EXAMPLE_COLUMN, pa.list_(pa.string())))
    if (groups := groups_of(task.records)) is not None:
        rows = [row | {GROUP_COLUMN: group} for row, group in zip(rows, groups.tolist(), strict=True)]
        schema = schema.append(pa.field(GROUP_COLUMN, pa.int64()))
    write_rows(rows, run_dir / "predictions.parquet", schema)
    atomic_write(json.dumps(metrics, indent=2) + "\n", run_dir / "metrics.json")
    copy_to_report(run_dir, report_run_dir, lineage=evaluation.lineage)
    if evaluation.guarded:
        write_rows(evaluation.guarded, report_run_dir / GUARDS_FILE, GUARDED)
    if evaluation.certificate:
        evaluation.certificate.write(report_run_dir / CERTIFICATE_FILE)
    evaluation.memory.write("evaluate", name, task=task.name)
    return rows


if __name__ == "__main__":
    main()
