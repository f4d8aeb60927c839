"""Run stages of dvc.yaml side by side if they do not depend on each other: `dvc repro` for several GPUs or cores.

Reads   dvc.yaml, params.yaml and dvc.lock, as DVC does
Writes  what `dvc repro TARGETS` writes; the output of each stage to .bakeoff/logs/STAGE.log
Run     make run TASK=detection JOBS=4
        python -m tools.run evaluate@r1-llm-only evaluate@r4-joint --jobs 2
        make run TASK=chat PROFILE=smollm2-135m      writes `profile: smollm2-135m` into params.yaml first

Each stage is a `dvc repro --single-item`, started when the stages that it depends on are done, those first that begin
the longest chain of stages. When one fails, those that do not depend on it are finished; it ends with the exit code of
the first that failed.
"""

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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from stages.core.atomic import atomic_write
from stages.core.environment import usable_cores
from stages.core.errors import UserError, listed, pluralize
from stages.core.locks import hold
from stages.core.params import load_params
from stages.core.params.schema import DeviceParams, Params
from stages.core.records import parse_yaml
from stages.launcher.gpus import leasable, read_gpus
from stages.launcher.pipeline import gpus_wanted
from stages.launcher.process import forwarded_signals, start, wait_for
from stages.launcher.slurm import runs_in_slurm

if TYPE_CHECKING:
    from dvc.stage import Stage

LOCK_PATH = Path(".bakeoff/run.lock")
LOGS_DIR = Path(".bakeoff/logs")
POLL_S = 0.05
REPORT_S = 30
"""Seconds between two reports of the last lines that running stages wrote."""
SHOWN_LINES = 40
"""Lines of output that are shown of a stage that failed; its log has all of them."""


@click.command(help=__doc__)
@click.argument("targets", nargs=-1)
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="Stages at once; default: 4, on a CPU at most its cores."
)
@click.option("-f", "--force", is_flag=True, help="Run stages that are up to date too.")
@click.option("--profile", help="Write it into params.yaml first, as `profile`.")
def main(targets: tuple[str, ...], jobs: int | None, force: bool, profile: str | None) -> None:
    with hold(LOCK_PATH, "`make run` is at work in this workspace already; wait for it, or end it"):
        if profile:
            set_profile(Path("params.yaml"), profile)
        params = load_params(Path("params.yaml"))
        shares_cores = params.active.device.kind == "cpu" and not runs_in_slurm(os.environ, params)
        jobs = jobs or (min(4, usable_cores()) if shares_cores else 4)
        # On a GPU and in Slurm the number of threads is left open: a checkpoint is known by it too, and `dvc repro`
        # could not resume it.
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // jobs))} if shares_cores and jobs > 1 else {}
        steps, num_up_to_date = steps_of(targets, params.active.device, force=force)
        up_to_date = f"{num_up_to_date} up to date, " if num_up_to_date else ""
        say(f"{up_to_date}{pluralize(len(steps), 'stage')} to run, at most {jobs} at once; their output: {LOGS_DIR}/")
        run = SideBySide(
            steps=steps,
            dvc=(sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *(["--force"] * force), "--single-item"),
            environment={**threads, **os.environ},
            jobs=jobs,
            gpus=num_gpus(params, jobs=jobs),
        )
        sys.exit(run.run())


def set_profile(path: Path, profile: str) -> None:
    """Change this one line of params.yaml; `dvc exp run -S` breaks the lines of the whole file in other places.

    Raises UserError if no profile has that name, and for a file that says its profile in another way.
    """
    load_params(path).on(profile)
    text = re.sub(r"^profile:.*", f"profile: {profile}", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if parse_yaml(text.encode())["profile"] != profile:
        raise UserError(f"{path} has its profile in another form; write it as a line of its own: profile: {profile}")
    atomic_write(text, path)


class Step(NamedTuple):
    """A stage that may have something to do."""

    waits_for: frozenset[str]
    """The steps that it depends on directly."""
    gpus: int = 0
    """Number of GPUs that it will lease."""


def steps_of(targets: Sequence[str], device: DeviceParams, *, force: bool) -> tuple[dict[str, Step], int]:
    """(the stages that the targets need and that may have something to do, by name; how many are up to date).

    They come in the order in which `dvc repro` would run them. A stage is among them if its inputs may yet change, and
    DVC looks again when its turn comes. Raises UserError if DVC refuses, and for inputs that nothing makes.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo, lock_repo
    from dvc.repo.reproduce import collect_stages, get_active_graph, plan_repro

    try:
        with Repo(_wait_for_lock=True) as repo, lock_repo(repo):
            graph = get_active_graph(repo.index.graph)
            stages = plan_repro(graph, collect_stages(repo, targets or ["dvc.yaml"]))
            refuse_unmade_inputs(stages, [Path(out.fspath) for out in repo.index.outs])
            waits_for = {stage.addressing: {other.addressing for other in graph.successors(stage)} for stage in stages}
            changed = set(waits_for) if force else set(repo.status(targets=list(waits_for)))
    except DvcException as error:
        raise UserError(f"DVC refuses: {error}") from None
    kinds = {stage.addressing: str(stage.cmd).removeprefix("exec docker/run ") for stage in stages}
    steps: dict[str, Step] = {}
    for name, others in waits_for.items():  # a stage comes after those that it waits for
        if name in changed or others & steps.keys():
            steps[name] = Step(frozenset(others & steps.keys()), gpus_wanted(kinds[name], device))
    return steps, len(waits_for) - len(steps)


def refuse_unmade_inputs(stages: Iterable[Stage], outs: Sequence[Path]) -> None:
    """Raises UserError for inputs that are not here and that no stage makes. outs: of all stages of dvc.yaml."""
    made, made_in = {*outs}, {folder for out in outs for folder in out.parents}
    unmade: dict[str, str] = {}
    for stage in stages:
        for dep in (dep for dep in stage.deps if not dep.exists):
            path = Path(dep.fspath)
            if path not in made_in and made.isdisjoint((path, *path.parents)):
                unmade[str(dep)] = f"{dep}, for {stage.addressing}"
    if unmade:
        raise UserError(
            f"not here, and made by no stage of dvc.yaml:\n{listed([*unmade.values()])}\n"
            "a dataset has to be named in stages.prepare.foreach, a base in stages.base.foreach"
        )


def num_gpus(params: Params, *, jobs: int) -> int:
    """Number of GPUs that stages may use at once; Slurm has enough for all.

    One if this machine has none: the first stage that wants it reports that.
    """
    if runs_in_slurm(os.environ, params):
        return jobs * params.active.device.count
    if params.active.device.kind == "cpu":
        return 0
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return len(leasable(read_gpus(), visible=visible, count=1, holder="make run"))
    except UserError:
        return 1


@dataclass(kw_only=True)
class SideBySide:
    """A run of steps, and its result."""

    steps: Mapping[str, Step]
    """Each after those that it waits for."""
    jobs: int
    """Steps at once."""
    gpus: int
    """Number of the machine's."""
    dvc: Sequence[str] = ()
    """The command, to which the name of a stage is added."""
    environment: Mapping[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    """dvc's exit code by stage, in the order in which they ended."""

    @cached_property
    def chain_lengths(self) -> dict[str, int]:
        """The number of steps of the longest chain that each begins."""
        length = dict.fromkeys(self.steps, 1)
        for name in reversed(length):  # a step comes after those that it waits for
            for other in self.steps[name].waits_for:
                length[other] = max(length[other], 1 + length[name])
        return length

    def next_steps(self, *, waiting: Collection[str], running: Collection[str]) -> list[str]:
        """The names of the steps to start now, those first that begin the longest chain of steps.

        A step that waits for a failed one is never started. One that wants more GPUs than there are starts when no
        other step has one, and reports the problem itself.
        """
        ready = [name for name in waiting if self.steps[name].waits_for <= set(self.done)]
        chosen: list[str] = []
        for name in sorted(ready, key=lambda name: -self.chain_lengths[name]):
            together = [*running, *chosen]
            used, wanted = sum(self.steps[other].gpus for other in together), self.steps[name].gpus
            if len(together) < self.jobs and (not (wanted and used) or used + wanted <= self.gpus):
                chosen.append(name)
        return chosen

    def run(self) -> int:
        """Run all steps that can be run, and return the exit code: of the first that failed, or 128 + n after signal n.

        Signals that ask to end go to the stages that run, as Ctrl-C would under a single dvc; no other is started.
        """
        LOGS_DIR.mkdir(parents=True, exist_ok=True)
        waiting = dict.fromkeys(self.steps)
        running, began = dict[str, subprocess.Popen[bytes]](), dict[str, float]()
        reported = time.monotonic()
        with forwarded_signals() as signals:
            signals.forward_to(lambda _: _ask_to_end(running.values()))
            while True:
                for name in self.next_steps(waiting=waiting, running=running):
                    if signals.received:
                        break
                    del waiting[name]
                    running[name], began[name] = self._start(name), time.monotonic()
                    if signals.received:  # one came while it was being started
                        _ask_to_end([running[name]])
                if not running:
                    return self._result(signals.received)
                time.sleep(POLL_S)
                if time.monotonic() - reported > REPORT_S:
                    reported = time.monotonic()
                    for name in running:
                        say(f"  {name}: {_last_line(log_path(name))}")
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    code, took = wait_for(running.pop(name)), f"{time.monotonic() - began[name]:.0f} s"
                    self._end(name, code, took, interrupted=bool(signals.received))

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        say(f"{name} starts")
        with log_path(name).open("wb") as log:
            return start([*self.dvc, name], env=dict(self.environment), stdout=log, stderr=subprocess.STDOUT)

    def _end(self, name: str, code: int, took: str, *, interrupted: bool) -> None:
        log, shown = log_path(name).read_text(encoding="utf-8", errors="replace"), SHOWN_LINES
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
            say(f"{name} FAILED after {took}; the end of {log_path(name)}:")
        for line in log.strip().splitlines()[-shown:]:
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


def log_path(stage: str) -> Path:
    """stage: DVC's name for it."""
    return LOGS_DIR / f"{stage.replace('/', '_')}.log"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:160] if lines else "nothing written yet"


def _ask_to_end(running: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGINT is the one signal upon which dvc waits for its stage."""
    for process in list(running):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGINT)


def say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {line}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
