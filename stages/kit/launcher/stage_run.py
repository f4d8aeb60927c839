"""What the launcher asks an engine to run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stages.core.provenance import Machine
from stages.kit.launcher.pipeline import DeclaredStage

STAGES = ("check", "base", "prepare", "plan", "train", "merge", "build", "evaluate", "predict", "compare", "publish")


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """One stage, to be run once in a process of its own."""

    stage: str
    """One of STAGES; `stages.<stage>` is the module that is run."""
    args: tuple[str, ...]
    """Passed on as they are, e.g. ("r1-llm-only",)."""
    declared: DeclaredStage | None
    """dvc.yaml's entry; a container needs one."""
    workspace_dir: Path
    """The checkout that holds `stages`, absolute; the stage's working directory."""
    source_dir: Path | None = None
    """The folder that `base` or `prepare` reads, which may lie outside the workspace; absolute."""
    network: bool = False
    """Whether it fetches from the hub or sends to it: only then it has the network, and the token."""
    kept_dirs: tuple[Path, ...] = ()
    """Folders that it may write to beside its outputs, kept between runs: checkpoints, the hub's cache; absolute."""
    gpus: tuple[str, ...] = ()
    """The UUIDs of the GPUs that are leased to it; it may see no other."""
    caller: Mapping[str, str]
    """The environment of whoever calls, of which the stage gets the parts that environment.py names."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher sets: where the hub and Triton keep their files."""
    terminal: bool = False
    """Whether a person watches the stage's output on one."""
    num_nodes: int = 1
    """On how many machines it runs at once."""
    node: int = 0
    """Which of them this is; only what the first one's makes is kept."""
    attempt: int = 0
    """How often it ran out of memory so far; tells the stage how much to give up."""

    @property
    def command(self) -> tuple[str, ...]:
        """The stage's name and all that it is called with."""
        attempt = ("--attempt", str(self.attempt)) if self.attempt else ()
        return (self.stage, *self.args, *attempt)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a stage ended."""

    code: int
    """128 + n where signal n ended it."""
    machine: Machine | None = None
    """What it ran on; None where that is unknown."""
