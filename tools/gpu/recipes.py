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
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.core.lineage import combined_digest, file_digest
from stages.core.signals import end_with_parent
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from tools.gpu.device import Kind

ROOT = Path(__file__).parents[2]

SMALL: dict[str, Any] = {
    "profile": "tiny",
    "tracking.wandb": False,
    # Each step is saved, for whoever is killed.
    "checkpoints": {"every_minutes": None, "every_steps": 1},
    "profiles.tiny.datasets.nutrition-tables.limit": {"train": 8, "val": 4},
    "profiles.tiny.datasets.visempar.limit": {"train": 8, "val": 4},
    "profiles.tiny.datasets.truthfulqa.limit": {"train": 8, "val": 4},
    "profiles.tiny.datasets.qmsum.limit": {"train": 8, "val": 4},
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
from stages.kit.training.resume import ResumableTrainer

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


def run_all_stages(
    device: Kind, *, recipe: str, memory: Mapping[str, str], launched: bool, repeated: bool
) -> dict[str, Any]:
    """Run every stage that the recipe's evaluation needs, trainings and builds of other recipes among them.

    memory: settings of the tiny profile. launched: by the launcher, as DVC does; else as the launcher does it.
    repeated: the recipe's own training several times. Raises UserError where a stage fails, or a loss is no number.
    """
    with workspace(device, memory) as folder:
        seconds: dict[str, float] = defaultdict(float)
        verdicts: dict[str, bool] = {}
        stages = needed(declared_stages(folder), f"evaluate@{recipe}")
        for stage in stages:
            if repeated and stage.name == f"train@{recipe}":
                verdicts = repeat(stage, folder, device)
            seconds[stage.name.partition("@")[0]] += run(stage, folder, launched=launched)
        names = [stage.name.partition("@")[2] for stage in stages if stage.name.startswith("train@")]
        trainings = {name: _read(folder, f"{name}/training/training.json") for name in names}
        planned = {name: _read(folder, f"{name}/memory.json")["allocated_gib"] * 2**30 for name in names}
        merge, metrics = (_read(folder, f"{recipe}/{name}.json") for name in ("merge", "metrics"))
    for name, training in trainings.items():
        if not math.isfinite(training["final_loss"]):
            raise UserError(f"the loss of {name} is {training['final_loss']} after {training['num_steps']} steps")
    peaks = {name: training["peak_memory_bytes"] for name, training in trainings.items()}
    return {
        "answers": metrics["samples"],
        "loss": trainings[recipe]["final_loss"],
        "peak_bytes": max(peaks.values()),
        "error": max((planned[name] / peaks[name] - 1 for name in names), key=abs),
        "logit_deviation": merge["logit_deviation"],
        "train_s": round(seconds["train"], 1),
        "all_s": round(sum(seconds.values()), 1),
        **verdicts,
    }


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / "data/runs" / name).read_text(encoding="utf-8"))


def repeat(train: DeclaredStage, folder: Path, device: Kind) -> dict[str, bool]:
    """Have a training run out of memory; do it, do it again, and have it killed after its first checkpoint and go on:
    same bytes or not. Leaves no checkpoints."""
    recognised = _ended(train, folder, before=LITTLE_MEMORY[device]).returncode == OUT_OF_MEMORY
    first, again = _trained(train, folder), _trained(train, folder)
    code = _ended(train, folder, before=KILLED_AFTER_A_SAVE).returncode
    if code != 9 or not list((folder / ".bakeoff/checkpoints").rglob("step-*")):
        raise UserError(f"{train.name} was to be killed after its first checkpoint, and ended with {code}")
    resumed = _trained(train, folder)
    return {"twice": first == again, "resumed": first == resumed, "recognised": recognised}


def _trained(train: DeclaredStage, folder: Path) -> str:
    """Digest of its weights and of its trace: loss and gradient of every step, bit for bit."""
    run(train, folder)
    run_dir = folder / "data/runs" / train.name.partition("@")[2]
    files = [*sorted((run_dir / "trained").rglob("*.safetensors")), run_dir / "training/trace.csv"]
    digest = combined_digest({str(path.relative_to(run_dir)): file_digest(path) for path in files})
    shutil.rmtree(folder / ".bakeoff")  # with the checkpoints, from which the next training would go on
    return digest


@contextmanager
def workspace(device: Kind, memory: Mapping[str, str]) -> Iterator[Path]:
    """A small copy of this checkout with these settings of the tiny profile's memory, removed in the end."""
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    for recipe in raw["recipes"].values():
        recipe.update(STEPS)
    settings = {f"profiles.tiny.memory.{name}": value for name, value in memory.items()}
    for path, value in {**SMALL, "profiles.tiny.device": {"kind": device, "count": 1}, **settings}.items():
        *parents, last = path.split(".")
        reduce(getitem, parents, raw)[last] = value
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


def _ended(
    stage: DeclaredStage, folder: Path, *, launched: bool = False, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """In the environment of a stage, which this process has already (child.py). Its words go to this one's log too."""
    _, name, *arguments = stage.command.split()
    program = f"{before}\nimport sys\nfrom stages.{name} import main\nmain(sys.argv[1:])"
    own = [sys.executable, "-c", program]
    ended = subprocess.run(
        [*(["docker/run", name] if launched else own), *arguments],
        cwd=folder,
        env={**os.environ, "BAKEOFF_ENGINE": "process", "VIRTUAL_ENV": sys.prefix},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        preexec_fn=end_with_parent(),
    )
    print(f"$ {stage.name}\n{ended.stdout}", flush=True)
    return ended
