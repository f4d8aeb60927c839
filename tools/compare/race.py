"""A race of a task's recipes to be called the best: rounds of seeds through DVC's queue. Behind make compare RACE=0.03.

A race keeps no state of its own: each look is computed from the first so many seeds of each recipe, in order, so that
one that was interrupted goes on from the experiments that there are. Its rules: reporting/evidence.py, Race.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import psutil
from rich.console import Console
from rich.text import Text

from stages.core.errors import UserError
from stages.core.params.schema import Params
from stages.reporting.compare import TaskReport, evidence_of, groups_of
from stages.reporting.evidence import LOOK_LEVELS, LOOKS, Race, summarize
from stages.reporting.runs import Run, different_models, read_run, refuse_different_samples
from stages.reporting.tables import seconds_text
from tools.compare.experiments import Experiment

BySeed = Mapping[str, Mapping[int, Run]]
"""The runs of each recipe, by seed."""


class Standing(NamedTuple):
    words: list[str]
    """A sentence a look."""
    missing: Mapping[int, tuple[str, ...]]
    """The recipes to train next under each seed; empty if the race has ended."""


def racing_recipes(params: Params, task: str) -> list[str]:
    """Raises UserError if there are no two, or if one of them would have the same seed in each round."""
    recipes = [name for name, recipe in params.recipes.items() if recipe.task == task]
    if len(recipes) < 2:
        raise UserError(f"a race takes two recipes or more; params.yaml has {len(recipes)} of task {task}")
    if fixed := [name for name in recipes if params.recipes[name].seed is not None]:
        raise UserError(f"a race varies the seed, and these have their own: recipes.{fixed[0]}.seed; set it to null")
    return recipes


def runs_by_seed(params: Params, report: TaskReport, experiments: Sequence[Experiment]) -> dict[str, dict[int, Run]]:
    """The runs of the task's recipes that a race can use. Raises UserError if they are not of the same samples."""
    by_recipe = {}
    for name in racing_recipes(params, report.task):
        read = (read_run(params, report, name, each.data_dir) for each in experiments)
        runs = different_models([run for run in read if run])
        by_recipe[name] = {run.plan.seed: run for run in runs if run.plan}
    refuse_different_samples([run for of_recipe in by_recipe.values() for run in of_recipe.values()])
    return by_recipe


def standing(report: TaskReport, runs: BySeed, seeds: Sequence[int], matters: float) -> Standing:
    """The looks that the runs allow, and what is to be trained for the next one."""
    names, primary = list(runs), report.primary
    words: list[str] = []
    race, counts = Race(len(names), matters, primary.higher_is_better), [0] * len(names)
    for number, level in zip(LOOKS, LOOK_LEVELS, strict=True):
        racing = [name for name, still in zip(names, race.racing[0], strict=True) if still]
        lacking = {seed: tuple(name for name in racing if seed not in runs[name]) for seed in seeds[:number]}
        if missing := {seed: recipes for seed, recipes in lacking.items() if recipes}:
            return Standing(words, missing)
        counts = [number if name in racing else count for name, count in zip(names, counts, strict=True)]
        trained = [
            np.stack([evidence_of(primary, runs[name][seed]) for seed in seeds[:count]])[None]
            for name, count in zip(names, counts, strict=True)
        ]
        groups = groups_of(primary, runs[names[0]][seeds[0]])
        race.look(summarize(trained, primary.statistic, groups), level)
        leader = names[int(race.leader[0])]
        out = [name for name in racing if not race.racing[0][names.index(name)]]
        dropped = f" Out of the race: {', '.join(out)}." if out else ""
        if race.done[0]:
            ended = f"After {number} seeds: {leader} is the best recipe, or within {matters:g} of the best."
            sure = f"At most one race in twenty names a worse one. {sum(counts)} trainings decided it."
            return Standing([*words, f"{ended} {sure}"], {})
        words.append(f"After {number} seeds {leader} leads.{dropped}")
    undecided = f"{LOOKS[-1]} seeds do not show whether {leader} is within {matters:g} of the best"
    return Standing([*words, f"{undecided}; a larger difference that matters, or more samples, would."], {})


def cost_words(runs: BySeed, seeds: Sequence[int]) -> str:
    """The most that a race may still cost, from what its trainings took so far."""
    most = len(runs) * len(seeds)
    known = [run for by_seed in runs.values() for seed, run in by_seed.items() if seed in seeds]
    times = [run.training.train_seconds for run in known if run.training]
    words = f"At most {most} trainings ({len(runs)} recipes under {len(seeds)} seeds), of which {len(known)} are there"
    left = (most - len(known)) * median(times) if times else None
    took = f"one took {seconds_text(median(times))}, so the others take {seconds_text(left)} at most" if left else ""
    return ", ".join(filter(None, [words, took])) + "."


def queue(missing: Mapping[int, Sequence[str]], baselines: Sequence[str], console: Console) -> None:
    """Queue an experiment for each seed."""
    together: dict[tuple[str, ...], list[int]] = {}
    for seed, recipes in missing.items():
        together.setdefault(tuple(recipes), []).append(seed)
    for recipes, seeds in together.items():
        console.print(Text(f"Training {', '.join(recipes)} under seeds {', '.join(map(str, seeds))}."), soft_wrap=True)
        targets = [*(f"baseline@{name}" for name in baselines), *(f"evaluate@{name}" for name in recipes)]
        dvc("exp", "run", "--queue", "-S", f"seed={','.join(map(str, seeds))}", *targets)


def has_workers() -> bool:
    """Whether a process runs DVC's queue. One that stops after its experiment no longer answers `dvc queue status`."""
    processes = [each.info for each in psutil.process_iter(["cmdline", "cwd"])]
    return any("queue-worker" in (each["cmdline"] or ()) and each["cwd"] == str(Path.cwd()) for each in processes)


def dvc(*arguments: str) -> None:
    """Run a command of DVC's, which waits for the lock of a running experiment."""
    # The queue's worker is started as `dvc`; where PATH has none, DVC waits for it forever.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, env=environment, check=False)
