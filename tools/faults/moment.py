"""Counts the changes that a process makes on the disk, and kills it, or sets its clock back, before a given change.

It is the sitecustomize of the tool's own environment, so dvc, the launcher and the stage run it without knowing of it.
Without an order for this kind of process it does nothing. Python reports changes that are made in Python
(sys.addaudithook); safetensors and Arrow write between two of them.
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
"""{"log": folder}: every process writes its changes to a file there. {"role": ..., "number": n, "act": ...}: a process
of this kind acts before that change: it sets its clock back, or kills the one that is so many "above" it."""
WATCHED = re.compile(r"(data|\.dvc/cache|\.bakeoff/checkpoints)/|dvc\.lock$")
CHANGES = frozenset(f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "chmod"))
SET_BACK_S = 3600.0


def role_of(words: Sequence[str]) -> str:
    """The kind of a process, by its command line: dvc, launcher, stage, or "" for another."""
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if module in ("dvc", "stages.kit.launcher.launch"):
        return "dvc" if module == "dvc" else "launcher"
    return "stage" if re.fullmatch(r"stages\.\w+", module) else ""


class Watch:
    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.number = 0
        self.top = f"{Path.cwd()}/"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.log = os.open(f"{order['log']}/{role_of(sys.orig_argv)}", flags) if "log" in order else None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES and (event != "open" or not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        if isinstance(args[0], int):  # an open file
            return
        path = os.fsdecode(args[0])
        if event in ("os.remove", "os.rmdir") and args[-1] >= 0:  # relative to an open folder
            path = str(Path(f"/proc/self/fd/{args[-1]}").readlink() / path)
        path = path.removeprefix(self.top)
        if not WATCHED.match(path):
            return
        if self.log is not None:
            os.write(self.log, f"{event.removeprefix('os.')} of {path}\n".encode())
            return
        self.number += 1
        if self.number == self.order["number"]:
            act(self.order)


def act(order: dict[str, Any]) -> None:
    ORDER.with_suffix(".done").touch()
    if order["act"] == "set the clock back":
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() - SET_BACK_S
        time.time_ns = lambda: now_ns() - int(SET_BACK_S * 1e9)
        return
    import psutil

    process = (psutil.Process(), *psutil.Process().parents())[order["above"]]
    if process.cwd() == str(Path.cwd()):  # else the parent has ended, and another one took over
        process.kill()


def watch_if_ordered() -> None:
    try:
        order = json.loads(ORDER.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    own = role_of(sys.orig_argv)
    if own and order.get("role", own) == own:
        sys.addaudithook(Watch(order))


watch_if_ordered()
