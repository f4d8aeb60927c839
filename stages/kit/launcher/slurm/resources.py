"""What a stage's job asks Slurm for: from the profile, params.yaml's `slurm`, and the recipe's memory plan."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from stages.core.errors import UserError
from stages.core.params.schema import Params
from stages.kit.launcher.slurm.nodes import nodes_of
from stages.kit.planning.disk import TRAINED_BYTES, WEIGHT_BYTES
from stages.kit.planning.plan import DATA_PARALLEL, Plan, read_plan
from stages.kit.planning.prediction import GIB, read_memory_record

PROCESS_GIB = 4.0
"""Of the host, for one process of torch: its libraries, CUDA's context, buffers for transfers."""
OTHER_GIB = 8.0
"""For a stage without a plan."""
MARGIN = 1.25
CORES_PER_DEVICE = 2
"""Beside one for each data-loader worker: the process itself, and what feeds the device."""
MERGED_COPIES = 2
"""Of the model, that a merge holds: the one that it wrote, and the one that it reads back."""


FAMILIES = {
    "memory": ("--mem=", "--mem-per-"),
    "cores": ("--cpus-per-", "--cores-per-"),
    "gpus": ("--gres=", "--gpus"),
}
"""Options that exclude each other: a person's takes the place of the kit's; without a value, as `--mem=`, of none."""


def job_options(stage: str, name: str, params: Params, *, num_gpus: int, workspace_dir: Path) -> list[str]:
    """sbatch's options for one stage, the person's own last, which wins."""
    profile = params.active
    asked = params.slurm.gpu if num_gpus else params.slurm.cpu
    devices = profile.device.count if stage == "train" else 1
    gib = asked.memory_gb * 1e9 / GIB if asked.memory_gb else host_gib(stage, name, workspace_dir)
    cores = devices * (CORES_PER_DEVICE + profile.dataloader_workers)
    options = [
        *(f"--nodes={nodes_of(stage, profile.device)}", "--ntasks-per-node=1", f"--cpus-per-task={cores}"),
        f"--mem={max(1, round(gib * 1024))}M",
    ]
    if num_gpus:
        options.append(f"--gres=gpu:{num_gpus}")
    if asked.minutes:
        options.append(f"--time={asked.minutes}")
    options += [
        f"--{key}={value}" for key, value in (("partition", asked.partition), ("account", asked.account)) if value
    ]
    given = {family for family, names in FAMILIES.items() if any(each.startswith(names) for each in asked.options)}
    kept = [option for option in options if not any(option.startswith(FAMILIES[family]) for family in given)]
    return [*kept, *(option for option in asked.options if not option.endswith("="))]


def host_gib(stage: str, name: str, workspace_dir: Path) -> float:
    """Memory of the host that a stage takes, in GiB, from the recipe's plan, with a margin.

    On a CPU the devices' memory is the host's, as predicted. On GPUs it is what each process has, and the weights on
    their way: one copy for each process, as every one reads all of them.
    """
    plan = _plan(name, workspace_dir)
    if plan is None or stage not in ("train", "merge", "evaluate"):
        return OTHER_GIB
    processes = plan.device.count if stage == "train" and plan.placement in DATA_PARALLEL else 1
    copies = MERGED_COPIES if stage == "merge" else 1
    weights_gib = plan.trainable["all"] * WEIGHT_BYTES[plan.precision] / GIB
    gib = processes * (PROCESS_GIB + weights_gib * copies + plan.dataloader_workers)
    if stage == "train":
        # A checkpoint is put together in the host's memory; paged states stay there.
        gib += 3 * plan.trainable["total"] * TRAINED_BYTES / GIB
    if plan.device.kind == "cpu":
        with suppress(UserError):  # the stage says what is wrong
            record = read_memory_record(workspace_dir / "data/runs" / name / "memory.json")
            gib += processes * (record.total_gib if stage == "train" else record.evaluation_gib)
    return MARGIN * gib


def _plan(name: str, workspace_dir: Path) -> Plan | None:
    """The recipe's plan; None where there is none yet, or it is damaged, which the stage says."""
    with suppress(UserError):
        plan = read_plan(name, runs_dir=workspace_dir / "data/runs")
        if plan.trainable:
            return plan
    return None
