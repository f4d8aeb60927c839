"""Time what was made fast against what it replaces, both in this run: a table of ratios, and a JSON line each.

Reads   data/tiny, or the folders of other models; draws its own pictures and sentences
Writes  .bakeoff/bench.jsonl    a line a comparison, with date and device
Run     make bench, make bench ARGS="--vlm data/bases/vlm --micro-batch 2"

Each pair does the same work, in turns; the fastest of its turns counts, as other work on the machine only adds time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
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
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from stages.core.lineage import file_digest, folder_digest
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, LimitParams, Params
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
from stages.tasks import load_task
from stages.train import load
from tools.gpu.device import device_to_measure

TURNS = 2
"""Of each of a pair."""
STEPS = 6
"""Of a training, of which the first does not count."""
SAMPLES = 96


@dataclass(frozen=True, kw_only=True)
class Result:
    what: str
    ours: str
    other: str
    ours_s: float
    """Seconds of what `what` names, as the next."""
    other_s: float

    @property
    def ratio(self) -> float:
        """How many times as fast as the other ours is."""
        return self.other_s / self.ours_s


class Steps(TrainerCallback):
    """Seconds of each step after the first, fetching included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def fastest(self) -> float:
        return min(end - begin for begin, end in pairwise(self.ends))


def step_seconds(training: Callable[[], AbstractContextManager[SFTTrainer]]) -> float:
    with training() as trainer:
        steps = Steps()
        trainer.add_callback(steps)
        trainer.train()
        return steps.fastest()


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def compared(what: str, ours: tuple[str, Callable[[], float]], other: tuple[str, Callable[[], float]]) -> Result:
    """Both in turns. Each is its name, and what measures its seconds."""
    times = [(ours[1](), other[1]()) for _ in range(TURNS)]
    ours_s, other_s = (min(each) for each in zip(*times, strict=True))
    return Result(what=what, ours=ours[0], other=other[0], ours_s=ours_s, other_s=other_s)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One model, and samples to train it on and to ask it."""

    plan: Plan
    base_dir: Path
    samples: Any
    records: list[Any]

    @contextmanager
    def training(self, plan: Plan, features: Path | None = None) -> Iterator[SFTTrainer]:
        """Our trainer, ready to take its steps."""
        reset_accelerator()
        seed_everything(plan.seed)
        prepare_kernels(plan)
        processor = load_processor(self.base_dir, plan.images)
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
        plan, processor = self.plan, load_processor(self.base_dir, self.plan.images)
        assert plan.lora is not None
        asked = samples_for(self.samples, load_config(self.base_dir).model_type, processor)
        conversations = [
            asked.conversation(record, answered=True, answer_format=plan.answer_format) for record in self.records
        ]
        rows = {"messages": [each.messages for each in conversations]}
        if conversations[0].images:
            rows["images"] = [[picture.open_image() for picture in each.images] for each in conversations]
        model, schedule = load_base(plan), plan.schedule
        with tempfile.TemporaryDirectory() as scratch:
            args = SFTConfig(
                output_dir=scratch,
                per_device_train_batch_size=schedule.micro_batch,
                gradient_accumulation_steps=schedule.grad_accumulation,
                max_steps=schedule.num_steps,
                learning_rate=max(schedule.learning_rates.values()),
                optim=plan.optimizer,
                use_cpu=plan.device.kind == "cpu",
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

    def answers(self, batch_size: int, count: int) -> float:
        model, processor = load_base(self.plan).eval(), load_processor(self.base_dir, self.plan.images)
        ask = partial(self.samples.conversation, answered=False, answer_format=self.plan.answer_format)
        questions = [ask(record) for record in self.records[:count]]
        limits: dict[str, Any] = {
            "max_new_tokens": 64,
            "complete": completion_of(self.samples, self.plan.answer_format),
        }
        return seconds(lambda: generate_answers(model, processor, questions, batch_size=batch_size, **limits))


def bench_of(params: Params, recipe: str, dataset: str, base_dir: Path, folder: Path) -> Bench:
    """A recipe's training of a few steps, on samples of the demo's data, prepared in `folder`."""
    task, shipped = params.recipe(recipe).task, params.profiles["tiny"].datasets[params.recipe(recipe).data]
    prepare(replace(shipped, limit=LimitParams(train=SAMPLES, val=8)), params.data, folder / dataset)
    samples = load_task(task, "samples")
    plan = resolve_plan(params, recipe, train_samples=SAMPLES)
    schedule = replace(plan.schedule, num_steps=STEPS, warmup_steps=0)
    plan = replace(plan, base_dir=str(base_dir), quantization="none", loss="all-tokens", schedule=schedule)
    records = samples.read_split(folder / dataset, "train")[:SAMPLES]
    return Bench(plan=plan, base_dir=base_dir, samples=samples, records=records)


def results(params: Params, vlm: Path, llm: Path, folder: Path) -> Iterator[Result]:
    pictures = bench_of(params, "r1-llm-only", "pictures", vlm, folder)
    texts = bench_of(params, "amr-baseline", "texts", llm, folder)
    kept, packed = replace(pictures.plan, features_bytes=1), replace(texts.plan, padding_free=True)
    ours = partial(step_seconds, lambda: pictures.training(pictures.plan))
    yield compared("a step", ("this kit", ours), ("a plain TRL script", partial(step_seconds, pictures.plain_training)))
    from_features = partial(step_seconds, lambda: pictures.training(kept, folder / "features"))
    yield compared("a step", ("features of pictures kept", from_features), ("computed", ours))
    yield compared(
        "a step",
        ("texts without padding", partial(step_seconds, lambda: texts.training(packed))),
        ("padded", partial(step_seconds, lambda: texts.training(texts.plan))),
    )
    if texts.plan.device.kind == "cuda":
        fused = replace(texts.plan, fused_kernels=True)
        yield compared(
            "a step",
            ("Liger's kernels", partial(step_seconds, lambda: texts.training(fused))),
            ("torch's", partial(step_seconds, lambda: texts.training(texts.plan))),
        )
    size, count = 128, 64
    for name, bench in (("pictures", pictures), ("texts", texts)):
        yield compared(
            f"answers to {count} {name}",
            (f"{size} at once", partial(bench.answers, size, count)),
            ("one by one", partial(bench.answers, 1, count)),
        )
    big = folder / "big"
    big.mkdir()
    for number in range(4):
        save_file({"weight": torch.rand(1 << 26)}, big / f"{number}.safetensors")
    yield compared(
        "digests of 1 GiB",
        ("in threads", lambda: seconds(lambda: folder_digest(big))),
        ("one after the other", lambda: seconds(lambda: [file_digest(path) for path in big.iterdir()])),
    )
    start = {
        "this kit": "import stages.train",
        "its libraries alone": "import torch, transformers, trl, peft, datasets",
    }
    python = {
        name: partial(seconds, partial(subprocess.run, [sys.executable, "-c", code], check=True))
        for name, code in start.items()
    }
    yield compared("start of a training", *python.items())


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
        device_to_measure("cuda" if cuda else "cpu", holder="make bench") as measured,
        tempfile.TemporaryDirectory() as folder,
        path.open("a") as lines,
    ):
        os.environ["CUDA_VISIBLE_DEVICES"] = measured.uuid  # transformers would split a batch over all that it sees
        device = measured.name if cuda else f"{os.cpu_count()} cores"
        today = datetime.now(UTC).date()
        table = Table("what", "ours", "against", "ours, s", "other, s", "times as fast", title=f"{device}, {today}")
        for result in results(params, vlm, llm, Path(folder)):
            times = (f"{number:.2f}" for number in (result.ours_s, result.other_s, result.ratio))
            table.add_row(result.what, result.ours, result.other, *times)
            line = {"date": str(today), "device": device, **asdict(result), "ratio": round(result.ratio, 3)}
            lines.write(json.dumps(line) + "\n")
            lines.flush()
    Console().print(table)


if __name__ == "__main__":
    main()
