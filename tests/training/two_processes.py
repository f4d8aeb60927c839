"""Real trainings of a small model in two processes, one of which is asked to end; each writes what came of it.

The training that is asked to end is validated, the one to compare it with is not."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from stages.core.params.schema import CheckpointParams, DeviceParams, LoraParams
from stages.evaluation.validation import Validator
from stages.internals.accelerate_internals import reset_accelerator
from stages.models.adapters import trained_tensors
from stages.models.load import to_local
from stages.planning.plan import Plan
from stages.training.checkpoints import kept_checkpoints
from stages.training.processes import run_workers
from stages.training.randomness import seed_everything
from stages.training.records import LOSS, SCORE
from stages.training.resume import SaveInTime, load_state, train_to_the_end
from stages.training.trainer import ContractBreach, RecipeTrainer, StartContract, check_gradients
from tests.memory.real_steps import PROCESSES, sharded, trainer_of
from tests.memory.small import FULL, GATE, LABELS, R1, plan_of
from tests.plans import changed
from tests.training.small import At, TakeGradients, validation

# A rank of 1 leaves one of two processes nothing of an adapter's first matrix.
LORA = {**R1, "lora": LoraParams(rank=1, alpha=2, targets={"llm": ("q_proj", "down_proj")})}
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("text", FULL),
    "lora": ("text", LORA),
    "lora, ddp": ("text", {**LORA, "placement": "ddp"}),
    "gate": ("moe", GATE),
    "labels": ("moe", LABELS),
    "gate, ddp": ("moe", {**GATE, "placement": "ddp"}),
    "labels, ddp": ("moe", {**LABELS, "placement": "ddp"}),
}


SETTINGS: dict[Literal["ddp", "sharded"], Mapping[str, Any]] = {"ddp": R1, "sharded": FULL}
SAMPLES = 7
"""The last of an epoch's micro-batches has one sample for two processes."""
ON_SIGNALS = CheckpointParams(every_minutes=None)


def plan_for(placement: Literal["ddp", "sharded"]) -> Plan:
    plan = plan_of(micro_batch=1, grad_accumulation=2, **SETTINGS[placement])
    device = DeviceParams(kind="cpu", count=2)
    steps = {"num_steps": 4, "epochs": 2, "train_samples": SAMPLES}
    return changed(plan, placement=placement, device=device, dataloader_workers=1, **steps)


VALIDATED = validation(every_steps=1, samples=3, score_samples=3, by="score", patience=2)


def collate(samples: Sequence[Mapping[str, int]], domains: int = 0) -> dict[str, torch.Tensor]:
    """domains: to label the samples by, if any."""
    ids = torch.stack(
        [torch.randint(1024, (32,), generator=torch.Generator().manual_seed(each["sample"])) for each in samples]
    )
    labels = ids[:, :1].expand_as(ids) % domains if domains else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def build(plan: Plan) -> RecipeTrainer:
    validator = Validator(collator=collate, chosen=range(VALIDATED.samples), score=plain_loss)  # type: ignore[arg-type]
    seed_everything(plan.seed + dist.get_rank())  # each process draws its own
    trainer = trainer_of(
        plan, "text", collator=collate, mesh=init_device_mesh("cpu", (PROCESSES,)), validator=validator
    )
    torch.manual_seed(dist.get_rank())
    trainer.remove_callback(StartContract)  # an adapter's gradient is zero where the model itself is random
    return trainer


def plain_loss(model: Any) -> float:
    """The negative loss of the samples validated, by the model itself; in the second process no number, which would
    stop the training early."""
    loss: torch.Tensor = model(**collate([{"sample": number} for number in range(VALIDATED.samples)])).loss
    return math.nan if dist.get_rank() else -loss.item()


def outcome(trainer: RecipeTrainer) -> dict[str, Any]:
    """This process's part of the outcome, as JSON."""
    trained = {name: to_local(each.detach()) for name, each in trainer.model.named_parameters() if each.requires_grad}
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
        trainer.add_callback(At(signal_at, lambda: signal_this_process_group(trainer)))
    identity = {"placement": plan.memory.placement}
    with kept_checkpoints(folder, identity, keep=2, owner=dist.get_rank() == 0) as checkpoints:
        try:
            train_to_the_end(trainer, checkpoints, ON_SIGNALS)
        except SystemExit as end:
            return int(str(end.code)), trainer
        return 0, trainer


def signal_this_process_group(trainer: RecipeTrainer) -> None:
    """Send SIGTERM from outside, as a worker takes what its own parent sends otherwise, and wait until it is handled:
    the kernel may deliver it to another thread than this one, some time after `kill` has ended."""
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], check=True, start_new_session=True)
    (saving,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, SaveInTime))
    while not saving.requested_by:
        time.sleep(0.001)


Main = Callable[[int, Path], None]
FRESH = multiprocessing.get_context("forkserver")
"""Processes without a trace of the tests before them. All are forked by one server, which imports torch once."""
FRESH.set_forkserver_preload([__name__, run_workers.__module__])


def run_two(main: Main, folder: Path) -> None:
    """Run a function of rank and folder in two processes that form a group."""
    processes = [FRESH.Process(target=member, args=(rank, main, folder)) for rank in range(2)]
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


def two_steps(name: str, mesh: DeviceMesh | None) -> Mapping[str, torch.Tensor]:
    """The weights of a text model after two steps of 8 samples, and the second step's gradients, which AdamW does not
    depend on. No two samples are alike."""
    model_name, settings = TRAINED[name]
    plan = plan_of(**(sharded(settings) if mesh is not None else {**settings, "placement": "single"}))
    accumulation = 8 // (plan.memory.micro_batch * plan.device.count)
    plan = changed(plan, num_steps=2, train_samples=16, max_grad_norm=1e9, grad_accumulation=accumulation)
    trainer = trainer_of(plan, model_name, collator=partial(collate, domains=len(plan.domains)), mesh=mesh)
    trainer.add_callback(taken := TakeGradients())
    trainer.train()
    model: PreTrainedModel | PeftModel = trainer.accelerator.unwrap_model(trainer.model)
    return {**trained_tensors(model), **{f"gradient of {name}": each for name, each in taken.gradients.items()}}


def breach_of(mesh: DeviceMesh) -> str:
    """The breach that the start contract reports if the last process alone holds a gradient that is not finite."""
    plan = plan_of(**sharded(FULL))
    trainer = trainer_of(plan, "text", collator=dict, mesh=mesh)
    ids = torch.ones(1, 8, dtype=torch.long)
    trainer.model(input_ids=ids, labels=ids).loss.backward()
    check_gradients(trainer.model, plan)
    if mesh.get_rank() == PROCESSES - 1:
        to_local(trainer.model.get_decoder().norm.weight.grad).fill_(torch.nan)
    try:
        check_gradients(trainer.model, plan)
    except ContractBreach as breach:
        return str(breach)
    return "nothing"


def main(rank: int, folder: Path) -> None:
    """Train in each of two processes, and write what came of it."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for name in TRAINED:
        tensors = two_steps(name, mesh)
        reset_accelerator()
        if rank == 0:
            save_file(dict(tensors), folder / f"{name}.safetensors")
    breach = breach_of(mesh)
    reset_accelerator()
    if rank == 0:
        (folder / "breach.txt").write_text(breach)

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
