"""What is damaged in a workspace, and the command that mends it: one for each output, whatever is wrong with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tools.verify.holdings import Holdings
from tools.verify.store import is_within

RESTORE = "make verify RESTORE=1"
"""Takes for DVC's cache what is intact in the workspace."""

MAX_NAMES = 5


@dataclass(frozen=True, kw_only=True)
class Damage:
    path: str
    """Relative to the workspace where it lies in it."""
    found: tuple[str, ...]
    mend: str
    """The command that does."""


class Damages:
    """What was found so far, by path."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self._by_path: dict[str, Damage] = {}

    def in_order(self) -> tuple[Damage, ...]:
        """That of the pipeline: what lies further down is made from what lies above it."""
        order = {out: position for position, out in enumerate(self.holdings.store.declared)}
        return tuple(sorted(self._by_path.values(), key=lambda damage: order.get(damage.path, len(order))))

    def add(self, path: str, found: Iterable[str], mend: str) -> None:
        self._by_path[path] = Damage(path=path, found=tuple(found), mend=mend)

    def touch(self, path: str) -> bool:
        """Whether something that was found lies at a path, below it, or around it."""
        return any(is_within(path, damaged) or is_within(damaged, path) for damaged in self._by_path)

    def blame(self, path: str, what: str) -> None:
        """Say more of an output that is damaged; or, where DVC has it just as it is, leave it to its stage to mend."""
        owner = next((out for out in self.holdings.store.declared if is_within(path, out)), path)
        before = self._by_path.get(owner)
        if before is None:
            self.add(owner, [what], self._rebuild(owner))
        else:
            self._by_path[owner] = replace(before, found=(*before.found, what))

    def miss(self, path: str, role: str, of: str) -> None:
        """Something that is not here, and that something else here has as its base, its certificate and so on."""
        store = self.holdings.store
        what = f"is not here, though it is the {role} of {of}"
        if self.touch(path):
            self.blame(path, what)
        elif any(output.md5 in store.objects for output in store.outputs if is_within(path, output.path)):
            self.add(path, [what], f"dvc checkout {shlex.quote(path)}")
        elif store.stage_of(path):
            self.add(path, [what], self._rebuild(path))
        else:
            self.blame(of, f"its {role} {path} is not here, and no stage makes that; where you have it, put it there")

    def _rebuild(self, path: str) -> str:
        stage = self.holdings.store.stage_of(path)
        return f"dvc repro -f -s {stage}" if stage else f"rm -rf {shlex.quote(path)}  # no stage of dvc.yaml makes it"

    def quoted(self, paths: Iterable[Path]) -> str:
        return shlex.join(self.holdings.shown(path) for path in paths)


def some(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more:,} more" if more > 0 else "")
