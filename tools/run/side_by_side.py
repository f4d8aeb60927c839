"""Runs stages side by side, each by a dvc of its own: the longest chain of dependent stages first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click

from stages.core.errors import printable
from stages.core.signals import end_with_parent
from stages.kit.launcher.process import forwarded_signals

POLL_S = 0.05
SHOWN_LINES = 40
"""Lines of output that are shown of a stage that failed; its log has all of them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage that may have something to do."""

    waits_for: frozenset[str]
    """The steps that it depends on directly."""
    gpus: int = 0
    """Number of GPUs that it will lease."""


def next_steps(
    steps: Mapping[str, Step],
    *,
    waiting: Collection[str],
    running: Collection[str],
    done: Collection[str],
    jobs: int,
    gpus: int,
) -> list[str]:
    """The names of the steps to start now, those first that begin the longest chain of steps.

    steps: each after those that it waits for.
    waiting: not started yet. done: succeeded; a step that waits for a failed one is never started.
    jobs: steps at once. gpus: number of the machine; a step that wants more starts when no other step has one, and
    reports the problem itself.
    """
    length = chain_lengths(steps)
    ready = [name for name in waiting if steps[name].waits_for <= set(done)]
    chosen: list[str] = []
    for name in sorted(ready, key=lambda name: -length[name]):
        together = [*running, *chosen]
        used, wanted = sum(steps[other].gpus for other in together), steps[name].gpus
        if len(together) < jobs and (not (wanted and used) or used + wanted <= gpus):
            chosen.append(name)
    return chosen


def chain_lengths(steps: Mapping[str, Step]) -> dict[str, int]:
    """The number of steps in the longest chain that begins with each one, itself included."""
    lengths = dict.fromkeys(steps, 1)
    for name in reversed(lengths):
        for other in steps[name].waits_for:
            lengths[other] = max(lengths[other], 1 + lengths[name])
    return lengths


@dataclass(kw_only=True)
class SideBySide:
    """A run of steps, and its result."""

    steps: Mapping[str, Step]
    dvc: Sequence[str]
    """The command, to which the name of a stage is added."""
    environment: Mapping[str, str]
    logs_dir: Path
    jobs: int
    gpus: int
    done: list[str] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    """dvc's exit code by stage, in the order in which they ended."""

    def run(self) -> int:
        """Run all steps that can be run, and return the exit code: of the first that failed, or 128 + n after signal n.

        Signals that ask to end go to the stages that run, as Ctrl-C would under a single dvc; no other is started.
        """
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        waiting = dict.fromkeys(self.steps)
        running, began = dict[str, subprocess.Popen[bytes]](), dict[str, float]()
        with forwarded_signals() as signals:
            signals.forward_to(lambda number: _ask_to_end(running.values(), number))
            while True:
                for name in next_steps(
                    self.steps, waiting=waiting, running=running, done=self.done, jobs=self.jobs, gpus=self.gpus
                ):
                    if signals.received:
                        break
                    del waiting[name]
                    running[name], began[name] = self._start(name), time.monotonic()
                    if signals.received:  # one came while it was being started
                        _ask_to_end([running[name]], signals.received[0])
                if not running:
                    return self._result(signals.received)
                time.sleep(POLL_S)
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    code, took = running.pop(name).returncode, f"{time.monotonic() - began[name]:.0f} s"
                    self._end(name, code if code >= 0 else 128 - code, took, interrupted=bool(signals.received))

    def log_path(self, name: str) -> Path:
        return self.logs_dir / f"{name.replace('/', '_')}.log"

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        say(f"{name} starts")
        with self.log_path(name).open("wb") as log:
            return subprocess.Popen(
                [*self.dvc, name],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # In its own process group, a Ctrl-C reaches its processes once, from here.
                process_group=0,
                preexec_fn=end_with_parent(),
            )

    def _end(self, name: str, code: int, took: str, *, interrupted: bool) -> None:
        log, shown = self.log_path(name).read_text(encoding="utf-8", errors="replace"), SHOWN_LINES
        if code == 0:
            self.done.append(name)
            # DVC prints this if it runs the command; otherwise it had nothing to do, or the outputs in its cache.
            say(f"{name} done in {took}" + ("" if f"Running stage '{name}'" in log else ", without running it"))
            return
        self.failed[name] = code
        if interrupted:
            say(f"{name} interrupted after {took}")
            log, shown = re.sub(r"^ERROR: .*\n", "", log, flags=re.MULTILINE), 1  # the stage's last line, not DVC's
        else:
            say(f"{name} FAILED after {took}; the end of {self.log_path(name)}:")
        for line in printable(log).strip().splitlines()[-shown:]:
            click.echo(f"    {line}")
        sys.stdout.flush()

    def _result(self, received: Sequence[int]) -> int:
        left = [name for name in self.steps if name not in self.done and name not in self.failed]
        if received and (left or self.failed):
            say("interrupted; run the same command to resume")
            return 128 + received[0]
        if not self.failed:
            return 0
        say(f"failed: {', '.join(self.failed)}")
        if left:
            say(f"not started, as they depend on {'them' if len(self.failed) > 1 else 'it'}: {', '.join(left)}")
        return next(iter(self.failed.values()))


def _ask_to_end(running: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """SIGINT is the one signal upon which dvc waits for its stage. A closed terminal (SIGHUP) is passed on as such: it
    ends dvc, and a job of Slurm goes on.
    """
    for process in list(running):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGHUP if number == signal.SIGHUP else signal.SIGINT)


def say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {line}")
    sys.stdout.flush()
