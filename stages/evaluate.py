"""Let a model answer the validation samples, and score its answers.

Reads   data/runs/RECIPE/merged/ and its certificate (or, for a baseline, the base itself), the prepared data
Writes  data/runs/RECIPE/{metrics.json, predictions.parquet, examples/}; the files of the run that a report needs to
        data/report/TASK/runs/RECIPE/, with the certificate if vLLM answers; the process memory to
        data/report/TASK/memory/RECIPE/evaluate.json
Run     docker/run evaluate r1-llm-only
        docker/run evaluate base-vlm

Exits with code 79 on out-of-memory; the launcher restarts it with half the batch.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from stages.core.errors import configure_logging
from stages.core.params import load_params
from stages.core.records import publish_text, published
from stages.core.tasks import load_task
from stages.kit.data.parquet import write_rows
from stages.kit.evaluation.answer import load_answerer
from stages.kit.evaluation.score import score_answers, write_examples
from stages.kit.evaluation.vllm.engine import CERTIFICATE_FILE, VllmEngine
from stages.kit.models.certificate import certified_model
from stages.kit.planning.memory_use import recognised_out_of_memory, write_stage_memory
from stages.kit.planning.plan import read_plan
from stages.kit.planning.prediction import MemoryRecord, beside_measured
from stages.kit.reporting.runs import cards_dir, write_card
from stages.kit.reporting.tracking import track_evaluation
from stages.kit.training.records import TrainingRecord

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name")
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="Times to halve the batch.  [default: 0]")
@recognised_out_of_memory()
def main(name: str, attempt: int) -> None:
    configure_logging(f"evaluate {name}")
    params = load_params()
    subject = params.subject(name)
    model_dir, lineage = certified_model(params, name)
    answer_format = read_plan(name).answer_format if name in params.recipes else subject.answer_format
    samples, scoring = load_task(subject.task, "samples"), load_task(subject.task, "scoring")
    if hasattr(scoring, "check"):  # before a model is loaded
        scoring.check()

    profile = params.active
    records = samples.read_split(Path("data/prepared") / subject.data, params.scored)[: profile.evaluation.max_samples]
    questions = [samples.conversation(record, answered=False, answer_format=answer_format) for record in records]
    run_dir = Path("data/runs") / name
    run_dir.mkdir(parents=True, exist_ok=True)
    engine = completions = certificate = answers = None
    if profile.evaluation.engine == "vllm":  # it has ended before our own model takes the device
        engine = VllmEngine(
            name=name,
            model_dir=model_dir,
            model_digest=lineage.digest,
            profile=profile,
            questions=questions,
            attempt=attempt,
        )
        completions = engine.answer(run_dir)
    answerer = load_answerer(model_dir, profile, samples, questions, answer_format=answer_format, attempt=attempt)
    if engine and completions:
        certificate, answers = engine.certify(completions, answerer)
    scored = score_answers(answerer, records, questions, scoring, answers=answers)
    metrics = scored.metrics
    metrics |= {
        "samples_per_second": round(len(records) / (completions.seconds if completions else scored.answer_s), 3),
        "batch_size": answerer.batch_size,
        "attempt": attempt,
        **({} if params.scored == "val" else {"split": params.scored}),
        **({"engine": certificate.engine} if certificate else {}),
    }
    if name in params.recipes:
        metrics |= memory_metrics(run_dir)
    with published(run_dir / "examples") as examples_dir:
        write_examples(records, scored.rows, scoring, examples_dir)
    write_rows(scored.rows, run_dir / "predictions.parquet", scoring.PREDICTIONS)
    publish_text(json.dumps(metrics, indent=2) + "\n", run_dir / "metrics.json")
    card_dir = cards_dir(Path("data"), subject.task) / name
    write_card(run_dir, card_dir, model_dir=model_dir)
    if certificate:
        certificate.write(card_dir / CERTIFICATE_FILE)
    write_stage_memory(answerer.memory.finish("evaluate", name), task=subject.task)
    log.info("%s: %s", name, scoring.summary(metrics))
    track_evaluation(params.tracking, name, metrics, run_dir / "examples", model=lineage, model_dir=model_dir)


def memory_metrics(run_dir: Path) -> dict[str, float]:
    """Training's predicted and measured memory; empty if memory ran out and training used other settings."""
    training = TrainingRecord.read(run_dir / "training/training.json")
    if training.attempt:
        return {}
    planned = MemoryRecord.read(run_dir / "memory.json")
    return beside_measured(planned, training.peak_memory_bytes, on_cpu=training.memory_kind == "cpu_allocated")


if __name__ == "__main__":
    main()
