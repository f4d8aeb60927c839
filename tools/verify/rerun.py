"""Run a stage again with the same launcher, code and inputs, in a temporary workspace, and compare its outputs."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from stages.core.atomic import atomic_write
from stages.core.errors import UserError, listed, pluralize
from stages.core.params import load_params
from stages.core.provenance import Provenance, read_provenance
from stages.core.records import nearest, read_settings, yaml_text
from stages.core.signals import handling, interrupt
from stages.launcher.pipeline import DeclaredStage, cache_dir, declared_stages, source_of
from stages.launcher.process import forwarded_signals, start, wait_for
from stages.launcher.record import SEEN_BY_STAGES
from stages.planning.memory_use import StageMemory

_STAGE_MEMORY = tuple(each.name for each in fields(StageMemory) if each.name.endswith("_bytes"))
MEASURED = {
    "training.json": (
        *("train_seconds", "samples_per_second", "peak_memory_bytes", "reserved_memory_bytes"),
        *("gpu_utilization", "gpu_watts", "gpu_kwh"),
    ),
    "metrics.json": ("samples_per_second", "tokens_per_second", "memory_measured_gib", "memory_error"),
    # A stage's memory, below data/report/TASK/memory. A certificate of the same name has none of these keys.
    **dict.fromkeys(("train.json", "merge.json", "build.json", "export.json", "evaluate.json"), _STAGE_MEMORY),
    "model.sig": ("dsseEnvelope",),  # a signature has a random part
}
"""The keys of JSON files, by file name, that may differ between two runs of a stage: times, memory, signatures."""

_MISLEADING = ("DVC_ROOT", "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
"""Variables of the caller that would lead the launcher to another workspace."""


def rerun(workspace_dir: Path, name: str) -> int:
    """Run a stage (train@r1-llm-only) again and print which of its outputs differ; returns the exit code.

    Raises UserError for an unknown stage, for missing inputs or outputs, and if the stage fails.
    """
    stage, _ = stage_to_compare(workspace_dir, name)
    before = _record(workspace_dir, stage)  # refused now if it is damaged, not after hours
    with temporary_workspace(workspace_dir, stage) as folder:
        launch(folder, stage)
        different = unequal_files(workspace_dir, folder, stage.written)
        reasons = unlike(before, _record(folder, stage))
    if not different:
        click.echo(f"OK: {name} came out the same again, byte for byte, apart from measured times and memory")
        return 0
    click.echo(f"{name} came out DIFFERENT in {pluralize(len(different), 'file')}:")
    for path, where in different.items():
        click.echo(f"  {path}: {where}")
    click.echo(f"the records of the two runs differ in: {', '.join(reasons) or 'nothing'}")
    click.echo("make verify says whether the workspace still holds what its own run left")
    return 1


def stage_to_compare(workspace_dir: Path, name: str) -> tuple[DeclaredStage, dict[str, DeclaredStage]]:
    """The stage of that name, and all of dvc.yaml by name. Raises UserError for one without inputs or outputs here."""
    stages = {stage.name: stage for stage in declared_stages(workspace_dir)}
    if name not in stages:
        raise UserError(
            f"dvc.yaml has no stage {name}{nearest(name, stages)}; there are: {', '.join(stages) or 'none'}"
        )
    stage = stages[name]
    missing = [path for path in (*stage.inputs("data"), *stage.written) if not (workspace_dir / path).exists()]
    if missing:
        raise UserError(
            f"{name} cannot be compared: of its inputs and outputs these are not here:\n{listed(missing)}\n"
            f"bring them with: dvc checkout; or make them with: dvc repro {name}"
        )
    return stage, stages


def unequal_files(ours: Path, theirs: Path, outputs: tuple[str, ...]) -> dict[str, str]:
    """The files of the outputs that differ between two workspaces by more than MEASURED, each with its first
    difference."""
    different = {}
    places = [(folder, folder / output) for folder in (ours, theirs) for output in outputs]
    for name in sorted({file.relative_to(folder).as_posix() for folder, place in places for file in files_of(place)}):
        one, other = ours / name, theirs / name
        if not (one.is_file() and other.is_file()):
            different[name] = f"is only in {ours if one.is_file() else theirs}"
        elif not filecmp.cmp(one, other, shallow=False) and (where := _first_difference(one, other)):
            different[name] = where
    return different


def _first_difference(one: Path, other: Path) -> str:
    """Empty if two unequal files differ only in measured values."""
    if one.name in MEASURED:
        with suppress(ValueError, AttributeError):
            contents = [json.loads(path.read_text(encoding="utf-8")) for path in (one, other)]
            keys = [key for key in {**contents[0], **contents[1]} if key not in MEASURED[one.name]]
            differing = [key for key in keys if repr(contents[0].get(key)) != repr(contents[1].get(key))]
            return f"differs in {', '.join(differing)}" if differing else ""
    return "differs"


def files_of(output: Path) -> Iterator[Path]:
    """The file, or the files of the folder."""
    return (path for path in (output, *output.rglob("*")) if path.is_file())


def unlike(before: Provenance | None, now: Provenance | None) -> list[str]:
    """The names of what differs between the records of two runs of a stage."""
    if before is None or now is None:
        return ["everything that a record has, as the workspace has none of this stage"]
    facts = ("code", "params", "plan", "inputs", "lock", "image_digest", "environment", "machine", "engine", "device")
    return [fact for fact in facts if getattr(before, fact) != getattr(now, fact)]


@contextmanager
def temporary_workspace(
    workspace_dir: Path, stage: DeclaredStage, *, inputs: Sequence[str] = (), changes: Sequence[str] = ()
) -> Iterator[Path]:
    """A workspace below .bakeoff with the code, the settings and the stage's inputs, removed at the end, also after a
    signal that asks to end: it raises KeyboardInterrupt, as Ctrl-C does.

    Inputs are hard links if possible: stages replace files, and never write into one. inputs: others than the stage's.
    changes: of params.yaml.
    """
    params = load_params(workspace_dir / "params.yaml")
    kind, name = stage.command.split()[1], stage.name.partition("@")[2]
    source = source_of(kind, name, params).partition("folder:")[2]
    parent_dir = workspace_dir / ".bakeoff/verify"
    parent_dir.mkdir(parents=True, exist_ok=True)
    with (
        handling(interrupt),
        TemporaryDirectory(dir=parent_dir, prefix=f"{stage.name}-", ignore_cleanup_errors=True) as root,
    ):
        # The name of a relative source is part of the result, so `../photographs` has to lead there from here too.
        is_relative = source != "" and not Path(source).is_absolute()
        folder = Path(root, "up/up/up/up/workspace")
        for path in (*SEEN_BY_STAGES, *{*stage.inputs("data"), *inputs}):
            _copy(workspace_dir / path, folder / path, link=path.startswith("data"))
        if is_relative and not os.path.lexists(place := Path(os.path.normpath(folder / source))):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(Path(os.path.normpath(workspace_dir / source)))
        # The leases of GPUs, and the key that signs, are those of the workspace.
        (folder / ".bakeoff").mkdir()
        for own in ("gpus", "signing"):
            (workspace_dir / ".bakeoff" / own).mkdir(exist_ok=True)
            (folder / ".bakeoff" / own).symlink_to(workspace_dir / ".bakeoff" / own)
        # DVC's links in the source lead into the cache of the workspace.
        (folder / ".dvc").mkdir()
        cache = cache_dir(workspace_dir.resolve()).parents[1]
        (folder / ".dvc/config").write_text(f"[cache]\n    dir = {cache}\n", encoding="utf-8")
        if params.tracking.to:  # a comparison does not belong among tracked runs
            changes = [*changes, "tracking.to=[]"]
        if changes:
            params_path = folder / "params.yaml"
            atomic_write(yaml_text(read_settings(dict[str, Any], params_path, changes=changes)), params_path)
        yield folder


def _copy(source: Path, place: Path, *, link: bool) -> None:
    """Copy a file or folder, if it exists. link: by hard links, if the file system has them."""

    def copy_file(file: str, target: str) -> None:
        if link:
            with suppress(OSError):
                os.link(os.path.realpath(file), target)
                return
        shutil.copyfile(file, target)

    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, place, copy_function=copy_file, ignore=ignored, dirs_exist_ok=True)
    elif source.exists():
        copy_file(str(source), str(place))


def launch(folder: Path, stage: DeclaredStage) -> None:
    """Run the stage to its end. Raises UserError if it fails."""
    with launched(folder, stage) as process:
        pass
    if code := process.returncode:
        raise UserError(f"{stage.name} failed when it ran again, with exit code {code}; its own message is above")


@contextmanager
def launched(folder: Path, stage: DeclaredStage) -> Iterator[subprocess.Popen[bytes]]:
    """The stage while it runs, by its launcher; at the end of the block it is waited for. Signals to this process go to
    the stage."""
    environment = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    # The launcher ends with this process, as it does with dvc.
    environment |= {"DVC_STAGE": stage.name, "BAKEOFF_CALLER": str(os.getpid())}
    command = [sys.executable, "-m", "stages.launcher.launch", *stage.command.split()[1:]]
    with forwarded_signals() as signals:
        process = start(command, cwd=folder, env=environment)
        signals.forward_to(process.send_signal)
        yield process
        wait_for(process)


def _record(workspace_dir: Path, stage: DeclaredStage) -> Provenance | None:
    path = workspace_dir / (stage.provenance or "")
    return read_provenance(path) if path.is_file() else None
