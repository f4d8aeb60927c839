"""Recipes at tiny size, by the pipeline's own stages in a workspace of their own: all the way, again, and killed."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.core.lineage import combined_digest, file_digest
from stages.core.parent_death import end_with_parent
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from tools.gpu.pieces import Kind

ROOT = Path(__file__).parents[2]

SMALL: dict[str, Any] = {
    "profile": "tiny",
    "tracking.wandb": False,
    # Each step is saved, for whoever is killed.
    "checkpoints": {"every_minutes": None, "every_steps": 1},
    "profiles.tiny.datasets.nutrition-tables.generate": {"train": 8, "val": 4, "seed": 7},
    "profiles.tiny.datasets.visempar.generate": {"train": 8, "val": 4, "seed": 7},
    "profiles.tiny.datasets.truthfulqa.generate": {"train": 8, "val": 4, "seed": 7},
    "profiles.tiny.datasets.qmsum.generate": {"train": 8, "val": 4, "seed": 7},
    "profiles.tiny.datasets.finetune-mix.mix": {"truthfulqa": 6, "qmsum": 2},
    "profiles.tiny.images": {"min_pixels": 3136, "max_pixels": 12544},
    "profiles.tiny.memory.micro_batch": 2,
    "profiles.tiny.evaluation": {"batch_size": 4, "max_new_tokens": 8, "max_length": 1024},
}
"""Settings of params.yaml, by dotted path."""

STEPS = {"effective_batch": 4, "epochs": 3}
"""Settings of every recipe: six steps. Under fp16 the first ones only find the scale of the gradients."""

KILLED_AFTER_A_SAVE = """
import os
from stages.kit.training.resumable import ResumableTrainer

save = ResumableTrainer._save_checkpoint

def save_and_die(trainer, *args):
    save(trainer, *args)
    os._exit(9)

ResumableTrainer._save_checkpoint = save_and_die
"""

LITTLE_MEMORY: Mapping[Kind, str] = {
    # 16 MiB are less than cuBLAS alone wants.
    "cuda": """
import torch
torch.cuda.set_per_process_memory_fraction((16 << 20) / torch.cuda.get_device_properties(0).total_memory)
""",
    "cpu": """
from stages.kit.training.trainer import RecipeTrainer

def none_left(*args, **kwargs):
    raise MemoryError

RecipeTrainer.training_step = none_left
""",
}
"""Programs that run before a stage, in its process."""


def go_all_the_way(device: Kind, recipe: str, settings: Mapping[str, Any], *, launched: bool) -> dict[str, Any]:
    """Run every stage that the recipe's evaluation needs, trainings and builds of other recipes among them.

    launched: by the launcher, as DVC does; else as the launcher does it.
    Raises UserError where a stage fails, or a loss is no number.
    """
    with workspace(device, settings) as folder:
        seconds: dict[str, float] = defaultdict(float)
        trainings = []
        for stage in needed(declared_stages(folder), f"evaluate@{recipe}"):
            kind, _, name = stage.name.partition("@")
            seconds[kind] += run(stage, folder, launched=launched)
            if kind == "train":
                trainings.append(_training(folder / "data/runs" / name))
        run_dir = folder / "data/runs" / recipe
        merge, metrics = (json.loads((run_dir / name).read_text()) for name in ("merge.json", "metrics.json"))
    return {
        "trainings": trainings,
        "seconds": {kind: round(spent, 1) for kind, spent in seconds.items()},
        "logit_deviation": merge["logit_deviation"],
        "answered": metrics["samples"],
    }


def _training(run_dir: Path) -> dict[str, Any]:
    record = json.loads((run_dir / "training/training.json").read_text())
    planned = json.loads((run_dir / "memory.json").read_text())
    if not math.isfinite(record["final_loss"]):
        raise UserError(f"the loss of {run_dir.name} is {record['final_loss']} after {record['num_steps']} steps")
    return {
        "recipe": run_dir.name,
        "quantization": record["quantization"],
        "loss_kernels": record["loss_kernels"],
        "loss": record["final_loss"],
        "predicted_bytes": round(planned["allocated_gib"] * 2**30),
        "peak_bytes": record["peak_memory_bytes"],
    }


def repeat(device: Kind, recipe: str, settings: Mapping[str, Any], *, exhausted: bool = False) -> dict[str, Any]:
    """Train a recipe, train it again, and have it killed after its first checkpoint and go on: same bytes or not.

    exhausted: have it run out of memory instead.
    """
    with workspace(device, settings) as folder:
        stages = declared_stages(folder)
        for stage in needed(stages, f"plan@{recipe}"):
            run(stage, folder)
        train = next(stage for stage in stages if stage.name == f"train@{recipe}")
        if exhausted:
            return {"recognised": _code(train, folder, before=LITTLE_MEMORY[device]) == OUT_OF_MEMORY}
        first = _trained(train, folder)
        _forget(folder)
        again = _trained(train, folder)
        _forget(folder)
        code = _code(train, folder, before=KILLED_AFTER_A_SAVE)
        if code != 9 or not list((folder / ".bakeoff/checkpoints").rglob("step-*")):
            raise UserError(f"{train.name} was to be killed after its first checkpoint, and ended with {code}")
        resumed = _trained(train, folder)
    return {"twice": first == again, "resumed": first == resumed}


def _trained(train: DeclaredStage, folder: Path) -> str:
    """Digest of its weights and of its trace: loss and gradient of every step, bit for bit."""
    run(train, folder)
    run_dir = folder / "data/runs" / train.name.partition("@")[2]
    files = [*sorted((run_dir / "trained").rglob("*.safetensors")), run_dir / "training/trace.csv"]
    return combined_digest({str(path.relative_to(run_dir)): file_digest(path) for path in files})


def _forget(folder: Path) -> None:
    """Checkpoints, from which the next training would go on."""
    shutil.rmtree(folder / ".bakeoff")


@contextmanager
def workspace(device: Kind, settings: Mapping[str, Any]) -> Iterator[Path]:
    """A small copy of this checkout with these settings, removed in the end."""
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    for recipe in raw["recipes"].values():
        recipe.update(STEPS)
    for path, value in {**SMALL, "profiles.tiny.device": {"kind": device, "count": 1}, **settings}.items():
        *steps, last = path.split(".")
        here = raw
        for step in steps:
            here = here[step]
        here[last] = value
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("stages", "docker", "data/tiny"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
        with (folder / "params.yaml").open("w", encoding="utf-8") as file:
            YAML().dump(raw, file)
        yield folder


def needed(stages: Sequence[DeclaredStage], target: str) -> list[DeclaredStage]:
    """The target and all that it depends on, each after what it needs."""
    by_name = {stage.name: stage for stage in stages}
    makers = {out: stage for stage in stages for out in stage.outs}
    ordered: dict[str, DeclaredStage] = {}

    def add(stage: DeclaredStage) -> None:
        for dep in stage.deps:
            maker = next((makers[str(path)] for path in (Path(dep), *Path(dep).parents) if str(path) in makers), None)
            if maker is not None and maker.name not in ordered:
                add(maker)
        ordered[stage.name] = stage

    add(by_name[target])
    return list(ordered.values())


def run(stage: DeclaredStage, folder: Path, *, launched: bool = False) -> float:
    """Seconds that it took, its start included. Raises OutOfMemory, and UserError where it fails otherwise."""
    began = time.monotonic()
    ended = _ended(stage, folder, launched=launched)
    if ended.returncode == OUT_OF_MEMORY:
        raise OutOfMemory(f"{stage.name} ran out of memory")
    if ended.returncode:
        said = ended.stdout.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise UserError(f"{stage.name}: {said[-1].removeprefix('Error: ')}")
    return time.monotonic() - began


def _code(stage: DeclaredStage, folder: Path, *, before: str) -> int:
    return _ended(stage, folder, before=before).returncode


def _ended(
    stage: DeclaredStage, folder: Path, *, launched: bool = False, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """In the environment of a stage, which this process has already (child.py). Its words go to this one's log too."""
    _, name, *arguments = stage.command.split()
    program = f"{before}\nimport sys\nfrom stages.{name} import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", program, *arguments]
    environment = dict(os.environ)
    if launched:
        command = ["docker/run", name, *arguments]
        environment |= {"BAKEOFF_ENGINE": "process", "VIRTUAL_ENV": sys.prefix}
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        preexec_fn=end_with_parent(),
    )
    print(f"$ {stage.name}\n{ended.stdout}", flush=True)
    return ended
