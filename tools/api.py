"""Bakeoff from a notebook or a script.

Three calls: `predict_memory` predicts whether a recipe fits a GPU, `read_run` reads the results of a run, and
`compare_runs` compares the runs of a task, as `make plan` and `make report` do. They write nothing, need no GPU and no
network, and read the checkout in the working directory. A user's fault raises stages.core.errors.UserError.

    >>> from tools.api import compare_runs, predict_memory, read_run, table_text

Does r1-llm-only fit a card of 24 GB, and how is it run there?

    >>> predicted = predict_memory("r1-llm-only", profile="qwen2-vl-7b", gpu=24)
    >>> predicted.memory.verdict, predicted.memory.prediction.total_bytes < predicted.memory.usable_bytes
    ('fits', True)
    >>> print(predicted.command)
    dvc exp run --temp -S profile=qwen2-vl-7b -S gpu=24 evaluate@r1-llm-only

A run has its metrics, and the scores of each sample as arrays:

    >>> run = read_run("r1-llm-only")
    >>> run.columns["iou"].shape == (len(run.sample_ids),)
    True
    >>> bool(abs(run.columns["iou"].mean() - run.metrics["mean_iou"]) < 1e-6)
    True

Is it better than its base, and which is best?

    >>> comparison = compare_runs("detection")
    >>> comparison.best.score.mean == max(each.score.mean for each in comparison.evaluated)
    True
    >>> next(each.words for each in comparison.insights if each.topic == "r1-llm-only against its base")
    'the model of r1-llm-only is better than that of base-vlm by ...'
    >>> print(table_text(comparison))
    Model ...

Importing this is quick; the first call loads torch or numpy. Like every module below `stages` it sets
TORCHDYNAMO_DISABLE=1 if that is not set (stages/core/__init__.py), which switches torch.compile off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import UserError
from stages.core.params import load_params
from stages.core.records import obtain

if TYPE_CHECKING:
    from stages.reporting.compare import Comparison
    from stages.reporting.runs import Run
    from tools.plan import RecipeMemory

__all__ = ["compare_runs", "predict_memory", "read_run", "table_text"]


def predict_memory(
    recipe: str, *, profile: str | None = None, gpu: float | str | None = None, changes: Sequence[str] = ()
) -> RecipeMemory:
    """Memory and time that are predicted of a recipe on one device, in 10 to 20 seconds.

    profile: of params.yaml; None for the active one.
    gpu: a size in GB, as cards are sold, or a card by name: 24, "24GB", "RTX 3090"; None for that of params.yaml.
    changes: `KEY.KEY=VALUE`, in place of values of params.yaml.
    Returns tools/plan.py's RecipeMemory, which `make plan JSON=1` prints.
    Raises UserError for an unknown recipe, profile or card, for a base of unknown geometry, for a GPU if the profile
    runs on a CPU, and for none if it does not.
    """
    from tools.plan import predictions_for

    return predictions_for(profile, gpu, changes).recipe_memory(recipe)[0]


def read_run(name: str) -> Run:
    """The last evaluation of a recipe or a baseline, with the fields of stages/reporting/runs.py.

    `metrics` is metrics.json; `columns` has an array (samples,) for each score of a sample that its task compares by,
    in the order of `sample_ids`. `plan`, `training` and `certificate` describe its training and merge, and are None for
    a baseline; `curves` has the curves of its training by name.
    Raises UserError for an unknown name, if the model has not been evaluated, and if its files are damaged.
    """
    from stages.reporting import runs
    from stages.reporting.compare import task_report

    params = load_params()
    task = params.subject(name).task
    run = runs.read_run(params, task_report(params, task), name, Path("data"))
    if run is None:
        raise UserError(f"{name} has not been evaluated; {obtain(params.evaluation_stage(name))}")
    return run


def compare_runs(task: str) -> Comparison:
    """The comparison of a task's models as they were last evaluated, with the fields of reporting/compare.py.

    `evaluated` has the models that were run, in the order of params.yaml, each with its `score` by the primary metric:
    `mean` and 95% `interval`. `best` is the best one, `conclusive` says whether the evidence is enough to call it that,
    and `insights` has the verdicts on the task's questions.
    Raises UserError if nothing was run, or if the runs cannot be compared.
    """
    from stages.reporting.compare import compare, read_contenders, task_report

    params = load_params()
    report = task_report(params, task)
    return compare(report, read_contenders(params, report, [Path("data")]))


def table_text(comparison: Comparison) -> str:
    """The table of a comparison and what follows from it, as data/report/TASK/table.txt has them."""
    from stages.reporting.sections import comparison_text

    return comparison_text(comparison).strip() + "\n"
