"""Real trainings of a small model in two processes, one of which is asked to end; each writes what came of it.

The training that is asked to end is validated, the one to compare it with is not."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from stages.core.params.schema import CheckpointParams, DeviceParams
from stages.kit.evaluation.validation import Validator
from stages.kit.models.adapters import apply_recipe
from stages.kit.models.load import auto_class, local, process_mesh, shard
from stages.kit.models.prompts import load_processor
from stages.kit.planning.plan import Plan
from stages.kit.training.checkpoints import kept_checkpoints
from stages.kit.training.records import LOSS, SCORE
from stages.kit.training.resume import load_state, seed_everything, train_to_the_end
from stages.kit.training.trainer import RecipeTrainer, StartContract
from tests.kit.memory.small import FULL, R1, TINY, config_of, plan_of
from tests.kit.training.small import At, validation

SETTINGS: dict[Literal["ddp", "sharded"], Mapping[str, Any]] = {"ddp": R1, "sharded": FULL}
SAMPLES = 7
"""The last of an epoch's micro-batches has one sample for two processes."""
ON_SIGNALS = CheckpointParams(every_minutes=None)


def plan_for(placement: Literal["ddp", "sharded"]) -> Plan:
    plan = plan_of(micro_batch=1, grad_accumulation=2, **SETTINGS[placement])
    schedule = replace(plan.schedule, num_steps=4, epochs=2, train_samples=SAMPLES)
    return replace(
        plan,
        placement=placement,
        device=DeviceParams(kind="cpu", count=2),
        schedule=schedule,
        dataloader_workers=1,
    )


VALIDATED = validation(every_steps=1, samples=3, score_samples=3, by="score", patience=2)


def collate(samples: Sequence[Mapping[str, int]]) -> dict[str, torch.Tensor]:
    ids = torch.stack(
        [torch.randint(1024, (16,), generator=torch.Generator().manual_seed(each["sample"])) for each in samples]
    )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def build(plan: Plan) -> RecipeTrainer:
    seed_everything(plan.seed + dist.get_rank())  # each process draws its own
    torch.manual_seed(0)
    config = config_of("text")
    model = auto_class(config).from_config(config, attn_implementation="sdpa")
    model = apply_recipe(model, plan.parts, plan.lora)
    if plan.placement == "sharded":
        shard(model, plan, process_mesh(plan))
    torch.manual_seed(dist.get_rank())
    trainer = RecipeTrainer(
        plan,
        model=model,
        processor=load_processor(TINY, None).tokenizer,
        collator=collate,
        validator=Validator(collator=collate, chosen=range(VALIDATED.samples), score=plain_loss),  # type: ignore[arg-type]
        report_to="none",
    )
    trainer.remove_callback(StartContract)  # an adapter's gradient is zero where the model itself is random
    trainer.remove_callback(trainer.rehearsal)
    return trainer


def plain_loss(model: Any) -> float:
    """The negative loss of the samples validated, by the model itself; in the second process no number, which would
    stop the training early."""
    loss: torch.Tensor = model(**collate([{"sample": number} for number in range(VALIDATED.samples)])).loss
    return math.nan if dist.get_rank() else -loss.item()


def outcome(trainer: RecipeTrainer) -> dict[str, Any]:
    """This process's part of the outcome, as JSON."""
    trained = {name: local(each.detach()) for name, each in trainer.model.named_parameters() if each.requires_grad}
    history = trainer.state.log_history
    kept = ("loss", "grad_norm", "mean_token_accuracy", "num_tokens", "entropy", "train_loss")
    return {
        "weights": {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in trained.items()},
        "logs": [{name: logs[name] for name in kept if name in logs} for logs in history if LOSS not in logs],
        "trace": trainer.trace,
    }


def train(plan: Plan, folder: Path, *, signal_at: int | None = None) -> tuple[int, RecipeTrainer]:
    """The exit code, and the trainer. signal_at: the step after which the second process, and no other, gets a
    signal to end; its data loader's worker gets it too, as from torchrun."""
    trainer = build(plan)
    if signal_at is not None and dist.get_rank() == 1:
        trainer.add_callback(At(signal_at, signal_this_process_group))
    identity = {"placement": plan.placement}
    with kept_checkpoints(folder, identity, keep=2, owner=dist.get_rank() == 0) as checkpoints:
        try:
            train_to_the_end(trainer, checkpoints, ON_SIGNALS)
        except SystemExit as end:
            return int(str(end.code)), trainer
        return 0, trainer


def signal_this_process_group() -> None:
    """From outside: a worker takes what its own parent sends otherwise."""
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], check=True, start_new_session=True)


Main = Callable[[int, Path], None]


def run_two(main: Main, folder: Path) -> None:
    """Run a function of rank and folder in two processes that form a group."""
    server = multiprocessing.get_context("forkserver")  # imports torch once for both
    server.set_forkserver_preload([main.__module__])
    processes = [server.Process(target=member, args=(rank, main, folder)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


def member(rank: int, main: Main, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # unused, but accelerate wants to see them
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    main(rank, folder)
    dist.destroy_process_group()


def main(rank: int, folder: Path) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # of data-loader workers, which would import torch again
    mock.patch("os.fsync").start()  # it can take a minute
    found: dict[str, Any] = {}
    for placement in SETTINGS:
        plan = plan_for(placement)
        place = folder / placement
        _, undisturbed = train(plan, place / "undisturbed")
        plan = replace(plan, validation=VALIDATED)
        code, interrupted = train(plan, place / "interrupted", signal_at=3)
        assert interrupted.checkpoints is not None
        saved = load_state(interrupted.checkpoints.at(3) / f"process-{rank}.pt")
        again, resumed = train(plan, place / "interrupted")
        dist.barrier()
        found[placement] = {
            "codes": [code, again],
            "steps": [interrupted.state.global_step, interrupted.saved_step],
            "saved": [*saved],
            "undisturbed": outcome(undisturbed),
            "resumed": outcome(resumed),
            "validations": [(it[LOSS], it[SCORE]) for it in resumed.state.log_history if LOSS in it],
        }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
