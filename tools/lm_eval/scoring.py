"""Scores of EleutherAI's lm-evaluation-harness, the optional package lm-eval, for a loaded model."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the harness, and the one of ours that it is to agree with."""

    heading: str
    documents: str
    """The kind of document, as the task's `documents` names it."""
    task: str
    """As its YAML file names it."""
    metric: str
    ours: str = ""
    """A key of metrics.json; empty where we have no such figure."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Score:
    value: float | None
    """None where probabilities of long answers are too small for the harness to add them up."""
    stderr: float | None
    """Of the mean over questions; None for a single one."""


def require_lm_eval() -> str:
    """The version of lm-eval. Raises UserError where it is not installed."""
    try:
        return version("lm-eval")
    except PackageNotFoundError:
        raise UserError(
            "lm-eval, EleutherAI's lm-evaluation-harness, is not installed; install it with: make setup EXTRAS=lm-eval"
        ) from None


def harness_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    figures: Sequence[Figure],
    *,
    tasks_dir: Path,
    documents_dir: Path,
    batch_size: int,
    max_new_tokens: int,
) -> list[Score]:
    """A score for each figure; a task of several figures is run once, and nothing is fetched.

    tasks_dir: holds the tasks' YAML files. documents_dir: where they find their documents; the working directory while
    these are read. Log-probabilities are computed in fp32, whatever the model's precision.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is meant: that the model comes loaded
    manager = TaskManager(include_path=str(tasks_dir.resolve()), include_defaults=False)
    with chdir(documents_dir):
        loaded = manager.load(list(dict.fromkeys(figure.task for figure in figures)))
    for task in loaded["tasks"].values():
        if task.OUTPUT_TYPE == "generate_until":
            task.set_config("generation_kwargs", {"max_gen_toks": max_new_tokens}, update=True)
    harness = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=2**30,  # the harness would cut a longer question at its beginning; our own cut was made before
        softmax_dtype="float32",
        add_bos_token=False,  # the chat template has put there what belongs there
    )
    with np.errstate(invalid="ignore"):  # 0/0, where probabilities are too small for a float
        results = evaluate(lm=harness, task_dict=loaded, log_samples=False)["results"]
    shutil.rmtree(documents_dir / ".cache", ignore_errors=True)  # the documents once more, as datasets keeps them
    return [
        Score(
            value=_number(results[figure.task][f"{figure.metric},none"]),
            stderr=_number(results[figure.task][f"{figure.metric}_stderr,none"]),
        )
        for figure in figures
    ]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, float | int) and math.isfinite(value) else None
