"""The kinds of faults: each disturbs a copy of the pipeline, and says how that ended."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from tools.faults.judge import (
    NeverCame,
    Outcome,
    Wrong,
    refusal_command,
    require_clean_end,
    require_same_end,
    require_success,
    require_whole,
    verify_commands,
)
from tools.faults.workspaces import (
    CHAIN,
    RECIPE,
    TARGET,
    Ended,
    Reference,
    Workspace,
    copy_folder,
    small_disk,
    workspace_in,
)
from tools.verify.differences import compare_outputs

TRAIN = f"train@{RECIPE}"
MAX_ROUNDS = 4
"""Of fixing what `make verify` names: some damage is found only after that above it is fixed."""
FUTURE_S = 3600
PATIENCE_S = 30.0
"""Without a running stage, before a full disk gets room: DVC waits for it."""
RUN_CACHE = ".dvc/cache/runs"
DVC_FAILS = re.compile(r"join\(\) argument must be str|'\S*dvc\.lock' (?:validation failed|is invalid)")
"""Errors of DVC 3.67 after it was killed between making a folder of its run cache and filling it, or while it wrote
dvc.lock, into the file itself. `make verify` names what fixes that."""
NOT_SAVED = "could not be saved"
"""A training's words for a checkpoint without room, before it goes on without."""
DVC_IS_RUNNING = ("Unable to acquire lock", "is busy, it is being blocked by")
"""DVC 3.67's words for the lock of another DVC: on the repository, and on an output."""


@dataclass
class Trial:
    """One fault: its random numbers, and how it describes itself."""

    reference: Reference
    folder: Path
    draw: random.Random
    stage: str = ""
    moment: str = ""
    workspace: Workspace = field(init=False)

    def before(self, stage: str) -> Workspace:
        """A workspace in which this stage is next."""
        return self._copy(self.reference.before_dir(stage), stage)

    def finished(self, stage: str) -> Workspace:
        """A workspace in which all stages are done. stage: the one that is tried."""
        return self._copy(self.reference.finished_dir, stage)

    def _copy(self, source: Path, stage: str) -> Workspace:
        self.stage = stage
        copy_folder(source, self.folder)
        self.workspace = workspace_in(self.folder, self.reference.environment)
        return self.workspace

    def require_same_end(self, stage: str) -> None:
        """Outputs up to this stage are those of the reference. Raises Wrong."""
        done = CHAIN[: CHAIN.index(stage) + 1]
        outputs = [out for each in self.workspace.stages() if each.name in done for out in each.written]
        require_same_end(self.folder, self.reference.after_dir(stage), outputs)

    def written(self, stage: str) -> list[str]:
        return [out for each in self.workspace.stages() if each.name == stage for out in each.written]


# A process is ended.

VICTIMS = ("stage", "launcher", "dvc", "dvc's group")


def end_at_a_moment(trial: Trial, *, number: signal.Signals) -> Outcome:
    stage = trial.draw.choice((*CHAIN, TRAIN, TRAIN))
    share = trial.draw.random()
    victim = trial.draw.choice(VICTIMS)
    workspace = trial.before(stage)
    trial.moment = f"{victim}, at {share:.0%} of it"

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        while workspace.process_of("stage") is None and process.poll() is None:
            time.sleep(0.05)
        # Starting dvc takes the first of these seconds.
        _wait(process, share * max(1.0, trial.reference.seconds[stage] - 2))
        if victim == "dvc's group" and process.poll() is None:
            os.killpg(process.pid, number)
        elif (found := workspace.process_of(victim)) is not None:
            with suppress(psutil.NoSuchProcess):  # it was faster
                found.send_signal(number)

    ended = workspace.dvc("repro", stage, meanwhile=meanwhile)
    return _try_again(trial, stage, ended, came=ended.code != 0)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def kill_before_a_change(
    trial: Trial, *, stages: Sequence[str] = CHAIN, roles: Sequence[str], below: str = ""
) -> Outcome:
    """A process of one of these kinds is killed just before it changes something on the disk, below a folder."""
    stage = trial.draw.choice(stages)
    role = trial.draw.choice(roles)
    change = trial.draw.choice([each for each in trial.reference.changes[stage, role] if each.path.startswith(below)])
    workspace = trial.before(stage)
    above = {"dvc": 0, "launcher": 0, "stage": trial.draw.choice((0, 0, 0, 1))}[role]
    trial.moment = f"{'launcher' if above else role}, before {change.event} of {change.path} ({change.number})"
    workspace.order(role=role, number=change.number, act="signal", signal=int(signal.SIGKILL), above=above)
    ended = workspace.dvc("repro", stage)
    return _try_again(trial, stage, ended, came=workspace.withdraw_order(), whole=role != "dvc")


def damage_the_newest_checkpoint(trial: Trial) -> Outcome:
    """The training is killed after it has saved twice; it has to name the file, and use the checkpoint before."""
    renames = (each for each in trial.reference.changes[TRAIN, "stage"] if each.event == "rename")
    change = trial.draw.choice([each for each in renames if Path(each.path).name.startswith(".step-")][2:])
    workspace = trial.before(TRAIN)
    workspace.order(role="stage", number=change.number, act="signal", signal=int(signal.SIGKILL), above=0)
    require_clean_end(workspace.dvc("repro", TRAIN))
    workspace.withdraw_order()
    *_, before, newest = sorted((trial.folder / ".bakeoff/checkpoints").glob("*/*/step-*"))
    path = trial.draw.choice(sorted(newest.iterdir()))
    how = trial.draw.choice((flip, cut))
    trial.moment = f"{how.__name__} {path.relative_to(trial.folder / '.bakeoff/checkpoints')}"
    path.write_bytes(how(path.read_bytes(), trial.draw))
    ended = workspace.dvc("repro", TRAIN)
    require_success(ended)
    for expected in (f"{newest.name}/{path.name}", f"goes on from step {int(before.name.removeprefix('step-'))} "):
        if expected not in " ".join(ended.output.split()):
            raise Wrong(f"nothing was said of {expected}: {ended.output[-400:]}")
    trial.require_same_end(TRAIN)
    return Outcome.UNDISTURBED


def cut_off_the_lock(trial: Trial) -> Outcome:
    """As DVC leaves dvc.lock where it is killed while it writes it."""
    workspace = trial.finished(TARGET)
    path = trial.folder / "dvc.lock"
    path.write_bytes(content := cut(path.read_bytes(), trial.draw))
    trial.moment = f"after {len(content)} bytes"
    return _try_again(trial, TARGET, workspace.verify(), came=True)


def set_the_clock_back(trial: Trial) -> Outcome:
    """By an hour while a stage runs, which is then killed; everything that it left is from the future."""
    stage = trial.draw.choice((*CHAIN, TRAIN))
    change = trial.draw.choice(trial.reference.changes[stage, "stage"])
    workspace = trial.before(stage)
    trial.moment = f"before {change.event} of {change.path} ({change.number})"
    _from_the_future(trial.folder)
    workspace.order(role="stage", number=change.number, act="set the clock back")
    share = trial.draw.random()

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        _wait(process, share * trial.reference.seconds[stage])
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)

    first = workspace.dvc("repro", stage, meanwhile=meanwhile if trial.draw.random() < 0.5 else None)
    workspace.withdraw_order()
    _from_the_future(trial.folder)
    return _try_again(trial, stage, first, came=True)


def _from_the_future(folder: Path) -> None:
    """Files that were written before the clock was set back are an hour newer than any new one."""
    seen = set()
    for path in folder.rglob("*"):
        stat = path.lstat()
        if path.is_file() and not path.is_symlink() and ".git" not in path.parts and stat.st_ino not in seen:
            seen.add(stat.st_ino)
            later = stat.st_mtime_ns + int(FUTURE_S * 1e9)
            os.utime(path, ns=(later, later))


def two_at_once(trial: Trial) -> Outcome:
    """Each ends well, or says that another DVC is running."""
    stage = trial.draw.choice(CHAIN)
    apart_s = trial.draw.choice((0.0, trial.draw.uniform(0, trial.reference.seconds[stage])))
    workspace = trial.before(stage)
    trial.moment = f"{apart_s:.1f} s apart"
    other_log = trial.folder.with_name(f"{trial.folder.name}.other.log")
    others: list[int] = []

    def meanwhile(_process: subprocess.Popen[bytes]) -> None:
        time.sleep(apart_s)
        with other_log.open("wb") as log:
            other = workspace.start([workspace.environment["PYTHON"], "-m", "dvc", "repro", stage], log)
            others.append(other.wait())

    first = workspace.dvc("repro", stage, meanwhile=meanwhile)
    output = other_log.read_text(encoding="utf-8")
    other_log.unlink()
    second = Ended(command=f"dvc repro {stage}, the other", code=others[0], output=output, left_running=())
    for ended in (first, second):
        require_clean_end(ended)
        if ended.code != 0 and not any(words in ended.output for words in DVC_IS_RUNNING):
            raise Wrong(f"`{ended.command}` ended with {ended.code}, and not for the lock: {ended.output[-300:]}")
    if first.code != 0 and second.code != 0:
        raise Wrong("neither of the two ended well")
    return _try_again(trial, stage, first, came=True)


def _try_again(trial: Trial, stage: str, first: Ended, *, came: bool, whole: bool = False) -> Outcome:
    """Run the same command again. whole: after the fault each output has to be complete or absent.

    Raises NeverCame where the fault came too late.
    """
    if not came:
        require_success(first)
        trial.require_same_end(stage)
        raise NeverCame
    require_clean_end(first)
    if whole:
        require_whole(trial.folder, trial.reference.after_dir(stage), trial.written(stage))
    saved = any((trial.folder / ".bakeoff/checkpoints").glob("*/*/step-*"))
    second = trial.workspace.dvc("repro", stage)
    if found := DVC_FAILS.search(second.output):
        trial.moment += "; DVC's own fault, fixed by make verify"
        require_clean_end(second)
        return _verify_and_fix(trial, "dvc.lock" if "dvc.lock" in found[0] else RUN_CACHE)
    require_success(second)
    if saved and f"Running stage '{TRAIN}'" in second.output and "goes on from step" not in second.output:
        raise Wrong("there were checkpoints, and the training began anew")
    trial.require_same_end(stage)
    return Outcome.UNDISTURBED


# The disk fills up.


def fill_the_disk(trial: Trial) -> Outcome:
    """That of the whole workspace, cache and checkpoints included."""
    stage = trial.draw.choice((*CHAIN, TRAIN))
    with small_disk(trial.folder) as leave:
        workspace = trial.before(stage)
        grown = _size_bytes(trial.reference.after_dir(stage)) - _size_bytes(trial.reference.before_dir(stage))
        room = int(trial.draw.random() * 1.1 * (max(grown, 0) + (40 << 20 if stage == TRAIN else 1 << 20)))
        trial.moment = f"{room / 2**20:.2f} MiB left"
        leave(room)
        waited = False

        def meanwhile(process: subprocess.Popen[bytes]) -> None:
            """Where its own database has no room, DVC tries again until there is some (diskcache 5.6)."""
            nonlocal waited
            busy = time.monotonic()
            while process.poll() is None and not waited:
                if workspace.process_of("stage") is not None:
                    busy = time.monotonic()
                elif time.monotonic() - busy > PATIENCE_S:
                    waited = True
                    trial.moment += "; DVC waited for room"
                    leave(None)
                time.sleep(0.2)

        first = workspace.dvc("repro", stage, meanwhile=meanwhile)
        leave(None)
        try:
            return _try_again(trial, stage, first, came=waited or first.code != 0 or NOT_SAVED in first.output)
        except Wrong:  # a copy to look at, as the disk is removed
            shutil.copytree(trial.folder, trial.folder.with_name(f"{trial.folder.name}.kept"), symlinks=True)
            raise


def fill_the_disk_of_checkpoints(trial: Trial) -> Outcome:
    """Checkpoints may be lost, but not the training."""
    workspace = trial.before(TRAIN)
    with small_disk(trial.folder / ".bakeoff/checkpoints") as leave:
        room = int(trial.draw.random() * 40 * 2**20)
        trial.moment = f"{room / 2**20:.2f} MiB for checkpoints"
        leave(room)
        ended = workspace.dvc("repro", TRAIN)
        require_clean_end(ended)
        if ended.code != 0 and room > 2**16:
            raise Wrong(f"the training ended with {ended.code} where only its checkpoints had no room")
        leave(None)
        return _try_again(trial, TRAIN, ended, came=ended.code != 0 or NOT_SAVED in ended.output)


def _size_bytes(folder: Path) -> int:
    """The space that a folder takes on a disk."""
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in (path.lstat() for path in folder.rglob("*"))}.values())


# A file is damaged.

READ_BY = {
    "data/bases/vlm": (TRAIN, f"merge@{RECIPE}"),
    "data/prepared/nutrition-tables": (TRAIN, TARGET),
    f"data/runs/{RECIPE}/plan.yaml": (TRAIN,),
    f"data/runs/{RECIPE}/trained": (f"merge@{RECIPE}",),
    f"data/runs/{RECIPE}/merged": (TARGET,),
}
"""Outputs, and stages that read them."""


def flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def damage_a_file(trial: Trial, *, how: Callable[[bytes, random.Random], bytes]) -> Outcome:
    """Silently: the time of the file stays the same. In the workspace, in DVC's cache, or in both where it is linked.

    `make verify` has to name it and fix it; a stage that reads it either refuses it, or makes the same of it.
    """
    output = trial.draw.choice(tuple(READ_BY))
    reader = trial.draw.choice(READ_BY[output])
    where = trial.draw.choice(("workspace", "cache", "both"))
    workspace = trial.finished(reader)
    require_success(workspace.dvc("status", "-q", TARGET))  # from now on DVC knows times and sizes
    files = [trial.folder / output] if (trial.folder / output).is_file() else sorted((trial.folder / output).rglob("*"))
    path = trial.draw.choice([path for path in files if path.is_file() and path.stat().st_size])
    content = path.read_bytes()
    trial.moment = f"{path.relative_to(trial.folder)}, {where}"
    if where == "cache":
        objects = (trial.folder / ".dvc/cache/files/md5").glob("??/*")
        (path,) = (each for each in objects if each.stat().st_size == len(content) and each.read_bytes() == content)
    replace_silently(path, how(content, trial.draw), linked=where == "both")
    if where == "cache":
        return _verify_and_fix(trial, output)
    checked = workspace.verify()
    require_clean_end(checked)
    if checked.code == 0 or output not in checked.output:
        raise Wrong(f"`make verify` does not name {output}: {checked.output[-300:]}")
    read = workspace.dvc("repro", "-f", "-s", reader)
    require_clean_end(read)
    if read.code == 0:
        made = compare_outputs(trial.reference.finished_dir, trial.folder, tuple(trial.written(reader)))
        if made.different:
            raise Wrong(f"{reader} took it, and made other bytes: {', '.join(made.different)}")
        return _verify_and_fix(trial, output)
    require_success(workspace.shell(refusal_command(read, output)))
    return _verify_and_fix(trial, "")


def replace_silently(path: Path, content: bytes, *, linked: bool) -> None:
    """With the same mode and time. linked: in all hard links of the file."""
    stat = path.stat()
    place = path if linked else path.with_name(f".{path.name}.damaged")
    if linked:
        path.chmod(0o644)
    place.write_bytes(content)
    place.chmod(stat.st_mode & 0o777)
    os.utime(place, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if not linked:
        place.replace(path)


def _verify_and_fix(trial: Trial, damaged: str) -> Outcome:
    """Do what `make verify` names first until everything is as recorded; the results are then those of the reference.

    damaged: a path that it has to name; "" where it need not find anything.
    """
    workspace = trial.workspace
    for round_ in range(MAX_ROUNDS):
        checked = workspace.verify()
        require_clean_end(checked)
        if round_ == 0 and damaged not in checked.output:
            raise Wrong(f"`make verify` does not name {damaged}: {checked.output[-300:]}")
        if checked.code == 0:
            break
        for command in verify_commands(checked)[:1]:
            fixed = workspace.shell(command)
            # `make verify RESTORE=1` ends with 1 where something else is damaged too.
            (require_clean_end if command.startswith("make verify") else require_success)(fixed)
    else:
        raise Wrong(f"after what `make verify` names was done {MAX_ROUNDS} times: {checked.output[-400:]}")
    if not damaged and round_ > 0:
        trial.moment += "; fixed by make verify"
    require_success(workspace.dvc("repro", TARGET))
    trial.require_same_end(TARGET)
    return Outcome.REFUSED


NEEDS_A_SMALL_DISK = ("full disk", "full disk, checkpoints")

KINDS: dict[str, Callable[[Trial], Outcome]] = {
    "SIGKILL at a moment": partial(end_at_a_moment, number=signal.SIGKILL),
    "SIGTERM at a moment": partial(end_at_a_moment, number=signal.SIGTERM),
    "SIGKILL while saving": partial(kill_before_a_change, stages=(TRAIN,), roles=("stage",), below=".bakeoff/"),
    # The stage publishes its outputs, and the launcher its record of them.
    "SIGKILL while publishing": partial(kill_before_a_change, roles=("stage", "stage", "launcher"), below="data/"),
    # DVC moves outputs to its cache, links them back, and writes dvc.lock.
    "SIGKILL while dvc keeps": partial(kill_before_a_change, roles=("dvc",)),
    "damaged checkpoint": damage_the_newest_checkpoint,
    "half of dvc.lock": cut_off_the_lock,
    "full disk": fill_the_disk,
    "full disk, checkpoints": fill_the_disk_of_checkpoints,
    "flipped bit": partial(damage_a_file, how=flip),
    "truncated file": partial(damage_a_file, how=cut),
    "clock set back": set_the_clock_back,
    "two dvc repro": two_at_once,
}
