"""Pieces in processes of their own, one after the other or several at once, until the time is up."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

from stages.core.errors import OutOfMemory
from stages.kit.reporting.tables import seconds_text
from tools.calibrate.children import ChildFailed, Children
from tools.gpu.pieces import Device, Piece
from tools.gpu.results import Result, Results

log = logging.getLogger("stages")


class Runner:
    def __init__(self, device: Device, children: Children, results: Results, *, deadline: float, workers: int) -> None:
        """deadline: of time.monotonic; nothing starts after it. workers: tiny trainings at once."""
        self._device, self._children, self._results = device, children, results
        self._deadline, self._workers = deadline, workers

    def run(self, pieces: list[Piece]) -> None:
        """Each result is kept when it is there. On KeyboardInterrupt what runs is ended, and none of it is kept."""
        for is_alone, group in groupby(pieces, key=lambda piece: piece.is_alone):
            with ThreadPoolExecutor(1 if is_alone else self._workers) as pool:
                futures: list[Future[None]] = [pool.submit(self._run, piece) for piece in group]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    for future in futures:
                        future.cancel()
                    self._children.stop()
                    raise

    def _run(self, piece: Piece) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            return
        log.info("%s ...", piece.key)
        result = self._result(piece, left_s)
        if result is not None:
            log.info("%s: %s in %s", piece.key, result.problem or result.status, seconds_text(result.seconds))

    def _result(self, piece: Piece, left_s: float) -> Result | None:
        """None where the process was ended from here."""
        task = {"step": piece.step, "device": self._device.kind, "left_s": min(left_s, 1e9), "task": piece.task}
        began = time.monotonic()
        try:
            answer = self._children.answer(
                "tools.gpu.child", json.dumps(task), name=piece.key, timeout_s=piece.timeout_s
            )
        except (OutOfMemory, ChildFailed) as error:
            if self._children.stopped:
                return None
            status = "out of memory" if isinstance(error, OutOfMemory) else "failed"
            problem = error.message
            return self._results.keep(piece, status, seconds=time.monotonic() - began, problem=problem)
        data = json.loads(answer)
        status, problem = data.pop("status", "done"), data.pop("problem", "")
        return self._results.keep(piece, status, seconds=time.monotonic() - began, problem=problem, data=data)
