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
    """The number of steps in the longest chain that begins with each one, itself included.

    steps: each after those that it waits for.
    """
    lengths = dict.fromkeys(steps, 1)
    for name in reversed(lengths):
        for other in steps[name].waits_for:
            lengths[other] = max(lengths[other], 1 + lengths[name])
    return lengths


@dataclass(frozen=True, kw_only=True)
class _Running:
    process: subprocess.Popen[bytes]
    began: float


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
    signals: list[int] = field(default_factory=list)
    """Signals that asked the run to end."""

    def run(self) -> int:
        """Run all steps that can be run, and return the exit code: of the first that failed, or 128 + n after signal n.

        Signals that ask to end go to the stages that run, as Ctrl-C would under a single dvc; no other is started.
        """
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        waiting, running = dict.fromkeys(self.steps), dict[str, _Running]()
        with forwarded_signals() as signals:
            self.signals = signals.received
            signals.forward_to(lambda number: _ask_to_end(running.values(), number))
            while True:
                if not self.signals:
                    names = next_steps(
                        self.steps, waiting=waiting, running=running, done=self.done, jobs=self.jobs, gpus=self.gpus
                    )
                    for name in names:
                        del waiting[name]
                        running[name] = self._start(name)
                        if self.signals:  # one came while it was being started
                            _ask_to_end([running[name]], self.signals[0])
                            break
                if not running:
                    return self._result()
                time.sleep(POLL_S)
                for name in [name for name, each in running.items() if each.process.poll() is not None]:
                    self._end(name, running.pop(name))

    def log_path(self, name: str) -> Path:
        return self.logs_dir / f"{name.replace('/', '_')}.log"

    def _start(self, name: str) -> _Running:
        with self.log_path(name).open("wb") as log:
            process = subprocess.Popen(
                [*self.dvc, name],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # In its own process group, a Ctrl-C reaches its processes once, from here.
                process_group=0,
                preexec_fn=end_with_parent(),
            )
        say(f"{name} starts")
        return _Running(process=process, began=time.monotonic())

    def _end(self, name: str, ended: _Running) -> None:
        code, took = ended.process.returncode, f"{time.monotonic() - ended.began:.0f} s"
        log = self.log_path(name).read_text(encoding="utf-8", errors="replace")
        if code == 0:
            self.done.append(name)
            # DVC prints this if it runs the command; otherwise it had nothing to do, or the outputs in its cache.
            say(f"{name} done in {took}" + ("" if f"Running stage '{name}'" in log else ", without running it"))
            return
        self.failed[name] = code if code > 0 else 128 - code
        if self.signals:
            say(f"{name} interrupted after {took}")
            log, shown = re.sub(r"^ERROR: .*\n", "", log, flags=re.MULTILINE), 1  # the stage's last line, not DVC's
        else:
            say(f"{name} FAILED after {took}; the end of {self.log_path(name)}:")
            shown = SHOWN_LINES
        for line in printable(log).strip().splitlines()[-shown:]:
            click.echo(f"    {line}")
        sys.stdout.flush()

    def _result(self) -> int:
        left = [name for name in self.steps if name not in self.done and name not in self.failed]
        if self.signals and (left or self.failed):
            say("interrupted; run the same command to resume")
            return 128 + self.signals[0]
        if not self.failed:
            return 0
        first, *others = self.failed
        say(f"{first} failed" + (f", and then {', '.join(others)}" if others else ""))
        if left:
            say(f"not started, as they depend on {'them' if others else 'it'}: {', '.join(left)}")
        return self.failed[first]


def _ask_to_end(running: Iterable[_Running], number: int) -> None:
    """SIGINT is the one signal upon which dvc waits for its stage. A closed terminal (SIGHUP) is passed on as such: it
    ends dvc, and a job of Slurm goes on.
    """
    for each in list(running):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(each.process.pid, signal.SIGHUP if number == signal.SIGHUP else signal.SIGINT)


def say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {line}")
    sys.stdout.flush()
