"""Results in Weights & Biases: figures, examples and the model's digest of an evaluation; the table of a comparison.

Offline runs are in .bakeoff/tracking, for reading there or for `wandb sync`. No weights are ever sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import UserError
from stages.core.lineage import LINEAGE_FILE, Lineage, lineage_text
from stages.core.params.schema import TrackingParams
from stages.reporting.tables import Table, csv_rows
from stages.training.records import set_up_tracking

if TYPE_CHECKING:
    import wandb


def track_evaluation(
    tracking: TrackingParams,
    name: str,
    metrics: Mapping[str, Any],
    examples: Sequence[Mapping[str, Any]],
    examples_dir: Path,
    *,
    model: Lineage,
) -> None:
    """Send an evaluation, if wandb is among the trackers.

    metrics: of metrics.json; they become the run's summary, and its table `metrics`. The model is an artifact with its
    digest and its lineage, without its weights. examples: rows of predictions.parquet; the table `examples`.
    """
    if "wandb" not in tracking.to:
        return
    with _tracked_run(tracking, f"{name}-evaluation", job_type="evaluate", group=name) as run:
        import wandb

        run.summary.update(dict(metrics))
        images = {f"examples/{path.stem}": wandb.Image(str(path)) for path in sorted(examples_dir.glob("*.png"))}
        shown = _table(list(examples[0]), [list(row.values()) for row in examples])
        run.log({"metrics": _table(["figure", "value"], [*metrics.items()]), "examples": shown, **images})
        artifact = wandb.Artifact(name, type="model", metadata={"digest": model.digest})
        with artifact.new_file(LINEAGE_FILE) as file:
            file.write(lineage_text(model))
        run.log_artifact(artifact)


def track_comparison(tracking: TrackingParams, task: str, table: Table) -> None:
    """Send the table of comparison.csv, if wandb is among the trackers."""
    if "wandb" not in tracking.to:
        return
    with _tracked_run(tracking, f"{task}-comparison", job_type="compare", group=task) as run:
        header, *rows = csv_rows(table)
        run.log({"comparison": _table(header, rows)})


@contextmanager
def _tracked_run(tracking: TrackingParams, name: str, *, job_type: str, group: str) -> Iterator[wandb.Run]:
    """Raises UserError if wandb cannot send, or has no key."""
    import wandb  # a third of a second

    run_name = set_up_tracking(tracking, name)
    settings = wandb.Settings(console="off", quiet=True)
    try:
        with wandb.init(name=run_name, job_type=job_type, group=group, settings=settings) as run:
            yield run
    except wandb.Error as error:
        raise UserError(
            f"Weights & Biases refused the results of {name}: {error}; log in with .venv/bin/wandb login, or track "
            "offline: -S tracking.wandb_mode=offline"
        ) from error


def _table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> wandb.Table:
    import wandb

    return wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
