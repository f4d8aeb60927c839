"""The stages of dvc.yaml as DVC reads them, and a request to run one: its GPUs, image, data source and folders.

A container shows a stage only the data that dvc.yaml declares for it.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, Params
from stages.core.provenance import PROVENANCE_DIR
from stages.core.records import read_settings
from stages.evaluation.vllm.environment import TARGETS
from stages.launcher.gpus import Gpu
from stages.launcher.process import Image, triton_dir
from stages.training.checkpoints import checkpoints_dir

PLACE_VARIABLE = "BAKEOFF_PLACE"
IN_STEP = "step"
"""The place of a launcher that runs in a step of Slurm."""
PORTS = range(20000, 30000)
"""Ports of the rendezvous on the first node, one of them by the step's numbers. Linux assigns none of them by itself
(net.ipv4.ip_local_port_range begins at 32768)."""
TRACKED = ("train", "evaluate", "compare")
"""Stages that write a run of a tracker if params.yaml names one."""


@dataclass(frozen=True, kw_only=True)
class DeclaredStage:
    """One stage of dvc.yaml, its foreach item filled in."""

    name: str
    """DVC's name for it, e.g. "train@r1-llm-only"."""
    command: str
    """The launcher's command with the item, e.g. "docker/run train r1-llm-only".

    dvc.yaml leaves the item out: no name from params.yaml may reach a shell.
    """
    params: tuple[str, ...]
    """Dotted paths into params.yaml; `${profile}` is left as it is."""
    deps: tuple[str, ...]
    """Paths relative to the workspace."""
    outs: tuple[str, ...]
    """Paths relative to the workspace, metrics and plots included."""

    @property
    def provenance(self) -> str | None:
        """The output that the launcher writes, and not the stage itself."""
        return next((out for out in self.outs if out.startswith(f"{PROVENANCE_DIR}/")), None)

    @property
    def written(self) -> tuple[str, ...]:
        """The outputs that the stage itself writes."""
        return tuple(out for out in self.outs if out != self.provenance)

    def inputs(self, folder: str) -> tuple[str, ...]:
        """The dependencies at or below a folder of the workspace."""
        return tuple(dep for dep in self.deps if f"{dep}/".startswith(f"{folder}/"))


def cache_dir(workspace_dir: Path) -> Path:
    """The folder of DVC's objects: `cache.dir` of the workspace's own configuration, or .dvc/cache.

    DVC reads a person's and a machine's configuration too (`--global`, `--system`); a stage sees neither.
    """
    cache = workspace_dir / ".dvc/cache"
    for name in ("config", "config.local"):
        config = configparser.ConfigParser(interpolation=None, strict=False)
        with suppress(configparser.Error, OSError, UnicodeDecodeError):
            config.read(workspace_dir / ".dvc" / name, encoding="utf-8")
        if where := config.get("cache", "dir", fallback="").strip("\"'"):
            cache = workspace_dir / ".dvc" / where
    return cache / "files/md5"


def item_of(addressing: str) -> tuple[str, ...]:
    """The foreach item in DVC's name of a stage: r1 for `train@r1` or `../dvc.yaml:train@r1`; none without `@`."""
    _, at, item = addressing.rpartition(":")[2].partition("@")
    return (item,) if at else ()


def declared_stages(workspace_dir: Path) -> list[DeclaredStage]:
    """Every stage of dvc.yaml, foreach items filled in; none if the file is missing.

    It understands the part of DVC's templates that dvc.yaml uses: a foreach over a list, a dict, or `${a key of
    params.yaml}`, and `${item}`, `${key}`, `${item.name}`, `${item.name[0].inner}` within. DVC's own resolver takes a
    second to import.
    """
    if not (workspace_dir / "dvc.yaml").exists():
        return []
    pipeline, params = (read_settings(dict[str, Any], workspace_dir / name) for name in ("dvc.yaml", "params.yaml"))
    try:
        return [stage for name, entry in pipeline["stages"].items() for stage in _instances(name, entry, params)]
    except (AttributeError, LookupError, TypeError) as error:
        raise UserError(f"dvc.yaml cannot be filled in from params.yaml: {error!r}; dvc status says more") from None


def _instances(name: str, entry: dict[str, Any], params: dict[str, Any]) -> Iterator[DeclaredStage]:
    if "foreach" not in entry:
        yield _declared(name, entry)
        return
    items = entry["foreach"]
    if isinstance(items, str):
        items = params[items.removeprefix("${").removesuffix("}")]
    for key in items:
        known = {"key": key, "item": items[key] if isinstance(items, dict) else key}
        yield _declared(f"{name}@{key}", _filled(entry["do"], known))


def _filled(entry: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The entry with every `${path}` replaced that leads to a known value; others stay as they are."""

    def value(match: re.Match[str]) -> str:
        here: Any = known
        try:
            for step in re.findall(r"[\w-]+", match[1]):
                here = here[int(step) if isinstance(here, list) else step]
        except (LookupError, TypeError, ValueError):
            return match[0]
        return json.dumps(str(here))[1:-1]

    return json.loads(re.sub(r"\$\{([^}]+)\}", value, json.dumps(entry)))


def _declared(name: str, entry: dict[str, Any]) -> DeclaredStage:
    outs = [out for group in ("outs", "metrics", "plots") for out in entry.get(group, [])]
    return DeclaredStage(
        name=name,
        command=" ".join((entry["cmd"].removeprefix("exec "), *item_of(name))),
        params=tuple(entry.get("params", [])),
        deps=tuple(entry.get("deps", [])),
        # An output with options is a mapping of one key.
        outs=tuple(next(iter(out)) if isinstance(out, dict) else out for out in outs),
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of the launcher: a stage to be run, and what it needs by the files that the launcher reads."""

    stage: str
    """One of STAGES; `stages.<stage>` is the module that is run."""
    args: tuple[str, ...]
    """Arguments of the stage, e.g. ("r1-llm-only",)."""
    params: Params
    stages: Sequence[DeclaredStage]
    """All of dvc.yaml."""
    workspace_dir: Path
    """The checkout that holds `stages`, absolute; the stage's working directory."""
    caller: Mapping[str, str]
    """The launcher's environment; core/environment.py lists the variables that a stage inherits."""
    gpus: tuple[Gpu, ...] = ()
    """The leased GPUs; the stage sees no other."""
    attempt: int = 0
    """Number of times it ran out of memory so far; the stage lowers its settings by as many steps."""

    @property
    def name(self) -> str:
        """Name of the recipe, base or dataset; "" for a stage without one."""
        return self.args[0] if self.args else ""

    @property
    def title(self) -> str:
        """E.g. "train r1-llm-only", for messages."""
        return " ".join((self.stage, *self.args))

    @property
    def command(self) -> tuple[str, ...]:
        """The stage's name and all its arguments."""
        return (self.stage, *self.args, *(("--attempt", str(self.attempt)) if self.attempt else ()))

    @cached_property
    def declared(self) -> DeclaredStage | None:
        """Its stage in dvc.yaml; None if there is none, as for docker/run train --help."""
        command = " ".join(("docker/run", self.stage, *self.args))
        return next((each for each in self.stages if each.command == command), None)

    def require_declared(self) -> DeclaredStage:
        """Raises UserError if dvc.yaml has no such stage."""
        if self.declared is None:
            alike = [each.command for each in self.stages if each.command.split()[1] == self.stage]
            raise UserError(
                f"no stage of dvc.yaml runs `docker/run {self.title}`; there are: {', '.join(alike) or 'none like it'}"
            )
        return self.declared

    @property
    def by_dvc(self) -> bool:
        return "DVC_STAGE" in self.caller

    @property
    def in_step(self) -> bool:
        """Whether this launcher runs in a step of Slurm."""
        return self.caller.get(PLACE_VARIABLE) == IN_STEP

    @property
    def node(self) -> int:
        """Index of this machine among those of its step; only the outputs of the first one are kept."""
        return int(self.caller["SLURM_NODEID"]) if self.in_step else 0

    @property
    def repository_dir(self) -> Path:
        """The person's repository, also if DVC runs an experiment in a temporary clone of it."""
        return Path(self.caller.get("DVC_ROOT") or self.workspace_dir)

    @property
    def image_target(self) -> str:
        """The image that the stage runs in. With vLLM as the evaluation engine, `plan` needs vLLM's image too, so that
        a missing one is reported before a training and not after it.
        """
        kind = self.params.active.device.kind
        uses_vllm = self.params.active.evaluation.engine == "vllm" and self.stage in ("plan", "evaluate")
        return TARGETS[kind] if uses_vllm else kind

    @property
    def num_gpus(self) -> int:
        baseline, export = self.params.baselines.get(self.name), self.params.exports.get(self.name)
        on_cpu = (export and export.format == "gguf") or (baseline and baseline.answers)
        return 0 if on_cpu else gpus_wanted(self.stage, self.params.active.device)

    @property
    def num_nodes(self) -> int:
        return self.params.active.device.nodes if self.stage == "train" else 1

    @property
    def source(self) -> str:
        """Source of the data that the stage fetches, e.g. hub:OWNER/NAME@REVISION; "" for none."""
        return source_of(self.stage, self.name, self.params)

    @property
    def source_dir(self) -> Path | None:
        """The folder that `base` or `prepare` reads, which may lie outside the workspace; absolute."""
        kind, _, where = self.source.partition(":")
        return Path(os.path.normpath(self.workspace_dir / where)) if kind == "folder" else None

    @property
    def network(self) -> bool:
        """Whether the stage fetches from the hub. Only then does it get the network and the token."""
        return self.source.startswith("hub:")

    @property
    def kept_dirs(self) -> tuple[Path, ...]:
        """Folders that the stage writes to besides its outputs, and that outlive it.

        A training keeps checkpoints and features, tracked stages their runs (stages/training/records.py), and
        publish a key.
        """
        own_dir = self.repository_dir / ".bakeoff"
        tracked = (own_dir / "tracking",) if self.params.tracking.to and self.stage in TRACKED else ()
        if self.stage == "publish":
            return (own_dir / "signing",)
        if self.stage != "train":
            return tracked
        return (checkpoints_dir(self.repository_dir, self.name), own_dir / "features", *tracked)

    def cache_dirs(self, image: Image | None) -> dict[str, Path]:
        """Folders of downloads and of compiled kernels, by the variables that name them to the stage.

        The hub's is chosen as huggingface_hub does (huggingface_hub/constants.py).
        """
        cache_home = Path(self.caller.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        hub_dir = Path(self.caller.get("HF_HOME") or cache_home / "huggingface").expanduser().absolute()
        dirs = {"HF_HOME": hub_dir} if self.network else {}
        return dirs | ({"TRITON_CACHE_DIR": triton_dir(image, self.repository_dir)} if self.gpus else {})

    def variables(self, image: Image | None) -> dict[str, str]:
        """Variables that the launcher sets: the cache folders, and for a training over several nodes torchrun's options
        for joining (`joining_variables`).
        """
        joining = joining_variables(self.caller) if self.num_nodes > 1 and self.in_step else {}
        return {name: str(folder) for name, folder in self.cache_dirs(image).items()} | joining


def joining_variables(step: Mapping[str, str]) -> dict[str, str]:
    """torchrun's options to meet on the first node of a step (torch/distributed/run.py: PET_ and an option's name).

    step: the environment that srun gives to the tasks of the step. A launcher on each node starts torchrun.
    """
    nodes = ("scontrol", "show", "node", step["SLURM_STEP_NODELIST"], "--oneliner")
    first, *_ = subprocess.run(nodes, check=True, capture_output=True, text=True).stdout.splitlines()
    port = PORTS[(int(step["SLURM_JOB_ID"]) + int(step["SLURM_STEP_ID"])) % len(PORTS)]
    return {
        "PET_NODE_RANK": step["SLURM_NODEID"],
        "PET_MASTER_ADDR": first.partition("NodeAddr=")[2].split()[0],
        "PET_MASTER_PORT": str(port),
    }


def gpus_wanted(stage: str, device: DeviceParams) -> int:
    """Training takes all devices of the profile; a stage that holds one model for inference takes one of them."""
    if device.kind == "cpu":
        return 0
    return {"train": device.count, "merge": 1, "build": 1, "evaluate": 1, "predict": 1}.get(stage, 0)


def source_of(stage: str, name: str, params: Params) -> str:
    """The data source of a `base` or `prepare` stage; "" for other stages, and for a name the stage will refuse."""
    profile = params.active
    if stage == "prepare" and name in profile.datasets | params.guards:
        return (profile.datasets | params.guards)[name].source
    return profile.bases.get(name, "") if stage == "base" else ""
