"""Experiments of DVC as folders: the cards of a task's runs in each, and the conditions under which they were made."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.core.errors import UserError, join_truncated, listed
from stages.core.provenance import provenance_of_run, records_dir
from stages.kit.planning.memory_use import stage_memory_path
from stages.kit.planning.plan import read_plan
from stages.kit.reporting.runs import cards_dir
from stages.kit.reporting.sections import plan_settings

WORKSPACE = "workspace"
SELECTION = "selection"
"""The split that settings are chosen by."""
SEED = "seed"
"""The setting in which experiments may differ whatever else is varied. Not a recipe's own: its base would be the same
under each."""
_PLAN = "plan of its card: "
_SOURCES = ("base", "prepare")
"""Stages with outputs that also come from outside the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    data_dir: Path
    """Has the layout of a workspace's data/, with the cards of a task and the records of their stages."""
    lock: Mapping[str, Any]
    """dvc.lock's entry of each stage."""

    def evaluated(self, task: str) -> list[str]:
        """The recipes and baselines that have a card."""
        return sorted(path.parent.name for path in cards_dir(self.data_dir, task).glob("*/metrics.json"))

    def on_selection(self, task: str) -> bool:
        """Whether its models were scored on the samples that settings are chosen by."""
        facts = conditions(self, task).items()
        return any(fact.endswith(": scored") and value == f'"{SELECTION}"' for fact, value in facts)


def comparable(
    task: str, names: Sequence[str], folder: Path, *, varied: str | None = None
) -> tuple[list[Experiment], dict[str, str]]:
    """(the experiments that compare, the reason for which each other one is left out), copied below `folder`.

    names: the experiments to compare; empty for the workspace and all experiments of HEAD.
    varied: pattern of the settings that are meant to differ beside the seed.
    Raises UserError if none has a model of the task, and if those named do not compare.
    """
    revisions, left_out = ({name: name for name in names}, {}) if names else named_revisions()
    found = [fetch(name, revision, task, folder) for name, revision in revisions.items()]
    left_out |= {each.name: f"no model of task {task}" for each in found if not each.evaluated(task)}
    if varied and not names:
        left_out |= {each.name: "not scored on the selection split" for each in found if not each.on_selection(task)}
    found = [each for each in found if each.name not in left_out]
    if names and (differing := unlike(found, task, varied)):
        lines = [
            f"{fact}: " + "; ".join(f"{value} ({', '.join(having)})" for value, having in by_value.items())
            for fact, by_value in differing.items()
        ]
        raise UserError(
            f"these experiments differ in more than {varied or 'the seed'}, which may explain a difference of their "
            f"scores:\n{listed(lines, 5)}"
        )
    for other in found[1:]:
        if differing := unlike([found[0], other], task, varied):
            left_out[other.name] = f"unlike {found[0].name} in {join_truncated([*differing])}"
    found = [each for each in found if each.name not in left_out]
    if not found:
        raise UserError(
            f"no experiment has a model of task {task} ({left_out_words(left_out)}); run: dvc repro compare@{task}"
        )
    return found, left_out


def left_out_words(reasons: Mapping[str, str]) -> str:
    return f"Left out: {', '.join(f'{name} ({reason})' for name, reason in reasons.items()) or 'none'}"


def named_revisions() -> tuple[dict[str, str], dict[str, str]]:
    """The workspace and HEAD's experiments: (revision by name of the finished, state by name of the others)."""
    command = [sys.executable, "-m", "dvc", "exp", "show", "--csv"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise UserError(f"dvc cannot show its experiments: {shown.stderr.strip()}")
    finished, others = {WORKSPACE: WORKSPACE}, {}
    for row in csv.DictReader(shown.stdout.splitlines()):
        name = row["Experiment"] or row["rev"]
        if row["typ"] == "baseline":
            continue
        if row.get("State") in ("Success", "", None):
            finished[name] = row["rev"]
        else:
            others[name] = str(row["State"]).lower()
    return finished, others


def fetch(name: str, revision: str, task: str, folder: Path) -> Experiment:
    """Copy what an experiment has of a task's runs below `folder`; the workspace is read in place.

    Raises UserError for an unknown revision, and if DVC's cache lacks a file.
    """
    yaml = YAML(typ="safe")
    if revision == WORKSPACE:
        lock = yaml.load(Path("dvc.lock"))["stages"] if Path("dvc.lock").exists() else {}
        return Experiment(name=name, data_dir=Path("data"), lock=lock)
    from dvc.api import DVCFileSystem
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError, resolve_rev

    data_dir = folder / name / "data"
    needed = [cards_dir(Path("data"), task), records_dir(Path("data"), task)]
    needed.append(stage_memory_path(Path("data"), task, name="any", stage="any").parent.parent)
    try:
        with Repo() as repo:
            files = DVCFileSystem(rev=resolve_rev(repo.scm, revision))  # it takes an unknown one for an empty folder
        lock = yaml.load(files.read_text("dvc.lock"))["stages"] if files.exists("dvc.lock") else {}
        for path in needed:
            if files.exists(path.as_posix()):
                target = data_dir / path.relative_to("data")
                target.parent.mkdir(parents=True, exist_ok=True)
                files.get(path.as_posix(), str(target), recursive=True)
    except (DvcException, SCMError, OSError) as error:
        raise UserError(
            f"experiment {name} cannot be read: {error}; if it was run elsewhere: dvc exp pull REMOTE {name}"
        ) from None
    return Experiment(name=name, data_dir=data_dir, lock=lock)


def unlike(experiments: Sequence[Experiment], task: str, varied: str | None = None) -> dict[str, dict[str, list[str]]]:
    """The conditions that are not the same in all experiments, apart from seeds: by fact, the names by its value.

    varied: pattern of the settings that are meant to differ too. A recipe that an experiment lacks is no difference.
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
    """Settings, code, data and packages behind the cards of a task, or behind those of some recipes.

    Keys: `STAGE: SETTING` for every stage that a card depends on; the path of every input that no stage makes, with its
    digest; `package NAME`.
    """
    facts = {}
    names = experiment.evaluated(task) if names is None else names
    made = [path for entry in experiment.lock.values() for path in _digests(entry.get("outs", []))]
    for stage in sorted(_stages(experiment, names)):
        entry = experiment.lock[stage]
        for settings in entry.get("params", {}).values():
            facts.update({f"{stage}: {path}": value for path, value in _flat(settings)})
        facts |= {path: digest for path, digest in _digests(entry.get("deps", [])).items() if not _within(path, made)}
        if stage.partition("@")[0] in _SOURCES:
            facts.update(_digests(entry.get("outs", [])))
    facts = {fact: value for fact, value in facts.items() if "provenance/" not in fact}
    cards = cards_dir(experiment.data_dir, task)
    for name in names:
        recorded = any(f"{kind}@{name}" in experiment.lock for kind in ("evaluate", "baseline"))
        facts[f"record of {name} in dvc.lock"] = "yes" if recorded else "none"
        if (cards / name / "plan.yaml").exists():  # also of a stale card, which dvc.lock does not describe
            plan = plan_settings(read_plan(name, runs_dir=cards))
            facts |= {f"{name}: {_PLAN}{path}": value for path, value in plan.items() if path != SEED}
        for record in provenance_of_run(records_dir(experiment.data_dir, task), name):
            packages = record.machine.packages if record.machine else {}
            facts |= {f"package {package}": version for package, version in packages.items()}
    return facts


def _stages(experiment: Experiment, names: Sequence[str]) -> set[str]:
    """The stages that evaluated the names, and all that they depend on, except `check`, which reads every setting."""
    makers = {path: stage for stage, entry in experiment.lock.items() for path in _digests(entry.get("outs", []))}
    waiting = [f"{kind}@{name}" for name in names for kind in ("evaluate", "baseline")]
    seen: set[str] = set()
    while waiting:
        stage = waiting.pop()
        if stage in seen or stage == "check" or stage not in experiment.lock:
            continue
        seen.add(stage)
        made = (_within(path, makers) for path in _digests(experiment.lock[stage].get("deps", [])))
        waiting += [makers[path] for path in made if path]
    return seen


def _within(path: str, outputs: Sequence[str] | Mapping[str, str]) -> str | None:
    """The output that a path is, or is below; None if no stage made it."""
    return next((output for output in outputs if path == output or path.startswith(f"{output}/")), None)


def _digests(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {entry["path"]: str(entry.get("md5") or entry.get("hash")) for entry in entries}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)
