"""Measurements that need a GPU, on the first free one; without one, a rehearsal with tiny models on this CPU.

Run  make gpu

Each measurement has a process of its own, so nothing of the one before is left on the device, and adds a line to
.bakeoff/gpu/results.jsonl before it is judged: {job, task, status, data, seconds, date}. They come in the order of
their worth; the facts and the trainings take about ten minutes, which calibration (tools/calibrate.py) needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stages.core.environment import stage_environment
from stages.core.errors import OUT_OF_MEMORY
from stages.core.signals import end_with_parent
from stages.launcher.gpus import leased_gpus, read_gpus
from stages.launcher.process import cuda_of_torch, triton_dir
from stages.planning.cards import card_of
from tests import ROOT
from tests.benchmarks.speed import COMPARISONS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

TIMEOUT_S = 900
_TINY = {"profile": "tiny", "micro_batch": 2, "max_length": 96, "attn": "auto", "gradient_checkpointing": False}
_2B = {"profile": "qwen2-vl-2b", "recipe": "r1-llm-only"}
_7B = {"profile": "qwen25-7b", "recipe": "amr-baseline"}
TRAININGS: dict[str, tuple[dict[str, Any], str]] = {
    "7B LoRA": ({**_7B, "micro_batch": 2, "max_length": 4096}, "amr-baseline"),
    "2B nf4 LoRA with images": ({**_2B, "micro_batch": 8, "gradient_checkpointing": False}, "r1-llm-only"),
    "mixture in full": ({"profile": "moe", "recipe": "moe-finetune"}, "moe-finetune"),
}
"""A shipped recipe on a shipped profile with changes of the plan, for 80 GB; the recipe of the rehearsal."""
GENERATION = {**_7B, "max_length": 256}, {"batch_size": 16, "new_tokens": 256}
TINY_GENERATION = {**_TINY, "recipe": "amr-baseline", "max_length": 16}, {"batch_size": 2, "new_tokens": 4}


@dataclass(frozen=True)
class Measuring:
    device: str
    """cuda or cpu."""
    gpu: str | None
    """The card by name, if planning/cards.py has it."""
    uuid: str
    results: Path

    def __call__(self, job: str, **task: Any) -> dict[str, Any]:
        """The answer of a measurement, which is in the results by then, as a failure is."""
        began = time.monotonic()
        status, answer = self.run(job, self.uuid, task)
        seconds, date = round(time.monotonic() - began, 1), datetime.now(UTC).isoformat(timespec="seconds")
        line = {"job": job, "task": task, "status": status, "data": answer, "seconds": seconds, "date": date}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line, indent=1))
        assert status == "done", f"{job}: {status}"
        return answer

    def training(self, setting: dict[str, Any]) -> dict[str, Any]:
        """A training and its prediction, by a process that sees no GPU, as on a machine without one."""
        setting = setting if self.gpu is None else {**setting, "gpu": self.gpu}
        status, task = self.run("predictions", "", {"setting": setting})
        assert status == "done"
        return self("trainings", **task)

    def run(self, job: str, visible: str, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """(status, answer) of a job of measure.py. visible: the UUID of its GPU."""
        self.results.parent.mkdir(parents=True, exist_ok=True)
        answer = self.results.with_suffix(".answer")
        environment = stage_environment("train", os.environ, network=False, terminal=False) | {
            "CUDA_VISIBLE_DEVICES": visible,
            "TRITON_CACHE_DIR": str(triton_dir(None, ROOT)),
        }
        command = [sys.executable, "-m", "tests.gpu.measure", job, self.device, json.dumps(task), str(answer)]
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
                preexec_fn=end_with_parent(),
            ).returncode
        except subprocess.TimeoutExpired:
            return f"longer than {TIMEOUT_S} s", {}
        status = {0: "done", OUT_OF_MEMORY: "out of memory"}.get(code, "failed")
        return status, {} if code else json.loads(answer.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measuring]:
    if not read_gpus():
        yield Measuring("cpu", None, "", tmp_path_factory.mktemp("gpu") / "results.jsonl")
        return
    assert cuda_of_torch() is not None, "torch is built for CPUs here; install the other build: make setup TARGET=cuda"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with leased_gpus(1, locks_dir=ROOT / ".bakeoff/gpus", holder="make gpu", visible=visible) as (gpu,):
        card = card_of(gpu.name)
        yield Measuring("cuda", card.name if card else None, gpu.uuid, ROOT / ".bakeoff/gpu/results.jsonl")


def test_facts_of_the_device_and_its_software(measured: Measuring) -> None:
    problems = {name: fact for name, fact in measured("facts").items() if "does not work" in str(fact)}
    assert problems == {}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_takes_the_memory_that_was_predicted(name: str, measured: Measuring) -> None:
    setting, recipe = TRAININGS[name]
    found = measured.training(setting if measured.device == "cuda" else {**_TINY, "recipe": recipe})
    if measured.device == "cpu":
        assert found["allocated_bytes"] == pytest.approx(found["predicted"]["allocated_bytes"], rel=0.01)
        return
    assert found["predicted"]["low_bytes"] <= found["total_bytes"] <= found["predicted"]["high_bytes"]
    assert found["tokens_per_s"] > 0


@pytest.mark.parametrize("recipe", ["r1-llm-only", "r2-vision-only", "amr-baseline"])
def test_a_training_has_the_same_bytes_twice_and_after_a_kill(recipe: str, measured: Measuring) -> None:
    """A recipe at tiny size, by the stages themselves; r1 in nf4."""
    on_gpu = measured.device == "cuda"
    memory: dict[str, Any] = {"attn": "auto", "optimizer": "adamw_torch_fused" if on_gpu else "adamw_torch"}
    memory |= {"quantization": None if recipe == "r1-llm-only" else "none"}
    found = measured("recipes", recipe=recipe, memory=memory)
    assert (found["same_bytes_twice"], found["same_bytes_after_a_kill"]) == (True, True)


def test_generation_takes_the_memory_that_was_predicted(measured: Measuring) -> None:
    setting, limits = GENERATION if measured.device == "cuda" else TINY_GENERATION
    found = measured("generation", setting=setting, **limits)
    assert abs(found["error"]) < 0.1


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_way_and_what_it_replaces_do_the_same_work(name: str, measured: Measuring) -> None:
    """Which is faster is in the results; `make bench` compares them on a CPU."""
    if measured.device == "cpu":
        pytest.skip("make bench does")
    assert measured("bench", **COMPARISONS[name])["times_as_fast"] > 0
