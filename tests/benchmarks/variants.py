"""A training step of 4 samples of r1 by each variant, on data/tiny and its tiny model: time and memory, fp32, no nf4.

Reads   params.yaml and data/tiny
Writes  nothing; prints a table of docs/variants.md
Run     python -m tests.benchmarks.variants
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from stages.internals.accelerate_internals import reset_accelerator
from stages.memory.predict import predict
from stages.models.load import load_config
from stages.planning.plan import Plan
from stages.training.randomness import seed_everything
from tests.benchmarks.speed import TURNS, Bench, Steps
from tests.plans import changed

VARIANTS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"rslora": True},
    "DoRA": {"dora": True},
    "DoRA, without dropout": {"dora": True, "dropout": 0.0},
    "gaussian": {"init": "gaussian"},
    "PiSSA": {"init": "pissa"},
    "OLoRA": {"init": "olora"},
    "LoRA+": {"loraplus_lr_ratio": 16.0},
}
"""Settings of `lora`."""

SAMPLES = 4
"""Number of samples in a step."""


class Step(NamedTuple):
    seconds: float
    """Time of the fastest step after the first."""
    measured_bytes: int
    predicted_bytes: int
    """Peak memory, as that of the largest batch."""
    flops: float


def step_of(plan: Plan, bench: Bench) -> Step:
    reset_accelerator()
    seed_everything(plan.seed)
    with bench.training(plan) as trainer:
        trainer.add_callback(steps := Steps())
        trainer.train()
        measured = trainer.rehearsal.rehearse()
        batch, processor = trainer.data_collator.largest_batch(plan.memory.micro_batch), trainer.processing_class
    reset_accelerator()
    predicted = predict(plan, load_config(Path(plan.base_dir)), processor, batch)
    fastest_s = min(end - begin for begin, end in pairwise(steps.ends))
    return Step(fastest_s, measured, predicted.allocated_bytes, predicted.flops)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        bench = Bench.of("r1-llm-only", "cpu", Path(folder))
        lora = bench.plan.recipe.lora
        assert lora is not None
        batch = {"micro_batch": SAMPLES, "effective_batch": SAMPLES}
        plans = {name: changed(bench.plan, lora=replace(lora, **own), **batch) for name, own in VARIANTS.items()}
        turns = [{name: step_of(plan, bench) for name, plan in plans.items()} for _ in range(TURNS)]
    print("| variant | time of a step | arithmetic | memory | prediction off by |\n|---|---|---|---|---|")
    usual = turns[0]["LoRA"]
    usual_s = min(turn["LoRA"].seconds for turn in turns)
    for name, step in turns[0].items():
        times = f"{min(turn[name].seconds for turn in turns) / usual_s:.2f} | {step.flops / usual.flops:.2f}"
        off = step.predicted_bytes / step.measured_bytes - 1
        print(f"| {name} | {times} | {step.measured_bytes / 2**20:.1f} MiB | {off:+.4%} |")
