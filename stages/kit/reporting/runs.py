"""What a run folder holds for a report: metrics, predictions, lineage, plan, training record, loss curve, pictures."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from stages.core.documents import read_json
from stages.core.errors import UserError
from stages.core.lineage import read_lineage
from stages.core.provenance import Provenance, provenance_of_run
from stages.kit.memory_use import StageMemory
from stages.kit.models.certificate import MergeCertificate, read_certificate
from stages.kit.planning.plan import Plan, read_plan
from stages.kit.reporting.cards import MODEL_LINEAGE_FILE
from stages.kit.statistics import Floats
from stages.kit.training.records import TrainingRecord, read_record

PICTURE_KINDS = ("best", "worst", "random")
"""Pictures are named KIND-anything.png."""
LOSS_CURVE = "plots/metrics/train/loss.tsv"
"""Where DVCLive writes it, below training/."""


Figure: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)] | Annotated[float, Field(allow_inf_nan=False)] | str
"""A metric, as `evaluate` writes it."""


@dataclass(frozen=True)
class Curve:
    steps: Floats
    values: Floats


@dataclass(frozen=True, kw_only=True)
class Run:
    """One evaluated model."""

    name: str
    stage: str
    """The pipeline stage that evaluates it."""
    model: str
    """Digest of the model evaluated."""
    base: str | None = None
    """Digest of what it was trained from; None for an untrained base."""
    random_weights: bool
    """Whether the model descends from random weights, so that its scores say nothing."""
    metrics: Mapping[str, float | str]
    samples: tuple[str, ...]
    """What each sample is, its id and its truth, in order: equal for runs that may be compared."""
    sample_ids: tuple[str, ...]
    columns: Mapping[str, Floats]
    """Per-sample values by column of predictions.parquet, each (samples,)."""
    plan: Plan | None = None
    """None for an untrained base; likewise the training record."""
    training: TrainingRecord | None = None
    certificate: MergeCertificate | None = None
    """The certificate of its merge."""
    loss: Curve | None = None
    pictures: Mapping[str, tuple[Path, ...]]
    """By kind, in order of name."""
    memory: tuple[StageMemory, ...] = ()
    """What the stages that made and evaluated it held, in the order that they ran."""
    provenance: tuple[Provenance, ...] = ()
    """Of the stages that made it, as far as they left records."""


def evaluation_stage(name: str, *, trained: bool) -> str:
    """The pipeline stage that evaluates a recipe, or an untrained base."""
    return f"evaluate@{name}" if trained else f"baseline@{name}"


def read_run(
    run_dir: Path,
    *,
    identity: Sequence[str],
    columns: Sequence[str],
    trained: bool,
    memory_by_stage: Mapping[str, Path] | None = None,
    records_dir: Path | None = None,
) -> Run | None:
    """The run in a folder, or None where it has not been evaluated.

    identity: columns of predictions.parquet that say what a sample is, its id first.
    columns:  numeric columns to read, one value a sample.
    trained:  whether it comes from training, with a plan and a training record.
    memory_by_stage: where the stages that made it say what they held, in their order; a file may be missing.
    records_dir: where the provenance of the task's runs lies.
    Raises UserError for damaged files, for missing columns, and for values that are missing or not finite.
    """
    metrics_path, predictions_path = run_dir / "metrics.json", run_dir / "predictions.parquet"
    if not metrics_path.is_file() or not predictions_path.is_file():
        return None
    name, training_dir = run_dir.name, run_dir / "training"
    stage = evaluation_stage(name, trained=trained)
    rows = _read_predictions(predictions_path, [*identity, *columns], stage)
    described = zip(*(rows.column(column).to_pylist() for column in identity), strict=True)
    lineage = read_lineage(run_dir, name=MODEL_LINEAGE_FILE, fix=_command(stage))
    return Run(
        name=name,
        stage=stage,
        model=lineage.digest,
        base=lineage.parents["base"].lineage.digest if "base" in lineage.parents else None,
        random_weights=lineage.of_random_weights(),
        metrics=read_json(dict[str, Figure], metrics_path, fix=_command(stage)),
        samples=tuple(json.dumps(sample, ensure_ascii=False, default=repr) for sample in described),
        sample_ids=tuple(str(sample) for sample in rows.column(identity[0]).to_pylist()),
        columns={column: _numbers(rows, column, predictions_path, stage) for column in columns},
        plan=read_plan(name, runs_dir=run_dir.parent) if trained else None,
        training=read_record(training_dir / "training.json") if trained else None,
        certificate=read_certificate(run_dir / "merge.json", name) if trained else None,
        loss=_read_curve(training_dir / LOSS_CURVE, f"train@{name}") if trained else None,
        pictures={kind: tuple(sorted((run_dir / "examples").glob(f"{kind}-*.png"))) for kind in PICTURE_KINDS},
        memory=tuple(
            read_json(StageMemory, path, fix=_command(made_by))
            for made_by, path in (memory_by_stage or {}).items()
            if path.is_file()
        ),
        provenance=tuple(provenance_of_run(records_dir, name)) if records_dir else (),
    )


def refuse_different_samples(runs: Sequence[Run]) -> None:
    """Raise UserError unless all runs were evaluated on the same samples and truth, in the same order."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.samples, []).append(run)
    if len(groups) <= 1:
        return
    lines = [
        f"  {', '.join(run.name for run in group)}: {len(samples)} samples, digest {_digest(samples)}"
        for samples, group in groups.items()
    ]
    first, second = list(groups.values())[:2]
    raise UserError(
        "these runs were evaluated on different samples, so their scores cannot be compared:\n"
        + "\n".join(lines)
        + f"\n{_first_difference(first[0], second[0])}; evaluate them on the same data with: dvc repro "
        + " ".join(run.stage for run in runs)
    )


def refuse_random_beside_trained(runs: Sequence[Run]) -> None:
    """Raise UserError where some runs descend from random weights and others do not."""
    random, trained = ([run.name for run in runs if run.random_weights is of_random] for of_random in (True, False))
    if random and trained:
        raise UserError(
            f"{', '.join(random)}: random weights, whose scores say nothing beside those of trained ones: "
            f"{', '.join(trained)}; leave either out of params.yaml, or evaluate all on one base with: dvc repro "
            + " ".join(run.stage for run in runs)
        )


def different_models(runs: Sequence[Run]) -> list[Run]:
    """The runs of a recipe without those of a model that is there already: no seed changes an untrained base.

    Raises UserError where one seed gave two models of one base.
    """
    models = list({run.model: run for run in reversed(runs)}.values())[::-1]
    seeds = [(run.plan.seed, run.base) for run in models if run.plan]
    if twice := sorted({seed for seed, base in seeds if seeds.count((seed, base)) > 1}):
        raise UserError(
            f"{runs[0].name} gave different models under the same seed ({', '.join(map(str, twice))}), so that they do "
            "not come of seeds alone; leave all but one of them out"
        )
    return models


def _first_difference(one: Run, other: Run) -> str:
    for row, (ours, theirs) in enumerate(zip(one.samples, other.samples, strict=False)):
        if ours != theirs:
            ids = one.sample_ids[row], other.sample_ids[row]
            what = "the truth of " + repr(ids[0]) if ids[0] == ids[1] else f"{ids[0]!r} against {ids[1]!r}"
            return f"{one.name} and {other.name} first differ in row {row} ({what})"
    shorter, longer = sorted((one, other), key=lambda run: len(run.samples))
    return f"{longer.name} goes on after the {len(shorter.samples)} samples of {shorter.name}"


def _digest(samples: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(samples).encode()).hexdigest()[:8]


def _command(stage: str) -> str:
    return f"dvc repro -f -s {stage}"


def _rebuild(stage: str) -> str:
    return f"rebuild it with: {_command(stage)}"


def _read_predictions(path: Path, columns: Sequence[str], stage: str) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:  # pq.read_table imports pandas
            present = file.schema_arrow.names
            if missing := [name for name in columns if name not in present]:
                raise UserError(
                    f"{path} has no column {', '.join(missing)}; it has {', '.join(present)}; {_rebuild(stage)}"
                )
            table = file.read(columns=list(dict.fromkeys(columns)))
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}; {_rebuild(stage)}") from None
    return table


def _numbers(rows: pa.Table, name: str, path: Path, stage: str) -> Floats:
    try:
        values = np.asarray([float("nan" if row is None else row) for row in rows.column(name).to_pylist()])
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path} holds in {name} what is no number: {error}; {_rebuild(stage)}") from None
    if broken := int((~np.isfinite(values)).sum()):
        raise UserError(
            f"{path}: {broken} of {len(values)} values of {name} are missing or not finite, expected "
            f"a number for every sample; {_rebuild(stage)}"
        )
    return values


def _read_curve(path: Path, stage: str) -> Curve | None:
    """A DVCLive curve: tab-separated, a `step` column and one named as the metric (`train/loss`)."""
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        value_column = next((name for name in rows[0] if name not in ("step", "timestamp")), None) if rows else None
        if value_column is None:
            return None
        points = [(float(row["step"]), float(row[value_column] or math.nan)) for row in rows]
    except (OSError, csv.Error, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}; {_rebuild(stage)}") from None
    steps, values = np.asarray(points, dtype=np.float64).T
    return Curve(steps=steps, values=values)
