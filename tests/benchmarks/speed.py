"""The kit's faster ways against what they replace, on data/tiny and its tiny models.

Reads   params.yaml and data/tiny
Writes  nothing; prints the table of docs/memory.md
Run     make bench, or python -m tests.benchmarks.speed [FOLDER]; of a text model in a folder, its chat recipes' steps

Each pair does the same work, in turns; the fastest of its turns counts, since other work on the machine adds time. On a
CPU that is the process's time on all cores, and on a GPU the time that passes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, EvaluationParams, LimitParams
from stages.core.tasks import load_task
from stages.data.conversation import Conversation
from stages.data.prepared import prepare
from stages.evaluation.generate import TextGenerator
from stages.internals.accelerate_internals import reset_accelerator
from stages.mixture.trainer import make_trainer
from stages.models.adapters import load_trainable, lora_config
from stages.models.kernels import fused_kernels
from stages.models.load import load_base, load_config
from stages.models.prompts import load_processor, samples_for
from stages.planning.plan import Plan
from stages.planning.resolve import resolve_plan
from stages.training.batches import ConversationCollator
from stages.training.features import frozen_features
from stages.training.kernels import prepare_kernels
from stages.training.randomness import seed_everything
from tests.plans import changed

_R1, _TEXT = "r1-llm-only", "amr-baseline"
COMPARISONS: dict[str, dict[str, Any]] = {
    "a step of r1: this kit, a plain TRL script": {"recipe": _R1, "ours": {}, "other": None},
    "a step of r1: features of images kept, computed": {"recipe": _R1, "ours": {"features_bytes": 1}, "other": {}},
    "a step of text: padding-free, padded": {"recipe": _TEXT, "ours": {"padding_free": True}, "other": {}},
    "64 completions for images: 128 at once, one by one": {"recipe": _R1, "ours": 128, "other": 1},
    "64 completions for sentences: 128 at once, one by one": {"recipe": _TEXT, "ours": 128, "other": 1},
}
"""Changes of the plan of a training, None for TRL's trainer without this kit, or the size of a generation's batch."""
TURNS = 2
STEPS = 6
"""Steps of a training; the first does not count."""
SAMPLES, COMPLETIONS = 96, 64


def compare_speed(device: str, *, recipe: str, ours: Any, other: Any, base_dir: Path | None = None) -> dict[str, Any]:
    """Seconds of a step, or of completions, in two ways. ours, other: see `Bench.seconds`. base_dir: see `Bench.of`."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench.of(recipe, device, Path(folder), base_dir)
        times = [(bench.seconds(ours), bench.seconds(other)) for _ in range(TURNS)]
    ours_s, other_s = (min(each) for each in zip(*times, strict=True))
    return {"first_s": ours_s, "second_s": other_s, "times_as_fast": other_s / ours_s}


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


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One tiny model, and samples for its training and generation."""

    plan: Plan
    samples: Any
    records: list[Any]
    folder: Path

    @classmethod
    def of(cls, recipe: str, device: str, folder: Path, base_dir: Path | None = None) -> Bench:
        """A recipe's training of a few steps, on samples of the demo's data, prepared in `folder`.

        base_dir: of another model than the recipe's tiny one.
        """
        params = load_params().on("tiny")
        wanted, tiny = params.recipe(recipe), params.active
        shipped = tiny.datasets[wanted.data]
        limited, here = replace(shipped, limit=LimitParams(train=SAMPLES, val=8)), params.dataset_path(wanted.data)
        sources, samples = load_task(wanted.task, "sources"), load_task(wanted.task, "samples")
        prepare(sources, limited, params.data, folder / wanted.data, path=here)
        plan = resolve_plan(params, recipe, train_samples=SAMPLES)
        if device == "cuda":
            plan = changed(plan, device=DeviceParams(kind="cuda"), precision="bf16", attn="auto")
        shipped_dir = tiny.bases[params.root(recipe).partition("/")[2]].removeprefix("folder:")
        steps = {"num_steps": STEPS, "warmup_steps": 0}
        plan = changed(plan, base_dir=str(base_dir or shipped_dir), quantization="none", loss="all-tokens", **steps)
        records = samples.read_split(folder / wanted.data, "train")[:SAMPLES]
        return cls(plan=plan, samples=samples, records=records, folder=folder)

    def seconds(self, how: Any) -> float:
        """Seconds of the fastest step after the first, fetching included, or of all completions.

        how: changes of the plan; None for TRL's trainer; a number for completions, so many at once.
        """
        if isinstance(how, int):
            return self.generation(how)
        reset_accelerator()
        seed_everything(self.plan.seed)
        with self.plain_training() if how is None else self.training(changed(self.plan, **how)) as trainer:
            trainer.add_callback(steps := Steps())
            trainer.train()
        return min(end - begin for begin, end in pairwise(steps.ends))

    @contextmanager
    def training(self, plan: Plan) -> Iterator[SFTTrainer]:
        prepare_kernels(plan)
        processor = load_processor(Path(plan.base_dir), plan.images)
        collator = ConversationCollator.for_plan(plan, processor, self.records, self.samples)
        model = load_trainable(plan)
        trainer = make_trainer(plan, model=model, processor=processor, collator=collator, report_to="none")
        trainer.remove_callback(trainer.rehearsal)
        features = frozen_features(trainer, self.folder / "features", {}, limit_gb=1000)
        with fused_kernels(model, used=plan.fused_kernels), features:
            yield trainer

    @contextmanager
    def plain_training(self) -> Iterator[SFTTrainer]:
        """TRL's trainer as its documentation has it, with the same settings, on the same samples."""
        plan, schedule = self.plan, self.plan.schedule
        processor = load_processor(Path(plan.base_dir), plan.images)
        asked = samples_for(self.samples, load_config(Path(plan.base_dir)).model_type, processor)
        converse = partial(asked.conversation, answered=True, answer_format=plan.recipe.answer_format)
        conversations = list(map(converse, self.records))
        rows = {"messages": [plain_messages(each) for each in conversations]}
        if conversations[0].images:
            rows["images"] = [[image.open_image() for image in each.images] for each in conversations]
        model = load_base(plan)
        args = SFTConfig(
            output_dir=str(self.folder / "plain"),
            per_device_train_batch_size=plan.memory.micro_batch,
            gradient_accumulation_steps=schedule.grad_accumulation,
            max_steps=schedule.num_steps,
            learning_rate=max(schedule.learning_rates.values()),
            optim=plan.memory.optimizer,
            use_cpu=not plan.on_gpu,
            bf16=plan.memory.precision == "bf16",
            activation_checkpointing=plan.memory.gradient_checkpointing,
            max_length=None,
            report_to="none",
            save_strategy="no",
        )
        yield SFTTrainer(
            model,
            args=args,
            train_dataset=Dataset.from_dict(rows),
            processing_class=processor,
            peft_config=lora_config(model, plan.recipe.lora) if plan.recipe.lora else None,
        )

    def generation(self, batch_size: int) -> float:
        plan = self.plan
        model, processor = load_base(plan).eval(), load_processor(Path(plan.base_dir), plan.images)
        ask = partial(self.samples.conversation, answered=False, answer_format=plan.recipe.answer_format)
        questions = list(map(ask, self.records[:COMPLETIONS]))
        generator = TextGenerator(
            model=model,
            processor=processor,
            samples=self.samples,
            answer_format=plan.recipe.answer_format,
            batch_size=batch_size,
            settings=EvaluationParams(max_new_tokens=64),
        )
        began = now_s()
        generator.completions(questions)
        return now_s() - began


def plain_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Messages as a script has them: contents are texts if there is no image."""
    if conversation.images:
        return conversation.messages
    return [{**turn, "content": "".join(part["text"] for part in turn["content"])} for turn in conversation.messages]


if __name__ == "__main__":
    own: dict[str, dict[str, Any]] = {
        f"a step of {recipe}: this kit, a plain TRL script": {
            "recipe": recipe,
            "ours": {},
            "other": None,
            "base_dir": path,
        }
        for path in map(Path, sys.argv[1:])
        for recipe in ("chat-lora", "chat-full")
    }
    for name, ways in (own or COMPARISONS).items():
        figures = (f"{key} {value:.2f}" for key, value in compare_speed("cpu", **ways).items())
        print(name, *figures, sep=", ", flush=True)
