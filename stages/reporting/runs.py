"""Runs that a report compares: the small files that an evaluation copies to the report, and how they are read.

They lie below the report of the task, a folder a run. A report depends on all of them together, so that a new recipe
joins its comparison without being listed anywhere.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field

from stages.core.atomic import atomic_folder
from stages.core.errors import UserError
from stages.core.lineage import Lineage, lineage_text, read_lineage
from stages.core.params.schema import Params
from stages.core.provenance import Provenance, read_provenance, records_dir
from stages.core.records import damaged, read_record, rebuild
from stages.data.guards import GUARD, GUARDS_FILE
from stages.data.parquet import read_rows, read_schema
from stages.evaluation.statistics import Floats, Groups
from stages.models.certificate import MergeCertificate
from stages.planning.memory_use import StageMemory, stage_memory_path
from stages.planning.plan import Plan, read_plan
from stages.training.records import TrainingSummary

if TYPE_CHECKING:
    from stages.reporting.compare import TaskReport

MODEL_LINEAGE_FILE = "model_lineage.json"
"""The lineage of the model evaluated. It has a name of its own, because lineage.json describes the folder it is in."""
EXAMPLES_DIR = "examples"
EXAMPLE_KINDS = ("best", "worst", "random")
EXAMPLE_COLUMN = "examples"
"""The column of predictions.parquet that says as which examples a report shows the sample, each KIND-RANK; the image
of one, if there is one, is KIND-RANK.png in EXAMPLES_DIR."""
ORDERED_BY = "ordered_by"
"""The entry of metrics.json that names the column of predictions.parquet that chose the best and worst."""
MAX_TEXT = 4_000
"""Characters of a question, a reference answer or a completion in an example."""
FAILURE = "failure_"
"""Begins the names of metrics that count completions by their kind of failure, of which there are examples too."""
REBATCHED = "rebatched_"
"""Begins the names of metrics of a second evaluation, in batches of half the size, and of the `changed` share of its
completions."""
GROUP_COLUMN = "group"
"""The number of a sample's group in predictions.parquet, if samples have groups."""
LOSS_CURVE = "training/plots/metrics/train/loss.tsv"
CURVES = {
    "training loss": LOSS_CURVE,
    "validation loss": "training/plots/metrics/validation/loss.tsv",
    "validation score": "training/plots/metrics/validation/score.tsv",
}
"""Files by figure, written by a training (training/records.py)."""
REPORT_FILES = (
    "merge.json",
    "metrics.json",
    EXAMPLES_DIR,
    "plan.yaml",
    "predictions.parquet",
    *CURVES.values(),
    "training/training.json",
)
"""Files and folders of a run that a report reads; a baseline has no plan and no training."""

Figure: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)] | Annotated[float, Field(allow_inf_nan=False)] | str
"""A metric in metrics.json."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One evaluated model."""

    name: str
    stage: str
    """The pipeline stage that evaluates it."""
    model: str
    """Digest of the model."""
    base: str | None = None
    """Digest of the model that it was trained or exported from; None for an untrained base."""
    metrics: Mapping[str, float | str]
    samples: tuple[str, ...]
    """Id, truth and group of each sample, in order: equal for runs that may be compared."""
    sample_ids: tuple[str, ...]
    columns: Mapping[str, Floats]
    """Per-sample values by column of predictions.parquet, each (samples,); of guards, each (rows of the guard,)."""
    guard_rows: tuple[str, ...] = ()
    """Guard and id of each row of a guard, in order: equal for all models; none for completions of a file."""
    groups: Groups | None = None
    """None if each sample is its own."""
    completions: tuple[str, ...] = ()
    """The completion of each sample."""
    texts: tuple[tuple[str, ...], ...] = ()
    """Question, reference answer and completion of each sample, as examples show them; none if they are images."""
    plan: Plan | None = None
    """None for an untrained base, as are the next two."""
    training: TrainingSummary | None = None
    certificate: MergeCertificate | None = None
    curves: Mapping[str, Floats] = field(default_factory=dict)
    """The curves that were written, by their names in CURVES: (2, points), the steps and the values."""
    examples: Mapping[str, Mapping[int, Path | None]]
    """Numbers of samples by kind, the most extreme first, each with its image; None if the task draws none of it."""
    memory: tuple[StageMemory, ...] = ()
    """Memory of the stages that made and evaluated it, in the order in which they ran."""
    provenance: tuple[Provenance, ...] = ()
    """Records of the stages that made and evaluated it, as far as there are any, by stage."""

    @property
    def ordered_by(self) -> str:
        """The column that its examples are the best and the worst by."""
        return str(self.metrics[ORDERED_BY])


def report_runs_dir(data_dir: Path, task: str) -> Path:
    return data_dir / "report" / task / "runs"


def copy_to_report(run_dir: Path, report_run_dir: Path, *, lineage: Lineage) -> None:
    """Copy REPORT_FILES of a run, in the layout of the run folder, and write the lineage of what was evaluated."""
    with atomic_folder(report_run_dir) as folder:
        (folder / MODEL_LINEAGE_FILE).write_text(lineage_text(lineage), encoding="utf-8")
        for name in REPORT_FILES:
            source, target = run_dir / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target)
            elif source.exists():
                shutil.copyfile(source, target)


def read_run(params: Params, report: TaskReport, name: str, data_dir: Path) -> Run | None:
    """The run of a recipe, a baseline or an export of the report's task, or None if it has not been evaluated.

    Raises UserError for damaged files, for missing columns, and for values that are missing or not finite.
    """
    run_dir = report_runs_dir(data_dir, report.task) / name
    metrics_path, predictions_path = run_dir / "metrics.json", run_dir / "predictions.parquet"
    if not metrics_path.is_file() or not predictions_path.is_file():
        return None
    trained, identity = name in params.recipes, report.identity
    stage = params.evaluation_stage(name)
    fix = rebuild(stage)
    metrics = read_record(dict[str, Figure], metrics_path, fix=fix)
    if ORDERED_BY not in metrics:
        raise UserError(f"{metrics_path} has no {ORDERED_BY}; rebuild it with: {fix}")
    columns = [*dict.fromkeys((*report.columns, str(metrics[ORDERED_BY])))]
    grouped = [GROUP_COLUMN] * (GROUP_COLUMN in read_schema(predictions_path, fix=f"rebuild it with: {fix}").names)
    needed = dict.fromkeys((*identity, *columns, *report.shown, *grouped, "text", EXAMPLE_COLUMN))
    rows = _read_predictions(predictions_path, [*needed], fix)
    path = run_dir / GUARDS_FILE
    guarded = _read_predictions(path, ["guard", "id", "nats", "tokens"], fix) if path.is_file() else []
    values = {column: _numbers(rows, column, predictions_path, fix) for column in columns}
    guards = [metric.guard for metric in report.metrics if metric.guard]
    for guard, column in product(guards, ("nats", "tokens")):
        of_guard = [row for row in guarded if row["guard"] == guard]
        values[f"{GUARD}{guard}_{column}"] = _numbers(of_guard, column, path, fix)
    lineage = read_lineage(run_dir, name=MODEL_LINEAGE_FILE, fix=fix)
    return Run(
        name=name,
        stage=stage,
        model=lineage.digest,
        base=next((parent.lineage.digest for key in ("base", "merged") if (parent := lineage.parents.get(key))), None),
        metrics=metrics,
        samples=tuple(
            json.dumps([row[column] for column in (*identity, *grouped)], ensure_ascii=False, default=repr)
            for row in rows
        ),
        sample_ids=tuple(str(row[identity[0]]) for row in rows),
        completions=tuple(str(row["text"]) for row in rows),
        texts=tuple(_texts(row, identity[1:], report.shown) for row in (rows if report.shown else ())),
        columns=values,
        guard_rows=tuple(f"{row['guard']} {row['id']}" for row in guarded if row["guard"] in guards),
        groups=_numbers(rows, GROUP_COLUMN, predictions_path, fix).astype(np.int64) if grouped else None,
        plan=read_plan(name, runs_dir=run_dir.parent, fix=fix) if trained else None,
        training=TrainingSummary.read(run_dir / "training/training.json", fix=fix) if trained else None,
        certificate=MergeCertificate.read(run_dir / "merge.json", fix=fix) if trained else None,
        curves={
            figure: _read_curve(run_dir / path, fix)
            for figure, path in CURVES.items()
            if trained and (run_dir / path).is_file()
        },
        examples=_examples(rows, run_dir / EXAMPLES_DIR),
        memory=tuple(
            StageMemory.read(path, fix=rebuild(maker))
            for maker, path in _memory_by_stage(params, report.task, name, data_dir).items()
            if path.is_file()
        ),
        provenance=tuple(map(read_provenance, sorted(records_dir(data_dir, report.task).glob(f"*@{name}.json")))),
    )


def _memory_by_stage(params: Params, task: str, name: str, data_dir: Path) -> dict[str, Path]:
    """The memory files of the stages that a recipe, a baseline or an export went through, in their order.

    The build that it starts from is among them; the stages of a recipe that it continues are not.
    """
    trained, exported = name in params.recipes, name in params.exports
    made_by = ["train", "merge"] if trained else ["export"] if exported else []
    stages = {f"{stage}@{name}": (name, stage) for stage in made_by}
    stages[params.evaluation_stage(name)] = (name, "evaluate")
    kind, _, build = params.subject(name).base.partition("/")
    if kind == "builds" and not exported:
        stages = {f"build@{build}": (build, "build"), **stages}
    return {stage: stage_memory_path(data_dir, task, name=of, stage=kind) for stage, (of, kind) in stages.items()}


def refuse_different_samples(runs: Sequence[Run]) -> None:
    """Raise UserError unless all runs were evaluated on the same samples and truth, and the same guards, in order."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    guarded = next((run.guard_rows for run in runs if run.guard_rows), ())
    for run in runs:
        groups.setdefault(run.samples + (run.guard_rows or guarded), []).append(run)
    if len(groups) <= 1:
        return
    lines = [
        f"  {', '.join(run.name for run in group)}: {len(group[0].samples)} samples, digest "
        + hashlib.sha256("\n".join(samples).encode()).hexdigest()[:8]
        for samples, group in groups.items()
    ]
    raise UserError(
        "these runs were evaluated on different samples, so their scores cannot be compared:\n"
        + "\n".join(lines)
        + "\nevaluate them on the same data with: dvc repro "
        + " ".join(run.stage for run in runs)
    )


def different_models(runs: Sequence[Run]) -> list[Run]:
    """The runs of a recipe, each model once: experiments share untrained bases.

    Raises UserError if one seed gave two models of one base.
    """
    models = list({run.model: run for run in reversed(runs)}.values())[::-1]
    seeds = [(run.plan.seed, run.base) for run in models if run.plan]
    if twice := sorted({seed for seed, base in seeds if seeds.count((seed, base)) > 1}):
        raise UserError(
            f"{runs[0].name} gave different models under the same seed ({', '.join(map(str, twice))}), so that "
            "something else than the seed differs; leave all but one of them out"
        )
    return models


def _read_predictions(path: Path, columns: Sequence[str], fix: str) -> list[dict[str, Any]]:
    present = read_schema(path, fix=f"rebuild it with: {fix}").names
    if missing := [name for name in columns if name not in present]:
        raise UserError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(present)}; rebuild it with: {fix}"
        )
    return list(read_rows(path, columns, fix=f"rebuild it with: {fix}"))


def _examples(rows: Sequence[Mapping[str, Any]], images_dir: Path) -> dict[str, dict[int, Path | None]]:
    found: dict[str, dict[int, Path | None]] = {kind: {} for kind in EXAMPLE_KINDS}
    for mark, sample in sorted((mark, sample) for sample, row in enumerate(rows) for mark in row[EXAMPLE_COLUMN]):
        path = images_dir / f"{mark}.png"
        found.setdefault(mark.rpartition("-")[0], {})[sample] = path if path.is_file() else None
    return found


def _texts(row: Mapping[str, Any], asked: Sequence[str], shown: Sequence[str]) -> tuple[str, ...]:
    texts = (*(row[name] for name in asked), "\n\n".join(row[name] for name in shown if row[name]))
    note = "\n... {:,} more characters"
    return tuple(text[:MAX_TEXT] + note.format(len(text) - MAX_TEXT) * (len(text) > MAX_TEXT) for text in texts)


def _numbers(rows: Sequence[Mapping[str, Any]], name: str, path: Path, fix: str) -> Floats:
    try:
        values = np.asarray([float("nan" if row[name] is None else row[name]) for row in rows])
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path} has a value in {name} that is no number: {error}; rebuild it with: {fix}") from None
    if broken := int((~np.isfinite(values)).sum()):
        raise UserError(
            f"{path}: {broken} of {len(values)} values of {name} are missing or not finite, expected "
            f"a number for every sample; rebuild it with: {fix}"
        )
    return values


def _read_curve(path: Path, fix: str) -> Floats:
    """A curve that `training.records.write_curves` wrote."""
    try:
        steps, values = np.loadtxt(path, comments=None, delimiter="\t", skiprows=1, ndmin=2).T
    except (OSError, ValueError) as error:
        raise damaged(path, {"the file": str(error)}, fix=fix) from None
    return np.stack([steps, values])
