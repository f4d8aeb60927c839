"""Counts what a process changes on the disk, and has it end, or its clock set back, just before a given change.

The tool's own environment has this as its sitecustomize: so it is in dvc, in the launcher and in the stage, none of
which knows of it. Without an order for this kind of process it does nothing. Python tells of changes that are made in
Python (sys.addaudithook); what safetensors and Arrow write by themselves lies between two of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ORDER = Path(".bakeoff/fault.json")
"""{"role": ..., "count": path} has each change written to a file. {"role": ..., "number": n, "act": ...} acts before
that one: it sets the clock back, or sends a signal to the process that is so many "above" this one."""
WATCHED = re.compile(r"(data|\.dvc/cache|\.bakeoff/checkpoints)/|dvc\.lock$")
CHANGES = frozenset(f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "chmod"))
SET_BACK_S = 3600.0


def role_of(words: Sequence[str]) -> str:
    """Of a process, by its command line: dvc, launcher, stage, or "" for another."""
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if module in ("dvc", "stages.kit.launcher.launch"):
        return "dvc" if module == "dvc" else "launcher"
    return "stage" if re.fullmatch(r"stages\.(?!verify)\w+", module) else ""


class Watch:
    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.number = 0
        self.top = f"{Path.cwd()}/"
        log = order.get("count")
        self.log = os.open(f"{log}-{role_of(sys.orig_argv)}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) if log else None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            place, _, flags = args
            if isinstance(place, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in CHANGES:
            place = args[0]
        else:
            return
        directory = args[-1] if event in ("os.remove", "os.rmdir") else -1
        shown = self.shown(place, directory)
        if WATCHED.match(shown):
            self.before(event.removeprefix("os."), shown)

    def shown(self, place: Any, directory: int) -> str:
        """A path as seen from the workspace."""
        path = os.fsdecode(place) if not isinstance(place, int) else f"/proc/self/fd/{place}"
        if directory >= 0:
            path = str(Path(f"/proc/self/fd/{directory}").readlink() / path)
        return path.removeprefix(self.top)

    def before(self, event: str, path: str) -> None:
        if self.log is not None:
            os.write(self.log, f"{json.dumps([event, path])}\n".encode())
            return
        self.number += 1
        if self.number == self.order["number"]:
            act(self.order)


def act(order: dict[str, Any]) -> None:
    """Before anything else can happen."""
    ORDER.with_suffix(".done").touch()
    if order["act"] == "set the clock back":
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() - SET_BACK_S
        time.time_ns = lambda: now_ns() - int(SET_BACK_S * 1e9)
        return
    import psutil

    process: psutil.Process | None = psutil.Process()
    for _ in range(int(order["above"])):
        process = process.parent() if process is not None else None
    if process is not None and process.cwd() == str(Path.cwd()):  # it has not gone, and left its child to another
        process.send_signal(order["signal"])


def heed() -> None:
    try:
        order = json.loads(ORDER.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    own = role_of(sys.orig_argv)
    if own and order["role"] in (own, "all"):
        sys.addaudithook(Watch(order))


heed()
