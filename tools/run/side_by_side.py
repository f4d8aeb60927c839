"""Runs stages side by side, each by a dvc of its own, and says in one line when each starts and ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from stages.core.errors import printable
from stages.core.parent_death import end_with_parent
from stages.kit.launcher.process import ForwardedSignals, forwarded_signals
from tools.run.schedule import Step, next_steps

POLL_S = 0.05
SHOWN_LINES = 40
"""Of the output of a stage that failed; the file has all of it."""


@dataclass(kw_only=True)
class Result:
    """How a run ended."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    """Exit code of dvc by stage, in the order in which they ended."""
    signal: int | None = None
    """The first one that asked the run to end."""


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """Steps, and how they are run."""

    steps: Mapping[str, Step]
    dvc: Sequence[str]
    """The command, to which the name of a stage is added."""
    environment: Mapping[str, str]
    logs_dir: Path
    jobs: int
    gpus: int

    def run(self) -> Result:
        """Run all steps that can be run, to their end.

        Signals that ask to end go to the stages that run, as Ctrl-C would under a single dvc; no other is started.
        """
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        result, waiting, running = Result(), dict.fromkeys(self.steps), dict[str, _Running]()
        with forwarded_signals() as signals:
            signals.forward_to(lambda number: _ask_to_end(running.values(), number))
            while True:
                if not signals.received:
                    for name in self._next(waiting, running, result):
                        del waiting[name]
                        running[name] = self._start(name)
                        if signals.received:  # while it was being started
                            _ask_to_end([running[name]], signals.received[0])
                            break
                if not running:
                    break
                time.sleep(POLL_S)
                for name in [name for name, each in running.items() if each.process.poll() is not None]:
                    self._end(name, running.pop(name), result, signals)
            result.signal = next(iter(signals.received), None)
        return result

    def log_path(self, name: str) -> Path:
        return self.logs_dir / f"{name.replace('/', '_')}.log"

    def _next(self, waiting: Mapping[str, None], running: Mapping[str, _Running], result: Result) -> list[str]:
        return next_steps(
            self.steps,
            waiting=waiting,
            running=running,
            done=result.done,
            jobs=self.jobs,
            gpus=self.gpus,
        )

    def _start(self, name: str) -> _Running:
        with self.log_path(name).open("wb") as log:
            process = subprocess.Popen(
                [*self.dvc, name],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Of its own process group: a Ctrl-C reaches its processes once, from here.
                process_group=0,
                preexec_fn=end_with_parent(),
            )
        say(f"{name} starts")
        return _Running(process=process, began=time.monotonic())

    def _end(self, name: str, ended: _Running, result: Result, signals: ForwardedSignals) -> None:
        code, took = ended.process.returncode, f"{time.monotonic() - ended.began:.0f} s"
        log = self.log_path(name).read_text(encoding="utf-8", errors="replace")
        if code == 0:
            result.done.append(name)
            # DVC's words where the command runs; without them it had nothing to do, or had the outputs in its cache.
            say(f"{name} done in {took}" + ("" if f"Running stage '{name}'" in log else ", without running it"))
            return
        result.failed[name] = code if code > 0 else 128 - code
        if signals.received:
            say(f"{name} interrupted after {took}")
            log, shown = re.sub(r"^ERROR: .*\n", "", log, flags=re.MULTILINE), 1  # what the stage said before DVC
        else:
            say(f"{name} FAILED after {took}; the end of {self.log_path(name)}:")
            shown = SHOWN_LINES
        for line in printable(log).strip().splitlines()[-shown:]:
            click.echo(f"    {line}")
        sys.stdout.flush()


@dataclass(frozen=True, kw_only=True)
class _Running:
    process: subprocess.Popen[bytes]
    began: float


def _ask_to_end(running: Iterable[_Running], number: int) -> None:
    """SIGINT, which is the one signal that has dvc wait for its stage.

    But a closed terminal stays one: it ends dvc, and a job of Slurm goes on.
    """
    for each in list(running):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(each.process.pid, signal.SIGHUP if number == signal.SIGHUP else signal.SIGINT)


def say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {line}")
    sys.stdout.flush()
