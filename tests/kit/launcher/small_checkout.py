"""A checkout with no more of the project than the launcher, for stages that a test writes itself."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from stages.core.lineage import write_lineage
from stages.core.params.load import load_params
from stages.kit.planning.plan import resolve_plan, write_plan
from tests import ROOT
from tests.closure import import_closure


def copy_launcher(workspace: Path) -> None:
    """What `docker/run` needs, without params.yaml and dvc.yaml."""
    shutil.copytree(ROOT / "docker", workspace / "docker")
    for path in import_closure("stages.kit.launcher.launch"):
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, workspace / path)


def small_checkout(workspace: Path, *, pipeline: str, **stages: str) -> Path:
    """pipeline: dvc.yaml. stages: their code, by name. It has a base and a plan for r1-llm-only."""
    copy_launcher(workspace)
    for path in ("params.yaml", "pyproject.toml"):
        shutil.copy(ROOT / path, workspace / path)
    for name, code in stages.items():
        (workspace / "stages" / f"{name}.py").write_text(code, encoding="utf-8")
    (workspace / "dvc.yaml").write_text(pipeline, encoding="utf-8")
    (workspace / ".gitignore").write_text("/data/\n/.venv\n/.bakeoff\n__pycache__\n")
    (workspace / ".venv").symlink_to(sys.prefix)
    base = workspace / "data/bases/vlm"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    write_lineage(base, kind="base", name="vlm", source={"random": "tiny"})
    plan = resolve_plan(load_params(workspace / "params.yaml"), "r1-llm-only", train_samples=32)
    write_plan(plan, workspace / "data/runs/r1-llm-only/plan.yaml")
    return workspace
