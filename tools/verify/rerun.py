"""A stage run again, aside: the same launcher, code and inputs, in a workspace of its own that is thrown away."""

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
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory

from ruamel.yaml import YAML

from stages.core.dvc_cache import cache_dir
from stages.core.errors import UserError, listed
from stages.core.params.load import load_params
from stages.core.params.schema import Params
from stages.core.provenance import Provenance, read_provenance
from stages.core.signals import heeded
from stages.kit.launcher.launch import source_of
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from stages.kit.launcher.process import forwarded_signals
from stages.kit.launcher.witness import SEEN_BY_STAGES
from tools.verify.differences import Comparison, compare_outputs

ASIDE_DIR = Path(".bakeoff/verify")
"""In the workspace: on the file system of the inputs, so that they need no copy."""

_KEEP_OUT = ("DVC_ROOT", "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
"""Of the caller's environment: what would lead the launcher away from where it is."""


@dataclass(frozen=True, kw_only=True)
class Rerun:
    stage: str
    comparison: Comparison
    """What the workspace has first, what came out now second."""
    unlike: tuple[str, ...]
    """In what the two runs were not the same, by their records: what a difference may come from."""


def rerun(workspace_dir: Path, name: str) -> Rerun:
    """Run the stage of that name (train@r1-llm-only) once more, and compare what comes out with what is here.

    Raises UserError where there is no such stage, where its inputs or outputs are not here, or where it fails.
    """
    stage = find_stage(workspace_dir, name)
    missing = [path for path in (*stage.inputs("data"), *stage.written) if not (workspace_dir / path).exists()]
    if missing:
        raise UserError(
            f"{name} cannot be compared: of its inputs and outputs these are not here:\n{listed(missing)}\n"
            f"bring them with: dvc checkout; or make them with: dvc repro {name}"
        )
    before = _record(workspace_dir, stage)  # first: whether it is damaged is to be known before hours have passed
    with _ending_as_after_ctrl_c(), workspace_aside(workspace_dir, stage) as aside_dir:
        _, *arguments = stage.command.split()
        code = _launch(aside_dir, arguments, stage)
        if code != 0:
            raise UserError(f"{name} failed when it was run again, with exit code {code}; its own message is above")
        names = ("the workspace", "what came out now")
        comparison = compare_outputs(workspace_dir, aside_dir, stage.written, names=names)
        now = _record(aside_dir, stage)
    return Rerun(stage=name, comparison=comparison, unlike=tuple(unlike(before, now)))


def find_stage(workspace_dir: Path, name: str) -> DeclaredStage:
    """Raises UserError where dvc.yaml has none of that name."""
    if not (workspace_dir / "dvc.yaml").exists():
        raise UserError("dvc.yaml is missing; run from the top of the repository")
    stages = {stage.name: stage for stage in declared_stages(workspace_dir)}
    if name not in stages:
        near = get_close_matches(name, list(stages), n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"dvc.yaml has no stage {name}{meant}; there are: {', '.join(stages)}")
    return stages[name]


@contextmanager
def workspace_aside(workspace_dir: Path, stage: DeclaredStage) -> Iterator[Path]:
    """The code, the settings and the stage's inputs as they are here, in a folder of their own for as long as it takes.

    Inputs are hard links where that can be: stages replace files, and never write into one.
    """
    params = load_params(workspace_dir / "params.yaml")
    source = _folder_source(stage, params)
    with _folder_aside(workspace_dir / ASIDE_DIR, stage.name) as root:
        # A source may be named as `../photographs`, and the name is part of the result: so it has to lead there.
        ups = os.path.normpath(source).split("/").count("..")
        aside_dir = root.joinpath(*("up" for _ in range(ups)), "workspace")
        aside_dir.mkdir(parents=True)
        for name in SEEN_BY_STAGES:
            _link_or_copy(workspace_dir / name, aside_dir / name, copy=True)
        for path in stage.inputs("data"):
            _link_or_copy(workspace_dir / path, aside_dir / path)
        if source and not os.path.lexists(place := Path(os.path.normpath(aside_dir / source))):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(Path(os.path.normpath(workspace_dir / source)))
        # Who waits for a GPU waits for the stages of the workspace too.
        for folder in (workspace_dir, aside_dir):
            (folder / ".bakeoff").mkdir(exist_ok=True)
        (workspace_dir / ".bakeoff/gpus").mkdir(exist_ok=True)
        (aside_dir / ".bakeoff/gpus").symlink_to(workspace_dir / ".bakeoff/gpus")
        # Links of DVC in the source lead into the cache of the workspace.
        (aside_dir / ".dvc").mkdir()
        cache = cache_dir(workspace_dir.resolve()).parents[1]
        (aside_dir / ".dvc/config").write_text(f"[cache]\n    dir = {cache}\n", encoding="utf-8")
        if params.tracking.wandb:
            _switch_tracking_off(aside_dir / "params.yaml")
        yield aside_dir


@contextmanager
def _folder_aside(aside_dir: Path, name: str) -> Iterator[Path]:
    """A folder of its own, removed in the end; so is what killed runs left, whose locks nobody holds any more."""
    aside_dir.mkdir(parents=True, exist_ok=True)
    for lock_path in aside_dir.glob("*/.lock"):
        with suppress(BlockingIOError, FileNotFoundError), lock_path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
    with (
        TemporaryDirectory(dir=aside_dir, prefix=f"{name}-", ignore_cleanup_errors=True) as root,
        Path(root, ".locking").open("a") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(root, ".locking").rename(Path(root, ".lock"))  # so that nobody sees it unlocked
        yield Path(root)


def unlike(before: Provenance | None, now: Provenance | None) -> Iterator[str]:
    """What two runs of a stage did not have in common, in words."""
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
    }
    yield from (what for what, (one, other) in facts.items() if one != other)
    for one, other in ((before.engine, now.engine), (before.device, now.device)):
        if one != other:
            yield f"{one} against {other}"


def _launch(aside_dir: Path, arguments: list[str], stage: DeclaredStage) -> int:
    """Run the stage by its launcher, to its end; who asks this process to end, asks the stage."""
    environment = {name: value for name, value in os.environ.items() if name not in _KEEP_OUT}
    # The launcher then ends with whoever called it, as with dvc.
    environment |= {"DVC_STAGE": stage.name, "BAKEOFF_CALLER": str(os.getpid())}
    with forwarded_signals() as signals:
        process = subprocess.Popen(
            [sys.executable, "-m", "stages.kit.launcher.launch", *arguments],
            cwd=aside_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C reaches it once, from here
        )
        signals.forward_to(process)
        return process.wait()


@contextmanager
def _ending_as_after_ctrl_c() -> Iterator[None]:
    """Whoever asks this process to end, and however: what it has put aside is removed first."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _record(workspace_dir: Path, stage: DeclaredStage) -> Provenance | None:
    path = workspace_dir / (stage.provenance or "")
    return read_provenance(path) if path.is_file() else None


def _folder_source(stage: DeclaredStage, params: Params) -> str:
    """The relative path of the folder that a stage reads beside its declared inputs; "" for none."""
    _, kind, *args = stage.command.split()
    where = source_of(kind, tuple(args), params).partition("folder:")[2]
    return "" if Path(where).is_absolute() else where


def _link_or_copy(source: Path, place: Path, *, copy: bool = False) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)

    def put(file: str, target: str) -> str:
        if not copy:
            try:
                os.link(os.path.realpath(file), target)
            except OSError:  # another file system, or one without links
                pass
            else:
                return target
        return shutil.copyfile(file, target)

    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, place, copy_function=put, ignore=ignored, dirs_exist_ok=True)
    elif source.exists():
        put(str(source), str(place))


def _switch_tracking_off(path: Path) -> None:
    """A comparison is no run that anybody would want to see among others."""
    yaml = YAML()
    raw = yaml.load(path)
    raw["tracking"]["wandb"] = False
    yaml.dump(raw, path)
