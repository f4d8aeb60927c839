"""What the launcher asks an engine to run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STAGES = ("base", "prepare", "plan", "train", "merge", "evaluate", "compare")

FETCHING_STAGES = frozenset({"base", "prepare"})
"""The stages that fetch models and data: they alone get the network, and the hub's token."""


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """One stage, to be run once in a process of its own."""

    stage: str
    """One of STAGES; `stages.<stage>` is the module that is run."""
    args: tuple[str, ...]
    """Passed on as they are, e.g. ("r1-llm-only",)."""
    workspace_dir: Path
    """The checkout that holds `stages`, absolute; the stage's working directory."""
    network: bool
    """Whether the stage may reach the network. An engine that cannot take it away tells the libraries."""
    environment: Mapping[str, str]
    """The whole environment of the stage; nothing is inherited beside it."""
