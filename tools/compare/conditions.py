"""Differences between experiments in settings, data, code and packages, as DVC and the launcher recorded them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from stages.core.provenance import provenance_of_run, records_dir
from stages.kit.planning.plan import read_plan
from stages.kit.reporting.runs import cards_dir
from stages.kit.reporting.sections import plan_settings
from tools.compare.experiments import Experiment

SEED = "seed"
"""The setting in which experiments may differ whatever else is varied. Not a recipe's own: what it starts from would be
the same under each."""
_PLAN = "plan of its card: "
_SOURCES = ("base", "prepare")
"""Stages whose outputs come from outside too."""


def unlike(experiments: Sequence[Experiment], task: str, varied: str | None = None) -> dict[str, dict[str, list[str]]]:
    """What is not the same in all of them, seeds left out: by fact, the experiments' names by its value.

    varied: pattern of the settings that are meant to differ too.

    A recipe that an experiment does not have is no difference.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for experiment in experiments:
        for fact, value in conditions(experiment, task).items():
            _, is_setting, setting = fact.partition(": ")
            meant = varied and (fnmatchcase(setting, varied) or setting.startswith(_PLAN))
            if not (is_setting and (setting == SEED or meant)):
                found.setdefault(fact, {}).setdefault(value, []).append(experiment.name)
    return {fact: by_value for fact, by_value in found.items() if len(by_value) > 1}


def conditions(experiment: Experiment, task: str, names: Sequence[str] | None = None) -> dict[str, str]:
    """Of every stage that the cards of a task come from, or those of some recipes: `STAGE: SETTING`, the digest by path
    of what no stage made (code, and data from outside), and the version of each package."""
    facts = {}
    names = experiment.evaluated(task) if names is None else names
    for stage in sorted(_stages(experiment, names)):
        entry = experiment.lock[stage]
        for settings in entry.get("params", {}).values():
            facts.update({f"{stage}: {path}": value for path, value in _flat(settings)})
        made = {path for other in experiment.lock.values() for path in _digests(other.get("outs", []))}
        facts |= {path: digest for path, digest in _digests(entry.get("deps", [])).items() if not _maker(path, made)}
        if stage.partition("@")[0] in _SOURCES:
            facts.update(_digests(entry.get("outs", [])))
    facts = {fact: value for fact, value in facts.items() if "provenance/" not in fact}
    cards = cards_dir(experiment.data_dir, task)
    for name in names:
        recorded = any(f"{kind}@{name}" in experiment.lock for kind in ("evaluate", "baseline"))
        facts[f"record of {name} in dvc.lock"] = "yes" if recorded else "none"
        if (cards / name / "plan.yaml").exists():  # a card that was left behind says what dvc.lock no longer does
            plan = plan_settings(read_plan(name, runs_dir=cards))
            facts |= {f"{name}: {_PLAN}{path}": value for path, value in plan.items() if path != SEED}
    return facts | _packages(experiment, task, names)


def _stages(experiment: Experiment, names: Sequence[str]) -> set[str]:
    """Those that evaluated, and all that came before; but not `check`, which reads every setting there is."""
    makers = {path: stage for stage, entry in experiment.lock.items() for path in _digests(entry.get("outs", []))}
    waiting = [f"{kind}@{name}" for name in names for kind in ("evaluate", "baseline")]
    seen: set[str] = set()
    while waiting:
        stage = waiting.pop()
        if stage in seen or stage == "check" or stage not in experiment.lock:
            continue
        seen.add(stage)
        made = (_maker(path, makers) for path in _digests(experiment.lock[stage].get("deps", [])))
        waiting += [makers[path] for path in made if path]
    return seen


def _maker(path: str, made: Mapping[str, Any] | set[str]) -> str | None:
    """Which of the outputs a path is, or lies in; None for what no stage made."""
    return next((out for out in made if path == out or path.startswith(f"{out}/")), None)


def _digests(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {entry["path"]: str(entry.get("md5") or entry.get("hash")) for entry in entries}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)


def _packages(experiment: Experiment, task: str, names: Sequence[str]) -> dict[str, str]:
    """Version of each package that the stages could import, as far as they left records."""
    folder = records_dir(experiment.data_dir, task)
    records = [record for name in names for record in provenance_of_run(folder, name)]
    machines = [record.machine for record in records if record.machine]
    return {f"package {name}": version for machine in machines for name, version in machine.packages.items()}
