"""A recipe at tiny size on the device, by the pipeline's own stages: all the way, twice, and killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.lineage import combined_digest, file_digest
from stages.core.signals import end_with_parent
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "profile": "tiny",
    "tracking.to": [],
    "checkpoints": {"every_minutes": None, "every_steps": 1},
    **{f"profiles.tiny.datasets.{name}.limit": {"train": 8, "val": 4} for name in ("nutrition-tables", "visempar")},
    "profiles.tiny.images": {"min_pixels": 3136, "max_pixels": 12544},
    "profiles.tiny.memory.micro_batch": 2,
    "profiles.tiny.evaluation": {"batch_size": 4, "max_new_tokens": 8, "max_length": 1024},
}
"""Settings of params.yaml, by dotted path."""

KILLED_AFTER_A_SAVE = """
import os
from stages.kit.training.resume import ResumableTrainer

save = ResumableTrainer._save_checkpoint

def save_and_die(trainer, *args):
    save(trainer, *args)
    os._exit(9)

ResumableTrainer._save_checkpoint = save_and_die
"""
"""A program that runs before a stage, in its process."""


def run_recipe(device: str, *, recipe: str, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Run the stages of a recipe's evaluation in a small copy of this checkout; its training also a second time, and
    once more killed after its first checkpoint and resumed: the same bytes or not.

    memory: settings of the tiny profile. Raises UserError if a stage fails.
    """
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    raw["recipes"][recipe].update({"effective_batch": 4, "epochs": 3})
    settings = {f"profiles.tiny.memory.{name}": value for name, value in memory.items()}
    for path, value in {**SMALL, "profiles.tiny.device": {"kind": device, "count": 1}, **settings}.items():
        *parents, last = path.split(".")
        reduce(getitem, parents, raw)[last] = value
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("stages", "docker", "data/metrics", "data/tiny"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
        with (folder / "params.yaml").open("w", encoding="utf-8") as file:
            YAML().dump(raw, file)
        stages = {stage.name: stage for stage in declared_stages(folder)}
        data, base = raw["recipes"][recipe]["data"], raw["recipes"][recipe]["base"].partition("/")[2]
        began = time.monotonic()
        for stage in (f"base@{base}", f"prepare@{data}", f"plan@{recipe}"):
            _run(stages[stage], folder)
        train = stages[f"train@{recipe}"]
        digests = [_trained(train, folder) for _ in range(2)]
        killed = _run(train, folder, before=KILLED_AFTER_A_SAVE, may_fail=True)
        if killed != 9 or not list((folder / ".bakeoff/checkpoints").rglob("step-*")):
            raise UserError(f"{train.name} should be killed after its first checkpoint, and ended with {killed}")
        resumed = _trained(train, folder)
        for stage in (f"merge@{recipe}", f"evaluate@{recipe}"):
            _run(stages[stage], folder)
        run_dir = folder / "data/runs" / recipe
        read = {name: json.loads((run_dir / f"{name}.json").read_text()) for name in ("memory", "merge", "metrics")}
        training = json.loads((run_dir / "training/training.json").read_text())
    return {
        "samples": read["metrics"]["samples"],
        "loss": training["final_loss"],
        "peak_bytes": training["peak_memory_bytes"],
        "error": read["memory"]["allocated_gib"] * 2**30 / training["peak_memory_bytes"] - 1,
        "logit_deviation": read["merge"]["logit_deviation"],
        "all_s": round(time.monotonic() - began, 1),
        "twice": digests[0] == digests[1],
        "resumed": digests[0] == resumed,
    }


def _trained(train: DeclaredStage, folder: Path) -> str:
    """Digest of the trained weights and of the trace, which has every step's loss and gradient bit for bit."""
    _run(train, folder)
    run_dir = folder / "data/runs" / train.name.partition("@")[2]
    files = [*sorted((run_dir / "trained").rglob("*.safetensors")), run_dir / "training/trace.csv"]
    digest = combined_digest({str(path.relative_to(run_dir)): file_digest(path) for path in files})
    shutil.rmtree(folder / ".bakeoff")  # the next training would resume from its checkpoints
    return digest


def _run(stage: DeclaredStage, folder: Path, *, before: str = "", may_fail: bool = False) -> int:
    """The exit code of a stage in this environment. Raises UserError if it fails."""
    _, name, *arguments = stage.command.split()
    program = f"{before}\nimport sys\nfrom stages.{name} import main\nmain(sys.argv[1:])"
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        preexec_fn=end_with_parent(),
    )
    print(f"$ {stage.name}\n{ended.stdout}", flush=True)
    if ended.returncode and not may_fail:
        last = (ended.stdout.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise UserError(f"{stage.name}: {last.removeprefix('Error: ')}")
    return ended.returncode
