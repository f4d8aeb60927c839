"""Runs a stage again with the same launcher, code and inputs, in a temporary workspace, and compares the outputs."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ruamel.yaml import YAML

from stages.core.documents import nearest
from stages.core.dvc_cache import cache_dir
from stages.core.errors import UserError, listed
from stages.core.params.load import load_params
from stages.core.provenance import Provenance, read_provenance
from stages.core.signals import handling
from stages.kit.launcher.needs import source_of
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from stages.kit.launcher.process import forwarded_signals
from stages.kit.launcher.provenance_recorder import SEEN_BY_STAGES
from tools.verify.differences import Comparison, compare_outputs

RERUN_DIR = Path(".bakeoff/verify")
"""In the workspace: on the file system of the inputs, so that they can be linked."""

_MISLEADING = ("DVC_ROOT", "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
"""Variables of the caller that would lead the launcher to another workspace."""


@dataclass(frozen=True, kw_only=True)
class Rerun:
    stage: str
    comparison: Comparison
    """The workspace's outputs first, those of the new run second."""
    unlike: tuple[str, ...]
    """What differs between the records of the two runs, and may be the reason for a difference."""


def rerun(workspace_dir: Path, name: str) -> Rerun:
    """Run the stage of that name (train@r1-llm-only) again, and compare its outputs with those in the workspace.

    Raises UserError where there is no such stage, where its inputs or outputs are missing, or where it fails.
    """
    stage = find_stage(workspace_dir, name)
    missing = [path for path in (*stage.inputs("data"), *stage.written) if not (workspace_dir / path).exists()]
    if missing:
        raise UserError(
            f"{name} cannot be compared: of its inputs and outputs these are not here:\n{listed(missing)}\n"
            f"bring them with: dvc checkout; or make them with: dvc repro {name}"
        )
    before = _record(workspace_dir, stage)  # refused now where it is damaged, not after hours
    # Signals that ask to end raise KeyboardInterrupt, as Ctrl-C does, so that temporary files are removed.
    with handling(signal.default_int_handler), temporary_workspace(workspace_dir, stage) as folder:
        code = _launch(folder, stage)
        if code != 0:
            raise UserError(f"{name} failed when it was run again, with exit code {code}; its own message is above")
        names = ("the workspace", "what came out now")
        comparison = compare_outputs(workspace_dir, folder, stage.written, names=names)
        return Rerun(stage=name, comparison=comparison, unlike=tuple(unlike(before, _record(folder, stage))))


def find_stage(workspace_dir: Path, name: str) -> DeclaredStage:
    """Raises UserError where dvc.yaml has none of that name."""
    stages = {stage.name: stage for stage in declared_stages(workspace_dir)}
    if name not in stages:
        known = ", ".join(stages) or "none"
        raise UserError(f"dvc.yaml has no stage {name}{nearest(name, stages)}; there are: {known}")
    return stages[name]


@contextmanager
def temporary_workspace(workspace_dir: Path, stage: DeclaredStage) -> Iterator[Path]:
    """A workspace with the code, the settings and the stage's inputs, removed in the end.

    Inputs are hard links where possible: stages replace files, and never write into one.
    """
    params = load_params(workspace_dir / "params.yaml")
    kind, name = stage.command.split()[1], stage.name.partition("@")[2]
    source = source_of(kind, name, params).partition("folder:")[2]
    with _temporary_folder(workspace_dir / RERUN_DIR, stage.name) as root:
        # The name of a relative source is part of the result, so `../photographs` has to lead there from here too.
        is_relative = source != "" and not Path(source).is_absolute()
        levels_up = os.path.normpath(source).split("/").count("..") if is_relative else 0
        folder = root.joinpath(*("up" for _ in range(levels_up)), "workspace")
        for path in (*SEEN_BY_STAGES, *stage.inputs("data")):
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
        if params.tracking.wandb:  # a comparison does not belong among tracked runs
            yaml = YAML()
            raw = yaml.load(folder / "params.yaml")
            raw["tracking"]["wandb"] = False
            yaml.dump(raw, folder / "params.yaml")
        yield folder


@contextmanager
def _temporary_folder(parent_dir: Path, name: str) -> Iterator[Path]:
    """A locked folder, removed in the end. Folders of killed runs, which nobody locks any more, are removed first."""
    parent_dir.mkdir(parents=True, exist_ok=True)
    for lock_path in parent_dir.glob("*/.lock"):
        with suppress(BlockingIOError, FileNotFoundError), lock_path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
    with (
        TemporaryDirectory(dir=parent_dir, prefix=f"{name}-", ignore_cleanup_errors=True) as root,
        Path(root, ".locking").open("a") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(root, ".locking").rename(Path(root, ".lock"))  # so that nobody sees it unlocked
        yield Path(root)


def unlike(before: Provenance | None, now: Provenance | None) -> Iterator[str]:
    """What differs between the records of two runs of a stage."""
    if before is None or now is None:
        yield "there is no record of how the workspace's own came about"
        return
    facts = {
        "the code of the stage": (before.code, now.code),
        "settings": (before.params, now.params),
        "the plan": (before.plan, now.plan),
        **{path: (before.inputs.get(path), digest) for path, digest in now.inputs.items()},
        "locked packages": (before.lock, now.lock),
        "the image": (before.image_digest, now.image_digest),
        "variables of the environment": (before.environment, now.environment),
        "the machine": (before.machine, now.machine),
        f"{before.engine} against {now.engine}": (before.engine, now.engine),
        f"{before.device} against {now.device}": (before.device, now.device),
    }
    yield from (what for what, (one, other) in facts.items() if one != other)


def _launch(folder: Path, stage: DeclaredStage) -> int:
    """Run the stage with its launcher; returns its exit code. Signals to this process go to the stage."""
    environment = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    # The launcher ends with this process, as it does with dvc.
    environment |= {"DVC_STAGE": stage.name, "BAKEOFF_CALLER": str(os.getpid())}
    command = [sys.executable, "-m", "stages.kit.launcher.launch", *stage.command.split()[1:]]
    with forwarded_signals() as signals:
        # Of its own process group: a Ctrl-C reaches it once, from here.
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, process_group=0)
        signals.forward_to(process.send_signal)
        return process.wait()


def _record(workspace_dir: Path, stage: DeclaredStage) -> Provenance | None:
    path = workspace_dir / (stage.provenance or "")
    return read_provenance(path) if path.is_file() else None


def _copy(source: Path, place: Path, *, link: bool) -> None:
    """A file or folder; nothing where the source is missing. link: by hard links, where the file system has them."""

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
