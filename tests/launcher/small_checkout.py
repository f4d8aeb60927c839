"""A checkout with no more of the project than the launcher, for stages that a test writes itself, and its callers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

from stages.core.lineage import write_lineage
from stages.core.params import load_params
from stages.launcher.gpus import Gpu
from stages.launcher.pipeline import Request, declared_stages
from stages.planning.resolve import resolve_plan
from tests import ROOT
from tests.closure import import_closure

CALLER = {
    "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
    "HOME": os.environ["HOME"],
    "VIRTUAL_ENV": sys.prefix,
    "BAKEOFF_ENGINE": "process",
    "DVC_NO_ANALYTICS": "1",
    **dict.fromkeys(("GIT_CONFIG_GLOBAL", "DVC_GLOBAL_CONFIG_DIR", "DVC_SYSTEM_CONFIG_DIR"), "/nowhere"),
    **{f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}
"""The environment of a person without configuration of git and DVC, in a shell with .venv activated."""

PARAMS = load_params(ROOT / "params.yaml")


def request_of(workspace: Path, stage: str, *args: str, **known: Any) -> Request:
    """A request. known: fields, and what would follow from params.yaml or the machine, such as `network`."""
    names = {field.name for field in fields(Request)}
    given = {name: known.pop(name) for name in names & known.keys()}
    forced: type[Request] = type("Forced", (Request,), known)
    stages = given.pop("stages", None) or declared_stages(workspace)
    return forced(
        **{"params": PARAMS, "caller": {}, "workspace_dir": workspace, **given}, stage=stage, args=args, stages=stages
    )


def copy_code(workspace: Path, module: str = "stages.launcher.launch") -> None:
    """Copy a module with all that it imports, and their byte code: compiling is a third of a launcher's first start."""
    for path in import_closure(module):
        for each in filter(Path.exists, (ROOT / path, ROOT / cache_from_source(path))):
            copy = workspace / each.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(each, copy)  # with its time, which its byte code has too


def small_checkout(workspace: Path, *, pipeline: str | None = None, **stages: str) -> Path:
    """pipeline: dvc.yaml. stages: their code, by name. It has a base and a plan for r1-llm-only."""
    shutil.copytree(ROOT / "docker", workspace / "docker")
    copy_code(workspace)
    for task in (path.name for path in ROOT.glob("stages/tasks/[!_]*/")):
        copy_code(workspace, f"stages.tasks.{task}.sources")
    for path in ("params.yaml", "pyproject.toml", "stages/tasks/amr/predictions.py"):  # the last is only looked for
        shutil.copy(ROOT / path, workspace / path)
    for name, code in stages.items():
        (workspace / "stages" / f"{name}.py").write_text(code, encoding="utf-8")
    if pipeline is not None:
        (workspace / "dvc.yaml").write_text(pipeline, encoding="utf-8")
    (workspace / ".gitignore").write_text("/data/\n/.venv\n/.bakeoff\n/notes\n__pycache__\n")
    (workspace / ".venv").symlink_to(sys.prefix)
    base = workspace / "data/bases/vlm"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    write_lineage(base, kind="base", name="vlm", source={"folder": "tiny"})
    plan = resolve_plan(load_params(workspace / "params.yaml"), "r1-llm-only", train_samples=32)
    plan.write(workspace / "data/runs/r1-llm-only/plan.yaml")
    return workspace


def run(workspace: Path, *command: str, code: int | None = 0, **environment: str) -> str:
    """The output of a command; it has to end with that exit code, if any is given."""
    ended = subprocess.run(
        command,
        cwd=workspace,
        env=CALLER | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert code in (None, ended.returncode), ended.stdout
    return ended.stdout


class Command:
    """A command that was started in a workspace, in a session of its own; its output goes to a file."""

    def __init__(self, workspace: Path, *command: str | Path, env: Mapping[str, str], **options: Any) -> None:
        self.workspace = workspace
        self.path = workspace.with_name(f"output-{time.monotonic_ns()}")
        with self.path.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=dict(env),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **{"cwd": workspace, "stdin": subprocess.DEVNULL, **options},
            )

    @property
    def output(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace")

    def until(self, pattern: str) -> str:
        """Wait until its output, or its launcher's, which may outlive it, matches; returns the first group."""
        wait_until(lambda: re.search(pattern, self.output) is not None, lambda: self.output)
        return "".join(re.findall(pattern, self.output)[:1])

    def ended(self) -> int:
        return self.process.wait()


def commit(workspace: Path) -> None:
    """All of the workspace, in git."""
    run(workspace, "git", "init", "--quiet")
    run(workspace, "git", "add", "--all")
    run(workspace, "git", "commit", "--quiet", "--message", "start")


def set_gpus(
    workspace: Path, *gpus: Gpu, failing: Mapping[str, int] | None = None, driver: str = "580.95.05"
) -> dict[str, Any]:
    """Let processes that are started in this folder see these GPUs; returns the variables that they need for it."""
    shutil.copy(Path(__file__).with_name("fake_pynvml.py"), workspace / "pynvml.py")
    state = {"gpus": [asdict(gpu) for gpu in gpus], "failing": failing or {}, "driver": driver}
    path = workspace / ".bakeoff/fake-gpus.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(state))
    return {"FAKE_NVML": str(path)}


def notes(workspace: Path) -> list[str]:
    """Lines that stages of a workspace have noted."""
    path = workspace / "notes"
    return path.read_text().splitlines() if path.exists() else []


def wait_until(is_so: Callable[[], bool], what: Callable[[], object] = str) -> None:
    """Fails, with `what`, if it is not so within ten minutes: a busy machine may take two to start a stage."""
    for _ in range(12_000):
        if is_so():
            return
        time.sleep(0.05)
    pytest.fail(f"it never came to be: {what()}")
