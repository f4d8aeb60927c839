"""What is damaged in a workspace, and the command that fixes it: one for each output, whatever is wrong with it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from tools.verify.snapshot import WorkspaceSnapshot, is_within, overlap

RESTORE = "make verify RESTORE=1"
"""Copies what is intact in the workspace into DVC's cache."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    path: str
    """Relative to the workspace where it is in it."""
    problems: tuple[str, ...]
    fix: str
    """The command."""


class Findings:
    """What was found so far, by path."""

    def __init__(self, snapshot: WorkspaceSnapshot) -> None:
        self.snapshot = snapshot
        self._by_path: dict[str, Finding] = {}
        self.restorable: dict[Path, Path | bytes] = {}
        """Objects that are damaged or missing in the cache: an intact copy of each, or its content."""
        self.absent = 0
        """Outputs of dvc.lock that are neither in the workspace nor in the cache."""

    def in_order(self) -> tuple[Finding, ...]:
        """In the order of the pipeline: later outputs are made from earlier ones."""
        order = {out: position for position, out in enumerate(self.snapshot.declared)}
        return tuple(sorted(self._by_path.values(), key=lambda finding: order.get(finding.path, len(order))))

    def concern(self, path: str) -> bool:
        """Whether something was found at a path, below it, or around it."""
        return any(overlap(path, found) for found in self._by_path)

    def add(self, path: str, *problems: str, fix: str = "") -> None:
        """Add problems of a path to those of the output that it belongs to.

        fix: the command; without one, that of earlier problems, or else the one that runs the output's stage again.
        """
        owner = next((out for out in self.snapshot.declared if is_within(path, out)), path)
        stage = self.snapshot.stage_of(owner)
        rebuild = (
            f"dvc repro -f -s {stage}" if stage else f"rm -rf {shlex.quote(owner)}  # no stage of dvc.yaml makes it"
        )
        before = self._by_path.get(owner, Finding(path=owner, problems=(), fix=rebuild))
        self._by_path[owner] = Finding(path=owner, problems=(*before.problems, *problems), fix=fix or before.fix)

    def missing(self, path: str, role: str, *, of: str) -> None:
        """Add that a path is missing which another one refers to, as its base, its certificate and so on."""
        snapshot, problem = self.snapshot, f"is not here, though it is the {role} of {of}"
        cached = any(output.md5 in snapshot.objects for output in snapshot.outputs if is_within(path, output.path))
        if cached and not self.concern(path):
            self.add(path, problem, fix=f"dvc checkout {shlex.quote(path)}")
        elif snapshot.stage_of(path) or self.concern(path):
            self.add(path, problem)
        else:
            self.add(of, f"its {role} {path} is not here, and no stage makes that; where you have it, put it there")
