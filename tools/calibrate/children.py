"""Every prediction and every measurement in a fresh process: nothing of the one before is left, on no device."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stages.core.environment import stage_environment
from stages.core.errors import OUT_OF_MEMORY, OutOfMemory, UserError
from stages.core.parent_death import end_with_parent
from stages.kit.launcher.machine import triton_dir

TIMEOUT_S = 480


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a child is to do; child.py does it."""

    job: Literal["facts", "predict", "measure"]
    device: Literal["cpu", "cuda"]
    setting: str = ""
    layers: tuple[int, int] | None = None
    """Of the setting's model; None for all."""
    capacity_bytes: int | None = None
    """Of the device; layers are left out until the prediction fits. None: they never are."""
    workspace_bytes: int = 0
    workspaces: int = 0
    """Of cuBLAS, as measured; 0 where they were not."""


class ChildFailed(UserError):
    """Neither an answer nor a lack of memory."""


class Children:
    """Processes in the environment of a stage. Several threads may start them."""

    def __init__(self, logs_dir: Path, gpu: str) -> None:
        """gpu: what CUDA_VISIBLE_DEVICES is for those that may see a device; empty for none."""
        self._logs_dir = logs_dir
        self._gpu = gpu
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.stopped = False

    def run(self, task: Task) -> str:
        """The child's answer, as JSON. Raises OutOfMemory, and ChildFailed for all else that goes wrong."""
        return self.answer(
            "tools.calibrate.child",
            json.dumps(asdict(task)),
            name=f"{task.job} {task.setting}",
            # A prediction must come about without a GPU.
            sees_gpu=task.job != "predict",
        )

    def answer(
        self, module: str, task_json: str, *, name: str, sees_gpu: bool = True, timeout_s: float = TIMEOUT_S
    ) -> str:
        """Run `python -m MODULE TASK_JSON ANSWER_PATH` and return what it writes to the path. Raises as `run` does.

        name: of its log.
        """
        self._logs_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._logs_dir / f"{re.sub(r'[^a-z0-9.-]+', '-', name.lower())}.log"
        with tempfile.TemporaryDirectory() as folder, log_path.open("wb") as log:
            answer_path = Path(folder) / "answer.json"
            child = self._start([module, task_json, str(answer_path)], log, sees_gpu=sees_gpu)
            code = self._wait(child, timeout_s)
            if code == 0:
                return answer_path.read_text(encoding="utf-8")
        if code == OUT_OF_MEMORY:
            raise OutOfMemory("out of memory")
        said = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [f"exit code {code}"]
        raise ChildFailed(f"{said[-1].removeprefix('Error: ')} (all of it in {log_path})")

    def stop(self) -> None:
        """Ends those that run; no others start."""
        with self._lock:
            self.stopped = True
            for child in self._running:
                _kill(child)

    def _start(self, command: list[str], log: Any, *, sees_gpu: bool) -> subprocess.Popen[bytes]:
        environment = stage_environment("train", os.environ, network=False, terminal=False)
        environment["CUDA_VISIBLE_DEVICES"] = self._gpu if sees_gpu else ""  # an empty list is none
        environment["TRITON_CACHE_DIR"] = str(triton_dir(None, Path.cwd()))
        with self._lock:
            if self.stopped:
                raise ChildFailed("was not started: all end")
            child = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Whoever starts the children hears of Ctrl-C, and ends them with what they started.
                process_group=0,
                preexec_fn=end_with_parent(),
            )
            self._running.add(child)
        return child

    def _wait(self, child: subprocess.Popen[bytes], timeout_s: float) -> int:
        try:
            return child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill(child)
            child.wait()
            raise ChildFailed(f"took more than {timeout_s:.0f} s") from None
        finally:
            with self._lock:
                self._running.discard(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """With all that it started and left in its process group."""
    with suppress(ProcessLookupError, PermissionError):  # as stages/kit/launcher/process.py has it
        os.killpg(child.pid, signal.SIGKILL)
