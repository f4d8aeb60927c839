"""Experiments of DVC as folders: which there are, and what each holds of a task's runs."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.provenance import records_dir
from stages.kit.memory_use import stage_memory_path
from stages.kit.reporting.runs import cards_dir

WORKSPACE = "workspace"
HIDDEN = r"^(data|stages)/.*|^(docker|params\.yaml)$|.*_(low|high)$"
"""Columns of `dvc exp show` left out: digests of files, and the ends of intervals."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    data_dir: Path
    """As a workspace's data/, with the cards of a task and the records of how they were made."""
    lock: Mapping[str, Any]
    """dvc.lock's entry of each stage."""

    def evaluated(self, task: str) -> list[str]:
        """The recipes and baselines that have a card."""
        return sorted(path.parent.name for path in cards_dir(self.data_dir, task).glob("*/metrics.json"))


def experiment_rows() -> list[dict[str, str]]:
    """The rows of `dvc exp show`: the workspace, the commit, its experiments, ended well or not."""
    asked = [sys.executable, "-m", "dvc", "exp", "show", "--csv", "--drop", HIDDEN]
    shown = subprocess.run(asked, capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise UserError(f"dvc cannot show its experiments: {shown.stderr.strip()}")
    return list(csv.DictReader(shown.stdout.splitlines()))


def named_revisions() -> tuple[dict[str, str], dict[str, str]]:
    """(revision by name of what ended well, state by name of what did not), of the workspace and HEAD's experiments."""
    ended, others = {WORKSPACE: WORKSPACE}, {}
    for row in experiment_rows():
        name = row["Experiment"] or row["rev"]
        if row["typ"] == "baseline":
            continue
        if row.get("State") in ("Success", "", None):
            ended[name] = row["rev"]
        else:
            others[name] = str(row["State"]).lower()
    return ended, others


def _read_lock(path: Path) -> dict[str, Any]:
    """dvc.lock's entry of each stage; empty if there is none."""
    return dict(YAML(typ="safe").load(path)["stages"]) if path.exists() else {}


def fetch(name: str, revision: str, task: str, folder: Path) -> Experiment:
    """What an experiment holds of a task's runs, copied below `folder`; the workspace is read where it is.

    Raises UserError for an unknown revision, and where DVC's cache lacks what it holds.
    """
    if revision == WORKSPACE:
        return Experiment(name=name, data_dir=Path("data"), lock=_read_lock(Path("dvc.lock")))
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
        lock = YAML(typ="safe").load(files.read_text("dvc.lock"))["stages"] if files.exists("dvc.lock") else {}
        for path in needed:
            if files.exists(path.as_posix()):
                target = data_dir / path.relative_to("data")
                target.parent.mkdir(parents=True, exist_ok=True)
                files.get(path.as_posix(), str(target), recursive=True)
    except (DvcException, SCMError, OSError) as error:
        raise UserError(
            f"experiment {name} cannot be read: {error}; where it was run elsewhere: dvc exp pull REMOTE {name}"
        ) from None
    return Experiment(name=name, data_dir=data_dir, lock=lock)
