"""Time the kit's faster ways against what they replace: a table of ratios, and a JSON line each.

Reads   data/tiny, and its tiny models or the folders of others
Writes  .bakeoff/bench.jsonl    a line per comparison, with date and device
Run     make bench, make bench ARGS="--cuda --vlm data/bases/vlm"

Each pair does the same work, in turns; the fastest of its turns counts, since other work on the machine adds time. On a
CPU that is the process's time on all cores, and on a GPU the time that passes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, LimitParams, Params
from stages.core.tasks import load_task
from stages.kit.evaluation.answer import completion_of, generate_answers
from stages.kit.internals.accelerate_internals import reset_accelerator
from stages.kit.mixture.trainer import make_trainer
from stages.kit.models.adapters import lora_config
from stages.kit.models.kernels import fused_kernels
from stages.kit.models.load import load_base, load_config
from stages.kit.models.prompts import load_processor, samples_for
from stages.kit.planning.plan import Plan, resolve_plan
from stages.kit.training.batches import ConversationCollator
from stages.kit.training.features import frozen_features
from stages.kit.training.kernels import prepare_kernels
from stages.kit.training.resume import seed_everything
from stages.prepare import prepare
from stages.train import load
from tools.gpu.__main__ import device_to_measure

TURNS = 2
STEPS = 6
"""Steps of a training; the first does not count."""
SAMPLES = 96
BATCH_SIZE, COMPLETIONS = 128, 64

Timed = tuple[str, Callable[[], float]]
"""A name, and what returns its seconds."""


def now_s() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Steps(TrainerCallback):
    """Records the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(now_s())


def step_seconds(training: Callable[[], AbstractContextManager[SFTTrainer]]) -> float:
    """The fastest step after the first, fetching included."""
    with training() as trainer:
        steps = Steps()
        trainer.add_callback(steps)
        trainer.train()
        return min(end - begin for begin, end in pairwise(steps.ends))


def compared(what: str, ours: Timed, other: Timed) -> dict[str, Any]:
    times = [(ours[1](), other[1]()) for _ in range(TURNS)]
    ours_s, other_s = (min(each) for each in zip(*times, strict=True))
    return {"what": what, "ours": ours[0], "other": other[0], "ours_s": ours_s, "other_s": other_s}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One model, and samples for its training and generation."""

    plan: Plan
    samples: Any
    records: list[Any]

    @classmethod
    def of(cls, params: Params, recipe: str, base_dir: Path, folder: Path) -> Bench:
        """A recipe's training of a few steps, on samples of the demo's data, prepared in `folder`."""
        wanted = params.recipe(recipe)
        shipped = params.profiles["tiny"].datasets[wanted.data]
        prepare(replace(shipped, limit=LimitParams(train=SAMPLES, val=8)), params.data, folder / wanted.data)
        samples = load_task(wanted.task, "samples")
        plan = resolve_plan(params, recipe, train_samples=SAMPLES)
        schedule = replace(plan.schedule, num_steps=STEPS, warmup_steps=0)
        plan = replace(plan, base_dir=str(base_dir), quantization="none", loss="all-tokens", schedule=schedule)
        return cls(plan=plan, samples=samples, records=samples.read_split(folder / wanted.data, "train")[:SAMPLES])

    def timed(self, name: str, features: Path | None = None, **changes: Any) -> Timed:
        """A step of our trainer, with these changes of the plan."""
        return name, partial(step_seconds, lambda: self.training(replace(self.plan, **changes), features))

    @contextmanager
    def training(self, plan: Plan, features: Path | None) -> Iterator[SFTTrainer]:
        reset_accelerator()
        seed_everything(plan.seed)
        prepare_kernels(plan)
        processor = load_processor(Path(plan.base_dir), plan.images)
        collator = ConversationCollator.for_plan(plan, processor, self.records, self.samples)
        model = load(plan)
        trainer = make_trainer(plan, model=model, processor=processor, collator=collator, report_to="none")
        trainer.remove_callback(trainer.rehearsal)
        with (
            tempfile.TemporaryDirectory() as scratch,
            fused_kernels(model, used=plan.fused_kernels),
            frozen_features(trainer, features or Path(scratch), {}, limit_gb=1000),
        ):
            yield trainer

    @contextmanager
    def plain_training(self) -> Iterator[SFTTrainer]:
        """TRL's trainer as its documentation has it, with the same settings, on the same samples."""
        reset_accelerator()
        plan, schedule = self.plan, self.plan.schedule
        processor = load_processor(Path(plan.base_dir), plan.images)
        assert plan.lora is not None
        asked = samples_for(self.samples, load_config(Path(plan.base_dir)).model_type, processor)
        converse = partial(asked.conversation, answered=True, answer_format=plan.answer_format)
        conversations = list(map(converse, self.records))
        rows = {"messages": [each.messages for each in conversations]}
        if conversations[0].images:
            rows["images"] = [[image.open_image() for image in each.images] for each in conversations]
        model = load_base(plan)
        with tempfile.TemporaryDirectory() as scratch:
            args = SFTConfig(
                output_dir=scratch,
                per_device_train_batch_size=schedule.micro_batch,
                gradient_accumulation_steps=schedule.grad_accumulation,
                max_steps=schedule.num_steps,
                learning_rate=max(schedule.learning_rates.values()),
                optim=plan.optimizer,
                use_cpu=not plan.on_gpu,
                bf16=plan.precision == "bf16",
                activation_checkpointing=plan.gradient_checkpointing,
                max_length=None,
                report_to="none",
                save_strategy="no",
            )
            yield SFTTrainer(
                model,
                args=args,
                train_dataset=Dataset.from_dict(rows),
                processing_class=processor,
                peft_config=lora_config(model, plan.lora),
            )

    def generation(self, batch_size: int) -> float:
        plan = self.plan
        model, processor = load_base(plan).eval(), load_processor(Path(plan.base_dir), plan.images)
        ask = partial(self.samples.conversation, answered=False, answer_format=plan.answer_format)
        questions = list(map(ask, self.records[:COMPLETIONS]))
        limits: dict[str, Any] = {"max_new_tokens": 64, "complete": completion_of(self.samples, plan.answer_format)}
        began = now_s()
        generate_answers(model, processor, questions, batch_size=batch_size, **limits)
        return now_s() - began


def comparisons(params: Params, vlm: Path, llm: Path, folder: Path) -> Iterator[dict[str, Any]]:
    images, texts = Bench.of(params, "r1-llm-only", vlm, folder), Bench.of(params, "amr-baseline", llm, folder)
    plain = ("a plain TRL script", partial(step_seconds, images.plain_training))
    yield compared("a step of r1", images.timed("this kit"), plain)
    kept = images.timed("features of images kept", folder / "features", features_bytes=1)
    yield compared("a step of r1", kept, images.timed("computed"))
    yield compared("a step of text", texts.timed("padding-free", padding_free=True), texts.timed("padded"))
    if texts.plan.on_gpu:
        yield compared("a step of text", texts.timed("Liger's kernels", fused_kernels=True), texts.timed("torch's"))
    for name, bench in (("images", images), ("sentences", texts)):
        at_once = (f"{BATCH_SIZE} at once", partial(bench.generation, BATCH_SIZE))
        yield compared(f"completions for {COMPLETIONS} {name}", at_once, ("one by one", partial(bench.generation, 1)))


@click.command(help=__doc__)
@click.option("--vlm", type=click.Path(path_type=Path), default="data/tiny/qwen2-vl", show_default=True)
@click.option("--llm", type=click.Path(path_type=Path), default="data/tiny/qwen2", show_default=True)
@click.option("--cuda", is_flag=True, help="On a GPU, in bf16.")
def main(vlm: Path, llm: Path, cuda: bool) -> None:
    params = load_params()
    if cuda:
        profile = params.active
        memory = replace(profile.memory, precision="bf16", attn="auto")
        profile = replace(profile, device=DeviceParams(kind="cuda"), memory=memory)
        params = replace(params, profiles={**params.profiles, params.profile: profile})
    path = Path(".bakeoff/bench.jsonl")
    path.parent.mkdir(exist_ok=True)
    with (
        device_to_measure("cuda" if cuda else "cpu", holder="make bench") as (name, uuid),
        tempfile.TemporaryDirectory() as folder,
        path.open("a") as lines,
    ):
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid  # transformers would split a batch over all that it sees
        device, today = name if cuda else f"{os.cpu_count()} cores", str(datetime.now(UTC).date())
        table = Table("what", "ours", "against", "ours, s", "other, s", "times as fast", title=f"{device}, {today}")
        for found in comparisons(params, vlm, llm, Path(folder)):
            ratio = found["other_s"] / found["ours_s"]
            times = (f"{number:.2f}" for number in (found["ours_s"], found["other_s"], ratio))
            table.add_row(found["what"], found["ours"], found["other"], *times)
            lines.write(json.dumps({"date": today, "device": device, **found, "ratio": round(ratio, 3)}) + "\n")
            lines.flush()
    Console().print(table)


if __name__ == "__main__":
    main()
