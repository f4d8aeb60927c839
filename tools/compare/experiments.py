"""Experiments of DVC as folders: the runs of a task in each, and the conditions under which they were made."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ruamel.yaml import YAML

from stages.core.errors import FOREIGN, UserError, is_foreign, join_truncated, listed
from stages.core.lineage import json_digest, short
from stages.core.provenance import PROVENANCE_DIR, Provenance, read_provenance
from stages.planning.memory_use import stage_memory_path
from stages.reporting.runs import report_runs_dir
from stages.reporting.sections import flattened

WORKSPACE = "workspace"
SELECTION = "selection"
"""The split that settings are chosen by."""
SEED = "seed"
"""The setting in which experiments may differ whatever else is varied. Not a recipe's own: its base would be the same
under each."""
_EVALUATIONS = ("evaluate", "baseline", "exported")
_SOURCES = ("base", "guard", "prepare")
"""Stages with outputs that also come from outside the pipeline."""


class Condition(NamedTuple):
    """One of the things that scores depend on."""

    kind: Literal["setting of", "code of", "inputs of", "record of", "package", "file"]
    subject: str
    """A stage, or a run with its record; a package; a file that no stage makes, by its path."""
    setting: str = ""
    """Dotted path in params.yaml."""

    def __str__(self) -> str:
        if self.setting:
            return f"{self.subject}: {self.setting}"
        return self.subject if self.kind == "file" else f"{self.kind} {self.subject}"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    data_dir: Path
    """Has the layout of a workspace's data/, with the runs of a task and the launcher's records."""
    commit: str = ""
    """Git's, which has its params.yaml; empty for the workspace."""
    changed: str = ""
    """The first output of the workspace with runs of the task that is not as dvc.lock says; empty for others."""
    lock: Mapping[str, Any]
    """The stages of dvc.lock, by name: their settings, and the digests of what they read and wrote."""

    @cached_property
    def records(self) -> dict[str, Provenance]:
        """The launcher's record of each stage that ran, by the stage's name."""
        paths = sorted((self.data_dir / Path(PROVENANCE_DIR).name).rglob("*.json"))
        return {record.stage: record for record in map(read_provenance, paths)}

    def evaluated(self, task: str) -> list[str]:
        """The recipes and baselines that were evaluated."""
        return sorted(path.parent.name for path in report_runs_dir(self.data_dir, task).glob("*/metrics.json"))

    def on_selection(self, task: str) -> bool:
        """Whether its models were scored on the samples that settings are chosen by."""
        return any(
            condition.setting == "scored" and value == f'"{SELECTION}"'
            for condition, value in conditions(self, task).items()
        )


def comparable(
    task: str, names: Sequence[str], folder: Path, *, varied: str | None = None, with_first: bool = False
) -> tuple[list[Experiment], dict[str, str]]:
    """(the experiments that compare, the reason for which each other one is left out), copied below `folder`.

    names: the experiments to compare; empty for the workspace and all experiments of HEAD, of which the largest set is
        taken that all compare with each other.
    varied: pattern of the settings that are meant to differ beside the seed.
    with_first: whether that is a set with the first of them: the workspace, if it has a model of the task.
    Raises UserError if those named do not compare.
    """
    revisions, left_out = ({name: name for name in names}, {}) if names else named_revisions()
    fetched = [fetch(name, revision, task, folder) for name, revision in revisions.items()]
    if changed := next((each.changed for each in fetched if each.changed), ""):
        reason = f"its {changed} is not that of dvc.lock: rm -rf {changed} && dvc checkout {changed}"
        if names or with_first:
            raise UserError(f"{WORKSPACE} cannot be compared: {reason}; or make it again by dvc repro")
        left_out[WORKSPACE] = reason
    left_out |= {each.name: f"no model of task {task}" for each in fetched if not each.evaluated(task)}
    selecting = {each.name: each.on_selection(task) for each in fetched if each.name not in left_out}
    if not names and (varied or not all(selecting.values())):
        reason = f"{'not ' if varied else ''}scored on the selection split"
        left_out |= {name: reason for name, chosen_by in selecting.items() if chosen_by != bool(varied)}
    compared = [each for each in fetched if each.name not in left_out]
    if names and (by_condition := unlike(compared, task, varied)):
        lines = [
            f"{condition}: " + "; ".join(f"{value} ({', '.join(having)})" for value, having in by_value.items())
            for condition, by_value in by_condition.items()
        ]
        raise UserError(
            f"these experiments differ in more than {varied or 'the seed'}, which may explain a difference of their "
            f"scores:\n{listed(lines, 5)}"
        )
    fixed = {each.name: fixed_conditions(each, task, varied) for each in compared}
    differing = {
        one: {other: apart for other in fixed if (apart := _differing(fixed[one], fixed[other]))} for one in fixed
    }
    sets = [_alike(one, differing) for one in list(fixed)[: 1 if with_first else None]]
    chosen = max(sets, key=len, default=[])
    for other in (each for each in fixed if each not in chosen):
        unlike_it = next(one for one in chosen if other in differing[one])
        left_out[other] = f"unlike {unlike_it} in {join_truncated(differing[unlike_it][other])}"
    return [each for each in compared if each.name not in left_out], left_out


def left_out_words(reasons: Mapping[str, str]) -> str:
    names = {reason: [name for name in reasons if reasons[name] == reason] for reason in reasons.values()}
    return f"Left out: {'; '.join(f'{join_truncated(each)} ({reason})' for reason, each in names.items()) or 'none'}"


def named_revisions() -> tuple[dict[str, str], dict[str, str]]:
    """The workspace and HEAD's experiments: (revision by name of the finished, state by name of the others). Those of
    other commits have a state too."""
    command = [sys.executable, "-m", "dvc", "exp", "show", "--csv"]
    for _ in range(5):
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        if shown.returncode == 0:
            break
        time.sleep(2)  # DVC fails while the queue makes or removes the folder of an experiment
    else:
        said, _, _ = shown.stderr.partition("\n\nHaving any troubles?")
        reason = said.rpartition("ERROR: unexpected error - ")[2].strip()
        error = UserError(f"dvc cannot show its experiments: {reason}")
        raise UserError(f"{error.message}; {FOREIGN}") if is_foreign(error) else error
    finished, others = {WORKSPACE: WORKSPACE}, {}
    for row in csv.DictReader(shown.stdout.splitlines()):
        name = row["Experiment"] or row["rev"]
        if row["typ"] == "baseline":
            continue
        if row.get("State") in ("Success", "", None):
            finished[name] = row["rev"]
        else:
            state = str(row["State"]).lower()
            others[name] = "failed; dvc queue logs NAME says why" if state == "failed" else state
    reason = "of other commits than HEAD; EXPERIMENTS= names those to compare"
    return finished, others | dict.fromkeys(sorted(all_experiments() - finished.keys() - others.keys()), reason)


def all_experiments() -> set[str]:
    """The names of the experiments of all commits."""
    from dvc.repo import Repo
    from dvc.repo.experiments.utils import exp_refs_by_baseline

    with Repo() as repo:
        return {ref.name for of_commit in exp_refs_by_baseline(repo.scm).values() for ref in of_commit}


def fetch(name: str, revision: str, task: str, folder: Path) -> Experiment:
    """Copy what an experiment has of a task's runs below `folder`; the workspace is read in place.

    Raises UserError for an unknown revision, and if DVC's cache lacks a file.
    """
    if revision == WORKSPACE:
        path = Path("dvc.lock")
        lock = _stages(path.read_text()) if path.exists() else {}
        return Experiment(name=name, data_dir=Path("data"), changed=_changed_output(task), lock=lock)
    from dvc.api import DVCFileSystem
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError, resolve_rev
    from dvc_data.index import DataIndexDirError

    data_dir, data = folder / name / "data", Path("data")
    memory_dir = stage_memory_path(data, task, name="any", stage="any").parent.parent
    wanted = (report_runs_dir(data, task), Path(PROVENANCE_DIR), memory_dir)
    try:
        with Repo() as repo:
            commit = resolve_rev(repo.scm, revision)
            files = DVCFileSystem(rev=commit)  # it takes an unknown one for an empty folder
        lock = _stages(files.read_text("dvc.lock")) if files.exists("dvc.lock") else {}
        made = [Path(output["path"]) for entry in lock.values() for output in entry.get("outs", [])]
        # An output of a stage that has not run cannot be copied, nor a folder that it is in; nor one of a stage that
        # dvc.yaml no longer has, which DVC keeps in dvc.lock.
        for path in made:
            if any(path.is_relative_to(each) for each in wanted) and files.exists(path.as_posix()):
                target = data_dir / path.relative_to(data)
                target.parent.mkdir(parents=True, exist_ok=True)
                files.get(path.as_posix(), str(target), recursive=True)
    except (DvcException, SCMError, DataIndexDirError, OSError) as error:
        raise UserError(
            f"experiment {name} cannot be read: {error}; if it was run elsewhere: dvc exp pull REMOTE {name}"
        ) from None
    return Experiment(name=name, data_dir=data_dir, commit=commit, lock=lock)


def _changed_output(task: str) -> str:
    """The first output with runs of the task that is not as dvc.lock says; empty if all are, or are not here."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    runs_dir = report_runs_dir(Path("data"), task)
    try:
        with Repo() as repo:
            outs = [out for out in repo.index.outs if Path(out.def_path).is_relative_to(runs_dir)]
            return next((out.def_path for out in outs if out.hash_info and out.exists and out.changed_checksum()), "")
    except (DvcException, OSError) as error:
        raise UserError(f"the workspace cannot be read: {error}") from None


def _stages(lock: str) -> Mapping[str, Any]:
    stages: Mapping[str, Any] = YAML(typ="safe").load(lock)["stages"]
    return stages


def unlike(
    experiments: Sequence[Experiment], task: str, varied: str | None = None
) -> dict[Condition, dict[str, list[str]]]:
    """The conditions that are not the same in all experiments, apart from seeds: the experiments' names by its value.

    varied: pattern of the settings that are meant to differ too. A recipe that an experiment lacks is no difference.
    """
    names: dict[Condition, dict[str, list[str]]] = {}
    for experiment in experiments:
        for condition, value in fixed_conditions(experiment, task, varied).items():
            names.setdefault(condition, {}).setdefault(value, []).append(experiment.name)
    return {condition: by_value for condition, by_value in names.items() if len(by_value) > 1}


def fixed_conditions(experiment: Experiment, task: str, varied: str | None = None) -> dict[Condition, str]:
    """The conditions that experiments must share: all but the seed, and the settings of the pattern `varied`."""
    return {
        condition: value
        for condition, value in conditions(experiment, task).items()
        if (setting := condition.setting) != SEED and not (setting and varied and fnmatchcase(setting, varied))
    }


def conditions(experiment: Experiment, task: str, names: Sequence[str] | None = None) -> dict[Condition, str]:
    """Settings, code, data and packages of every stage behind the runs of a task, or behind those of some recipes."""
    lock, seen = experiment.lock, set()
    values: dict[Condition, str] = {}
    outputs = {stage: _digests(entry.get("outs", ())) for stage, entry in lock.items()}
    made = {path: stage for stage, paths in outputs.items() for path in paths}
    waiting = []
    for name in experiment.evaluated(task) if names is None else names:
        evaluations = [stage for kind in _EVALUATIONS if (stage := f"{kind}@{name}") in lock]
        values[Condition("record of", name)] = "yes" if evaluations else "none"
        waiting += evaluations
    while waiting:
        stage = waiting.pop()
        if stage in seen:
            continue
        seen.add(stage)
        for path, value in flattened(lock[stage].get("params", {}).get("params.yaml", {})):
            values[Condition("setting of", stage, path)] = json.dumps(value, ensure_ascii=False)
        if (record := experiment.records.get(stage)) and record.machine:
            values |= {Condition("package", name): version for name, version in record.machine.packages.items()}
        inputs = _digests(lock[stage].get("deps", ()))
        code = {path: digest for path, digest in inputs.items() if path.startswith("stages/")}
        values |= {Condition("code of", stage): short(json_digest(code)), Condition("inputs of", stage): "as made"}
        outside = outputs[stage] if stage.partition("@")[0] in _SOURCES else {}
        for path, digest in ((path, digest) for path, digest in inputs.items() if path.startswith("data/")):
            maker = next((made[each] for each in made if path == each or path.startswith(f"{each}/")), None)
            if maker is None:
                outside = {**outside, path: digest}
            elif outputs[maker].get(path, digest) != digest:
                values[Condition("inputs of", stage)] = f"{path} was replaced since"
            else:
                waiting.append(maker)
        values |= {Condition("file", path): short(digest) for path, digest in outside.items()}
    return dict(sorted(values.items(), key=lambda item: str(item[0])))


def _alike(reference: str, differing: Mapping[str, Container[str]]) -> list[str]:
    """The reference, and each further experiment that compares with all before it. differing: from each, by name."""
    chosen = [reference]
    for other in differing:
        if other != reference and not any(other in differing[one] for one in chosen):
            chosen.append(other)
    return chosen


def _differing(one: Mapping[Condition, str], other: Mapping[Condition, str]) -> list[str]:
    """The conditions that both have, with other values."""
    return [str(condition) for condition, value in one.items() if other.get(condition, value) != value]


def changed_settings(experiments: Sequence[Experiment], task: str) -> list[str]:
    """Dotted paths of the settings, apart from the seed, that params.yaml has not as experiments that compare ran with
    them."""
    locked: dict[str, Any] = {}
    for each in experiments:
        for stage in {condition.subject for condition in conditions(each, task) if condition.setting}:
            locked |= each.lock[stage]["params"]["params.yaml"]
    then = dict(flattened(locked))
    everything = flattened(YAML(typ="safe").load(Path("params.yaml").read_text(encoding="utf-8")))
    now = {path: value for path, value in everything if any(f"{path}.".startswith(f"{each}.") for each in locked)}
    changed = (path for path in then.keys() | now.keys() if then.get(path, ...) != now.get(path, ...))
    return sorted(path for path in changed if path != SEED)


def _digests(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """MD5 by path, of deps or outs in dvc.lock. Records of provenance have times, and are left out."""
    return {each["path"]: each["md5"] for each in entries if not each["path"].startswith(f"{PROVENANCE_DIR}/")}
