"""Measure everything that needs a GPU, and write it up; or set the constants of predictions by the results.

Reads   nothing but this checkout: shipped recipes and profiles, on random weights in the published geometries
Writes  .bakeoff/gpu/DEVICE-VERSIONS.json            the results; what has one is not measured again
        docs/gpu/DEVICE.md                           the same for people
        stages/memory/calibration.yaml           with --calibrate
Run     make gpu, make gpu BUDGET_S=540, make gpu ARGS=--dry-run, make gpu ARGS="--calibrate RESULTS", make bench

First come facts and three trainings, which give speed and memory in ten minutes; then more trainings, generation,
recipes at tiny size all the way, and faster ways against what they replace. Each measurement has a process of its own.
Running out of memory is a result; failures are tried again, last. It needs no network.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from stages.core.atomic import atomic_write
from stages.core.environment import installed_packages, stage_environment
from stages.core.errors import OUT_OF_MEMORY, UserError, configure_logging
from stages.core.signals import end_with_parent
from stages.launcher.gpus import leased_gpus, read_gpus
from stages.launcher.process import cuda_of_torch, triton_dir
from stages.memory.calibration import SHIPPED_PATH, load_calibration
from tools.gpu.page import comparisons, constants, data, page, recalibrated

log = logging.getLogger("stages")

DECIDING = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "flash-attn")
"""Packages whose versions change every result."""
TIMEOUT_S = 900
RESULTS_DIR = Path(".bakeoff/gpu")

_7B = {"profile": "qwen25-7b", "recipe": "amr-baseline"}
_VLM_7B = {"profile": "qwen2-vl-7b"}
_VLM_2B = {"profile": "qwen2-vl-2b", "recipe": "r1-llm-only"}
_MOE = {"profile": "moe", "recipe": "moe-finetune"}
_TINY = {"profile": "tiny", "micro_batch": 2, "max_length": 96, "attn": "auto"}
_LONG = {"micro_batch": 2, "max_length": 4096}
_OPEN = {"gradient_checkpointing": False}
_PLAIN = {"fused_kernels": False}
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "cuda": (
        *({**_7B, **_LONG}, {**_VLM_2B, **_OPEN, "micro_batch": 16}, _MOE),
        *({**_VLM_7B, "recipe": recipe} for recipe in ("r1-llm-only", "r2-vision-only", "r4-joint")),
        *({**_7B, **_LONG, **_OPEN}, {**_7B, **_LONG, **_PLAIN}, {**_7B, **_OPEN, "quantization": "nf4"}),
        # One sentence and eight at once: the share of launches in a step.
        *({**_7B, "micro_batch": size, "max_length": 256} for size in (8, 1)),
        *(_VLM_2B, {**_VLM_2B, "precision": "fp16"}),
        *({**_VLM_2B, "recipe": "r2-vision-only", "optimizer": name} for name in ("adamw_torch", "adamw_8bit")),
        *({**_VLM_7B, "recipe": "r1-llm-only", **changes} for changes in ({"features_bytes": 0}, _PLAIN)),
        {**_VLM_7B, "recipe": "r1-llm-only", "attn": "flash_attention_2"},
        *({**_VLM_7B, "recipe": "r4-joint", "quantization": "none"}, {**_MOE, "recipe": "moe-expert-truthfulqa"}),
    ),
    "cpu": tuple(
        {**_TINY, "recipe": recipe} for recipe in ("amr-baseline", "r1-llm-only", "r2-vision-only", "moe-finetune")
    ),
}
"""Trainings: a shipped recipe on a shipped profile, with changes of the plan; the most telling first, the 2B model as
`fill` trains it on a large card."""
GENERATION: dict[str, tuple[tuple[dict[str, Any], int, int], ...]] = {
    "cuda": (
        ({**_VLM_2B, "max_length": 1344}, 16, 64),
        ({**_7B, "max_length": 256}, 16, 256),
        ({**_MOE, "max_length": 384}, 16, 128),
    ),
    "cpu": (({**_TINY, "recipe": "amr-baseline", "max_length": 16}, 2, 4),),
}
"""A setting, whose max_length is the prompt's, completions at once, and new tokens of each."""
RECIPES = {"r1-llm-only": None, "r2-vision-only": "none", "amr-baseline": "none"}
"""Recipes that go all the way at tiny size, each with its profile's quantization."""
_R1, _TEXT = "r1-llm-only", "amr-baseline"
BENCH: dict[str, dict[str, Any]] = {
    "a step of r1: this kit, a plain TRL script": {"recipe": _R1, "ours": {}, "other": None},
    "a step of r1: features of images kept, computed": {"recipe": _R1, "ours": {"features_bytes": 1}, "other": {}},
    "a step of text: padding-free, padded": {"recipe": _TEXT, "ours": {"padding_free": True}, "other": {}},
    "64 completions for images: 128 at once, one by one": {"recipe": _R1, "ours": 128, "other": 1},
    "64 completions for sentences: 128 at once, one by one": {"recipe": _TEXT, "ours": 128, "other": 1},
}
"""Comparisons of bench.py: changes of the plan of a training, None for TRL's trainer without this kit, or the size of a
generation's batch."""


@dataclass(frozen=True)
class Measurement:
    job: str
    name: str
    task: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{self.job}: {self.name}"


FACTS = Measurement("facts", "device", {})


def measurements(kind: str, facts: Mapping[str, Any]) -> list[Measurement]:
    """All measurements in order. facts: of the device, once they are known."""
    has_bf16 = kind == "cpu" or not facts or tuple(facts["capability"]) >= (8, 0)  # from 8.0 on in hardware
    fallback = {} if has_bf16 else {"precision": "fp16"}
    found = [
        Measurement("trainings", name_of(setting), {"setting": {**setting, **fallback}})
        for setting in SETTINGS[kind]
        if find_spec("flash_attn") or setting.get("attn") != "flash_attention_2"
    ]
    for setting, batch_size, new_tokens in GENERATION[kind]:
        task = {"setting": {**setting, **fallback}, "batch_size": batch_size, "new_tokens": new_tokens}
        found.append(Measurement("generation", name_of(setting), task))
    optimizer = "adamw_torch_fused" if kind == "cuda" else "adamw_torch"
    memory = {"precision": "bf16" if has_bf16 else "fp16", "attn": "auto", "optimizer": optimizer}
    for recipe, quantization in RECIPES.items():
        task = {"recipe": recipe, "memory": {**memory, "quantization": quantization}}
        found.append(Measurement("recipes", recipe, task))
    return found + [Measurement("bench", name, task) for name, task in BENCH.items()]


def name_of(setting: Mapping[str, Any]) -> str:
    changes = [f"{name} {value}" for name, value in setting.items() if name not in ("profile", "recipe")]
    return ", ".join([f"{setting['profile']} {setting['recipe']}", *changes])


class Results:
    """Results of one device with one set of versions: status, data, problem, seconds and date by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @classmethod
    def of(cls, folder: Path, device: str) -> Results:
        """The results of a device with the installed versions; with others everything is measured again."""
        packages = sorted(installed_packages(sys.path).items())
        deciding = [each for each in packages if each[0] in DECIDING]
        return cls(folder / f"{_slug(device)}-{sha256(repr(deciding).encode()).hexdigest()[:8]}.json")

    def todo(self, wanted: Sequence[Measurement]) -> list[Measurement]:
        """New measurements first, then failed ones."""
        failed = {key for key, each in self.by_key.items() if each["status"] == "failed"}
        left = [each for each in wanted if each.key in failed or each.key not in self.by_key]
        return sorted(left, key=lambda each: each.key in failed)

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        self.by_key[key] = {**result, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        atomic_write(json.dumps(self.by_key, indent=1), self.path)

    def measure(self, wanted: Sequence[Measurement], kind: str, uuid: str, deadline: float) -> None:
        """Measure what has no result yet, and keep each as it comes. deadline: in time.monotonic; then nothing starts.

        uuid: of the GPU.
        """
        for each in self.todo(wanted):
            if time.monotonic() > deadline:
                return
            log.info("%s ...", each.key)
            result = measured(each, kind, uuid, self.path.parent / "logs" / f"{_slug(each.key)}.log")
            self.keep(each.key, result)
            log.info("%s: %s in %.0f s", each.key, result["problem"] or "done", result["seconds"])


def measured(wanted: Measurement, kind: str, uuid: str, log_path: Path) -> dict[str, Any]:
    """The result of a measurement in a process of its own: nothing of the one before is left on the device.

    A training is predicted first, by a process that sees no GPU, as on a machine without one.
    """
    began, found = time.monotonic(), dict(wanted.task)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as output, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for job in ("predictions", "trainings") if wanted.job == "trainings" else (wanted.job,):
            answer_path = Path(folder, "answer.json")
            environment = stage_environment("train", os.environ, network=False, terminal=False) | {
                "CUDA_VISIBLE_DEVICES": "" if job == "predictions" else uuid,
                "TRITON_CACHE_DIR": str(triton_dir(None, Path.cwd())),
                "TMPDIR": folder,
            }
            arguments = [job, kind, json.dumps(found), str(answer_path)]
            try:
                code = subprocess.run(
                    [sys.executable, "-m", "tools.gpu.measure", *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=TIMEOUT_S,
                    check=False,
                    preexec_fn=end_with_parent(),
                ).returncode
            except subprocess.TimeoutExpired:
                output.write(f"\ntook more than {TIMEOUT_S} s\n".encode())
                code = 1
            if code:
                break
            found = json.loads(answer_path.read_text(encoding="utf-8"))
    status = problem = {0: "", OUT_OF_MEMORY: "out of memory"}.get(code, "failed")
    if status == "failed":
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        problem = f"{(lines or [f'exit code {code}'])[-1].removeprefix('Error: ')} (see {log_path})"
    seconds = round(time.monotonic() - began, 1)
    return {"status": status or "done", "data": {} if code else found, "problem": problem, "seconds": seconds}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


@contextmanager
def device_to_measure(kind: str) -> Iterator[tuple[str, str]]:
    """Name and UUID of the one GPU, free and leased, or of this CPU. Raises UserError if torch has none to use."""
    if kind == "cpu":
        yield "CPU", ""
        return
    if not read_gpus():
        raise UserError("there is no NVIDIA GPU here; try it on this CPU with: make gpu ARGS=--dry-run")
    if cuda_of_torch() is None:
        raise UserError("torch is built for CPUs here; install the other build with: make setup TARGET=cuda")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with leased_gpus(1, locks_dir=Path(".bakeoff/gpus"), holder="make gpu", visible=visible) as (gpu,):
        yield gpu.name, gpu.uuid


def calibrate(results: Results, wanted: Sequence[Measurement], path: Path) -> None:
    """Write the constants that follow from the results, once every training has been tried."""
    if not comparisons(results.by_key):
        raise UserError(f"{results.path} compares no training with its prediction; measure some with: make gpu")
    values = constants(results.by_key)
    facts = data(results.by_key, FACTS.key)
    source = f"{facts['name']}, {facts['versions']}, {datetime.now().astimezone():%Y-%m-%d}"
    for constant, value in values.items():
        click.echo(f"{constant}: {value:g} ({source})")
    if left := [each for each in wanted if each.job == "trainings" and each.key not in results.by_key]:
        raise UserError(f"{len(left)} trainings are still to be tried, by: make gpu")
    atomic_write(recalibrated(path.read_text(encoding="utf-8"), values, source), path)
    load_calibration(path)
    click.echo(f"wrote {path}; it is part of every plan, so commit it")


@click.command(help=__doc__)
@click.option("--budget-s", type=float, default=math.inf, help="After so many seconds nothing more starts.")
@click.option("--only", default="", help="Measurements whose keys contain this, e.g. 'trainings:'.")
@click.option("--dry-run", is_flag=True, help="Measure tiny models on this CPU, each again, and print the page.")
@click.option(
    "--calibrate", "calibrate_by", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Results."
)
def main(budget_s: float, only: str, dry_run: bool, calibrate_by: Path | None) -> None:
    configure_logging("gpu")
    deadline = time.monotonic() + budget_s
    if calibrate_by is not None:
        results = Results(calibrate_by)
        calibrate(results, measurements("cuda", data(results.by_key, FACTS.key)), SHIPPED_PATH)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kind, interrupted = "cpu" if dry_run else "cuda", False
    with device_to_measure(kind) as (name, uuid):
        results = Results.of(RESULTS_DIR, name)
        if dry_run:
            results.by_key.clear()
        try:
            results.measure([FACTS], kind, uuid, deadline)
            wanted = measurements(kind, data(results.by_key, FACTS.key))
            results.measure([each for each in wanted if only in each.key], kind, uuid, deadline)
        except KeyboardInterrupt:
            interrupted = True
    wanted = measurements(kind, data(results.by_key, FACTS.key))
    shown = [each.key for each in wanted if only in each.key or not dry_run]
    text = page(name, results.by_key, [FACTS.key, *shown])
    if dry_run:
        click.echo(text)
    else:
        atomic_write(text, path := Path("docs/gpu") / f"{_slug(name)}.md")
        log.info("wrote %s", path)
    bad = [
        key
        for key, each in results.by_key.items()
        if each["status"] == "failed" or any(value is False for value in each["data"].values())
    ]
    if bad:
        log.info("failed, or bytes differ: %s", ", ".join(bad))
    sys.exit(130 if interrupted else 1 if bad else 0)


if __name__ == "__main__":
    main()
