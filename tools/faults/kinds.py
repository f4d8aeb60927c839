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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from stages.kit.launcher.pipeline import declared_stages
from tools.faults.judge import (
    DVC_FAILS,
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
from tools.faults.moment import SET_BACK_S
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
PATIENCE_S = 30.0
"""Without a running stage, before a full disk gets room: DVC waits for it."""
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

    def copy(self, stage: str, *, finished: bool = False) -> Workspace:
        """A workspace in which this stage is next. finished: in which all stages are done, and this one is tried."""
        self.stage = stage
        copy_folder(self.reference.finished_dir if finished else self.reference.before_dir(stage), self.folder)
        self.workspace = workspace_in(self.folder, self.reference.environment)
        return self.workspace

    def require_same_end(self, stage: str) -> None:
        """Outputs up to this stage are those of the reference. Raises Wrong."""
        outputs = self.written(*CHAIN[: CHAIN.index(stage) + 1])
        require_same_end(self.folder, self.reference.after_dir(stage), outputs)

    def written(self, *stages: str) -> list[str]:
        return [out for each in declared_stages(self.folder) if each.name in stages for out in each.written]


# A process is ended.

VICTIMS = ("stage", "launcher", "dvc", "dvc's group")


def end_at_a_moment(trial: Trial, *, number: signal.Signals, clock_set_back: bool = False) -> Outcome:
    """One of the processes gets a signal.

    clock_set_back: if at all, after the stage's clock was set back by an hour. All files are from the future then.
    """
    stage = trial.draw.choice((*CHAIN, TRAIN, TRAIN))
    share = trial.draw.random() * (2 if clock_set_back else 1)
    victim = trial.draw.choice(VICTIMS)
    workspace = trial.copy(stage)
    trial.moment = f"{victim}, at {share:.0%} of it"
    if clock_set_back:
        change = trial.draw.randint(1, len(trial.reference.changes[stage, "stage"]))
        workspace.order(role="stage", number=change, act="set the clock back")
        _from_the_future(trial.folder)

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        while workspace.process_of("stage") is None and process.poll() is None:
            time.sleep(0.05)
        with suppress(subprocess.TimeoutExpired):
            # Starting dvc takes the first of these seconds.
            process.wait(share * max(1.0, trial.reference.seconds[stage] - 2))
        if victim == "dvc's group" and process.poll() is None:
            os.killpg(process.pid, number)
        elif (found := workspace.process_of(victim)) is not None:
            with suppress(psutil.NoSuchProcess):  # it was faster
                found.send_signal(number)

    ended = workspace.dvc("repro", stage, meanwhile=meanwhile)
    if clock_set_back:
        workspace.withdraw_order()
        _from_the_future(trial.folder)
    return try_again(trial, stage, ended, came=clock_set_back or ended.code != 0)


def _from_the_future(folder: Path) -> None:
    """Make all files an hour newer, each inode once."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for path in {path.stat().st_ino: path for path in files if ".git" not in path.parts}.values():
        later = path.stat().st_mtime_ns + int(SET_BACK_S * 1e9)
        os.utime(path, ns=(later, later))


def kill_before_a_change(
    trial: Trial, *, stages: Sequence[str] = CHAIN, roles: Sequence[str], below: str = ""
) -> Outcome:
    """A process of one of these kinds is killed just before it changes something on the disk, below a folder."""
    stage, role = trial.draw.choice(stages), trial.draw.choice(roles)
    changes = enumerate(trial.reference.changes[stage, role], start=1)
    number, change = trial.draw.choice([(number, change) for number, change in changes if f" of {below}" in change])
    workspace = trial.copy(stage)
    above = trial.draw.choice((0, 0, 0, 1)) if role == "stage" else 0
    trial.moment = f"{'launcher' if above else role}, before {change} ({number})"
    workspace.order(role=role, number=number, act="kill", above=above)
    ended = workspace.dvc("repro", stage)
    return try_again(trial, stage, ended, came=workspace.withdraw_order(), whole=role != "dvc")


def damage_the_newest_checkpoint(trial: Trial) -> Outcome:
    """The training is killed after it has saved twice; it has to name the file, and use the checkpoint before."""
    changes = enumerate(trial.reference.changes[TRAIN, "stage"], start=1)
    saves = [number for number, change in changes if re.match(r"rename of .*/\.step-[^/]+$", change)]
    workspace = trial.copy(TRAIN)
    workspace.order(role="stage", number=trial.draw.choice(saves[2:]), act="kill", above=0)
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
    workspace = trial.copy(TARGET, finished=True)
    path = trial.folder / "dvc.lock"
    path.write_bytes(content := cut(path.read_bytes(), trial.draw))
    trial.moment = f"after {len(content)} bytes"
    return try_again(trial, TARGET, workspace.verify(), came=True)


def two_at_once(trial: Trial) -> Outcome:
    """Each ends well, or says that another DVC is running."""
    stage = trial.draw.choice(CHAIN)
    apart_s = trial.draw.choice((0.0, trial.draw.uniform(0, trial.reference.seconds[stage])))
    workspace = trial.copy(stage)
    trial.moment = f"{apart_s:.1f} s apart"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(workspace.dvc, "repro", stage)
        time.sleep(apart_s)
        second = pool.submit(workspace.dvc, "repro", stage)
    both = (first.result(), second.result())
    for ended in both:
        require_clean_end(ended)
        if ended.code != 0 and not any(words in ended.output for words in DVC_IS_RUNNING):
            raise Wrong(f"`{ended.command}` ended with {ended.code}, and not for the lock: {ended.output[-300:]}")
    if all(ended.code for ended in both):
        raise Wrong("neither of the two ended well")
    return try_again(trial, stage, both[0], came=True)


def try_again(trial: Trial, stage: str, first: Ended, *, came: bool, whole: bool = False) -> Outcome:
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
        return _verify_and_fix(trial, "dvc.lock" if "dvc.lock" in found[0] else ".dvc/cache/runs")
    require_success(second)
    if saved and f"Running stage '{TRAIN}'" in second.output and "goes on from step" not in second.output:
        raise Wrong("there were checkpoints, and the training began anew")
    trial.require_same_end(stage)
    return Outcome.UNDISTURBED


# The disk fills up.


def fill_the_disk(trial: Trial) -> Outcome:
    """The disk of the whole workspace, cache and checkpoints included."""
    stage = trial.draw.choice((*CHAIN, TRAIN))
    with small_disk(trial.folder) as leave:
        workspace = trial.copy(stage)
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
            return try_again(trial, stage, first, came=waited or first.code != 0 or NOT_SAVED in first.output)
        except Wrong:  # a copy to look at, as the disk is removed
            shutil.copytree(trial.folder, trial.folder.with_name(f"{trial.folder.name}.kept"), symlinks=True)
            raise


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
    workspace = trial.copy(reader, finished=True)
    require_success(workspace.dvc("status", "-q", TARGET))  # from now on DVC knows times and sizes
    files = (trial.folder / output, *sorted((trial.folder / output).rglob("*")))
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
    if linked:
        path.chmod(0o644)
    else:
        path.unlink()
    path.write_bytes(content)
    path.chmod(stat.st_mode & 0o777)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


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


FULL_DISK = "full disk"
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
    FULL_DISK: fill_the_disk,
    "flipped bit": partial(damage_a_file, how=flip),
    "truncated file": partial(damage_a_file, how=cut),
    "clock set back": partial(end_at_a_moment, number=signal.SIGTERM, clock_set_back=True),
    "two dvc repro": two_at_once,
}
