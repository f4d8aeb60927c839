"""Pieces in processes of their own, one after the other or several at once, until the time is up.

In a fresh process nothing of the one before is left, on no device.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

from stages.core.environment import stage_environment, usable_cores
from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.core.signals import end_with_parent
from stages.kit.launcher.process import triton_dir
from stages.kit.reporting.tables import seconds_text
from tools.gpu.device import Device
from tools.gpu.pieces import Piece
from tools.gpu.results import Results, Status

log = logging.getLogger("stages")

TIMEOUT_S = 900
"""For one piece. A mixture at tiny size, all the way, takes some minutes on a CPU."""


class Runner:
    def __init__(self, device: Device, results: Results, *, deadline: float) -> None:
        """deadline: of time.monotonic; nothing starts after it."""
        self._device, self._results, self._deadline = device, results, deadline
        # Most of a tiny training is the start of its processes.
        self._workers = min(4, max(1, usable_cores() // 2))
        self._stopped = False

    def run(self, pieces: Sequence[Piece]) -> None:
        """Each result is kept when it is there. On KeyboardInterrupt what runs is ended, and none of it is kept."""
        for is_alone, group in groupby(pieces, key=lambda piece: piece.is_alone):
            with ThreadPoolExecutor(1 if is_alone else self._workers) as pool:
                futures = [pool.submit(self._run, piece) for piece in group]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    self._stopped = True
                    while not all(future.done() for future in futures):
                        for child in psutil.Process().children(recursive=True):
                            with suppress(psutil.NoSuchProcess):
                                child.kill()
                        time.sleep(0.05)
                    raise

    def _run(self, piece: Piece) -> None:
        if self._stopped or time.monotonic() > self._deadline:
            return
        log.info("%s ...", piece.key)
        began = time.monotonic()
        status: Status = "done"
        data, problem = {}, ""
        try:
            data = self._answer(piece)
        except UserError as error:
            status, problem = "out of memory" if isinstance(error, OutOfMemory) else "failed", error.message
        if not self._stopped:
            seconds = time.monotonic() - began
            self._results.keep(piece, status, seconds=seconds, problem=problem, data=data)
            log.info("%s: %s in %s", piece.key, problem or status, seconds_text(seconds))

    def _answer(self, piece: Piece) -> dict[str, Any]:
        """What the piece's process writes. Raises OutOfMemory, and UserError for all else that goes wrong."""
        needed = {name: self._results.data(key) for name, key in piece.needs.items()}
        if missing := [piece.needs[name] for name, data in needed.items() if data is None]:
            raise UserError(f"needs a result of {missing[0]}")
        task = json.dumps({"step": piece.step, "device": self._device.kind, "task": {**piece.task, **needed}})
        log_path = self._results.path.parent / "logs" / f"{re.sub(r'[^a-z0-9.-]+', '-', piece.key.lower())}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # The folder also takes what a process leaves that is killed.
        with tempfile.TemporaryDirectory(prefix="bakeoff-gpu-", ignore_cleanup_errors=True) as folder:
            answer_path = Path(folder, "answer.json")
            code = self._code([task, str(answer_path)], piece, log_path, scratch_dir=folder)
            if code == 0:
                answer: dict[str, Any] = json.loads(answer_path.read_text(encoding="utf-8"))
                return answer
        if code == OUT_OF_MEMORY:
            raise OutOfMemory("out of memory")
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [f"exit code {code}"]
        raise UserError(f"{lines[-1].removeprefix('Error: ')} (all of it in {log_path})")

    def _code(self, arguments: Sequence[str], piece: Piece, log_path: Path, *, scratch_dir: str) -> int:
        """The exit code of child.py in the environment of a stage. Raises UserError where it takes too long."""
        environment = stage_environment("train", os.environ, network=False, terminal=False) | {
            # An empty list is none: a prediction must come about without a GPU.
            "CUDA_VISIBLE_DEVICES": "" if piece.step == "predictions" else self._device.uuid,
            "TRITON_CACHE_DIR": str(triton_dir(None, Path.cwd())),
            "TMPDIR": scratch_dir,
        }
        try:
            with log_path.open("wb") as output:
                return subprocess.run(
                    [sys.executable, "-m", "tools.gpu.child", *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=TIMEOUT_S,
                    check=False,
                    process_group=0,  # Ctrl-C reaches this process only, which ends the others
                    preexec_fn=end_with_parent(),
                ).returncode
        except subprocess.TimeoutExpired:
            raise UserError(f"took more than {TIMEOUT_S} s") from None
