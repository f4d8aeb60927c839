"""The kinds of faults: each takes a copy of the pipeline, does something to it, and says what became of it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tools.faults.judge import (
    NeverCame,
    Outcome,
    Wrong,
    refusal_commands,
    require_good_manners,
    require_same_end,
    require_success,
    require_whole,
    verify_commands,
)
from tools.faults.workspaces import CHAIN, RECIPE, TARGET, Change, Ended, Reference, Workspace, size_bytes, small_disk
from tools.verify.differences import compare_outputs

TRAIN = f"train@{RECIPE}"
MAX_ROUNDS = 4
"""In which what `make verify` names is mended: some of it is found only when what lies above it is whole."""
FUTURE_S = 3600
PATIENCE_S = 30.0
"""With DVC while no stage runs, before somebody makes room."""
RUN_CACHE = ".dvc/cache/runs"
DVC_STUMBLES = re.compile(r"join\(\) argument must be str|'\S*dvc\.lock' (?:validation failed|is invalid)")
"""What DVC 3.67 ends with after it was killed between making a folder of its run cache and filling it, or while it
wrote dvc.lock, into the file itself. What mends that, `make verify` says."""
NOT_SAVED = "could not be saved"
"""What a training says of a checkpoint for which there is no room, before it goes on without."""
DVC_IS_AT_WORK = ("Unable to acquire lock", "is busy, it is being blocked by")
"""What one DVC 3.67 says of another: of the repository's lock, and of the one on an output."""


@dataclass
class Trial:
    """One fault: what it may draw from, and what it says of itself."""

    reference: Reference
    folder: Path
    draw: random.Random
    stage: str = ""
    moment: str = ""
    workspace: Workspace = field(init=False)

    def before(self, stage: str) -> Workspace:
        """A workspace in which this stage is next."""
        return self._of(self.reference.before_dir(stage), stage)

    def finished(self, stage: str) -> Workspace:
        """One in which all is done."""
        return self._of(self.reference.finished_dir, stage)

    def _of(self, source: Path, stage: str) -> Workspace:
        self.stage = stage
        self.workspace = self.reference.copied(source, self.folder)
        return self.workspace

    def ends_as_the_reference(self, stage: str) -> None:
        """All up to this stage. Raises Wrong."""
        done = CHAIN[: CHAIN.index(stage) + 1]
        outputs = [out for each in self.workspace.stages() if each.name in done for out in each.written]
        require_same_end(self.folder, self.reference.after_dir(stage), outputs)

    def written(self, stage: str) -> list[str]:
        return [out for each in self.workspace.stages() if each.name == stage for out in each.written]


# Somebody ends it.

VICTIMS = ("stage", "launcher", "dvc", "dvc's group")


def kill_at_a_moment(trial: Trial) -> Outcome:
    return _ended_at_a_moment(trial, signal.SIGKILL)


def ask_to_end_at_a_moment(trial: Trial) -> Outcome:
    return _ended_at_a_moment(trial, signal.SIGTERM)


def _ended_at_a_moment(trial: Trial, number: signal.Signals) -> Outcome:
    stage = trial.draw.choice((*CHAIN, TRAIN, TRAIN))
    share = trial.draw.random()
    victim = trial.draw.choice(VICTIMS)
    workspace = trial.before(stage)
    trial.moment = f"{victim}, at {share:.0%} of it"

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        while workspace.process_of("stage") is None and process.poll() is None:
            time.sleep(0.05)
        # Starting dvc takes the first of these seconds.
        until = time.monotonic() + share * max(1.0, trial.reference.seconds[stage] - 2)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if victim == "dvc's group" and process.poll() is None:
            os.killpg(process.pid, number)
        elif (found := workspace.process_of(victim)) is not None:
            with suppress(psutil.NoSuchProcess):  # it was faster
                found.send_signal(number)

    ended = workspace.dvc("repro", stage, meanwhile=meanwhile)
    return _disturbed(trial, stage, ended, came=ended.code != 0)


def kill_while_saving(trial: Trial) -> Outcome:
    changes = [each for each in trial.reference.changes[TRAIN, "stage"] if each.path.startswith(".bakeoff/")]
    return _killed_before(trial, TRAIN, "stage", trial.draw.choice(changes))


def damage_the_newest_checkpoint(trial: Trial) -> Outcome:
    """The training is killed once it has saved twice; the file is to be named, and the checkpoint before used."""
    renames = (each for each in trial.reference.changes[TRAIN, "stage"] if each.event == "rename")
    change = trial.draw.choice([each for each in renames if Path(each.path).name.startswith(".step-")][2:])
    workspace = trial.before(TRAIN)
    workspace.order(role="stage", number=change.number, act="signal", signal=int(signal.SIGKILL), above=0)
    require_good_manners(workspace.dvc("repro", TRAIN))
    workspace.take_order_back()
    *_, before, newest = sorted((trial.folder / ".bakeoff/checkpoints").glob("*/*/step-*"))
    path = trial.draw.choice(sorted(newest.iterdir()))
    how = trial.draw.choice((_flip, _cut))
    trial.moment = f"{path.relative_to(trial.folder / '.bakeoff/checkpoints')}{', cut off' if how is _cut else ''}"
    path.write_bytes(how(path.read_bytes(), trial.draw))
    ended = workspace.dvc("repro", TRAIN)
    require_success(ended)
    for expected in (f"{newest.name}/{path.name}", f"goes on from step {int(before.name.removeprefix('step-'))} "):
        if expected not in " ".join(ended.said.split()):
            raise Wrong(f"nothing was said of {expected}: {ended.said[-400:]}")
    trial.ends_as_the_reference(TRAIN)
    return Outcome.UNDISTURBED


def kill_while_publishing(trial: Trial) -> Outcome:
    """The stage its outputs, or the launcher its record of them."""
    stage = trial.draw.choice(CHAIN)
    role = trial.draw.choice(("stage", "stage", "launcher"))
    changes = [each for each in trial.reference.changes[stage, role] if each.path.startswith("data/")]
    return _killed_before(trial, stage, role, trial.draw.choice(changes))


def kill_while_dvc_keeps(trial: Trial) -> Outcome:
    """DVC, as it moves outputs to its cache, links them back, and writes dvc.lock."""
    stage = trial.draw.choice(CHAIN)
    return _killed_before(trial, stage, "dvc", trial.draw.choice(trial.reference.changes[stage, "dvc"]))


def cut_off_the_lock(trial: Trial) -> Outcome:
    """As a DVC leaves dvc.lock that is killed while it writes it."""
    workspace = trial.finished(TARGET)
    path = trial.folder / "dvc.lock"
    path.write_bytes(content := _cut(path.read_bytes(), trial.draw))
    trial.moment = f"after {len(content)} bytes"
    return _disturbed(trial, TARGET, workspace.verify(), came=True)


def _killed_before(trial: Trial, stage: str, role: str, change: Change) -> Outcome:
    workspace = trial.before(stage)
    above = {"dvc": 0, "launcher": 0, "stage": trial.draw.choice((0, 0, 0, 1))}[role]
    trial.moment = f"{'launcher' if above else role}, before {change.event} of {change.path} ({change.number})"
    workspace.order(role=role, number=change.number, act="signal", signal=int(signal.SIGKILL), above=above)
    ended = workspace.dvc("repro", stage)
    return _disturbed(trial, stage, ended, came=workspace.take_order_back(), whole=role != "dvc")


def _disturbed(trial: Trial, stage: str, first: Ended, *, came: bool, whole: bool = False) -> Outcome:
    """The same command again. Raises NeverCame where there is nothing to recover from."""
    if not came:
        require_success(first)
        trial.ends_as_the_reference(stage)
        raise NeverCame
    require_good_manners(first)
    if whole:
        require_whole(trial.folder, trial.reference.after_dir(stage), trial.written(stage))
    saved = any((trial.folder / ".bakeoff/checkpoints").glob("*/*/step-*"))
    second = trial.workspace.dvc("repro", stage)
    if found := DVC_STUMBLES.search(second.said):
        trial.moment += "; DVC's own fault, mended by make verify"
        require_good_manners(second)
        return _verified_and_mended(trial, ["dvc.lock" if "dvc.lock" in found[0] else RUN_CACHE])
    require_success(second)
    began = f"Running stage '{TRAIN}'" in second.said
    if saved and began and "goes on from step" not in second.said:
        raise Wrong("there were checkpoints, and the training began anew")
    trial.ends_as_the_reference(stage)
    return Outcome.UNDISTURBED


def set_the_clock_back(trial: Trial) -> Outcome:
    """By an hour while a stage runs, which is then killed; then all that it left is from the future."""
    stage = trial.draw.choice((*CHAIN, TRAIN))
    changes = trial.reference.changes[stage, "stage"]
    change = trial.draw.choice(changes)
    workspace = trial.before(stage)
    trial.moment = f"before {change.event} of {change.path} ({change.number})"
    _from_the_future(trial.folder)
    workspace.order(role="stage", number=change.number, act="set the clock back")
    share = trial.draw.random()

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + share * trial.reference.seconds[stage]
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)

    first = workspace.dvc("repro", stage, meanwhile=meanwhile if trial.draw.random() < 0.5 else None)
    workspace.take_order_back()
    _from_the_future(trial.folder)
    return _disturbed(trial, stage, first, came=True)


def _from_the_future(folder: Path) -> None:
    """What was written before the clock was set back is an hour newer than anything now."""
    seen = set()
    for path in folder.rglob("*"):
        stat = path.lstat()
        if path.is_file() and not path.is_symlink() and ".git" not in path.parts and stat.st_ino not in seen:
            seen.add(stat.st_ino)
            later = stat.st_mtime_ns + int(FUTURE_S * 1e9)
            os.utime(path, ns=(later, later))


def two_at_once(trial: Trial) -> Outcome:
    """Each ends well, or says that DVC is at work already."""
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
    said = other_log.read_text(encoding="utf-8")
    second = Ended(command=f"dvc repro {stage}, the other", code=others[0], said=said, left_running=())
    other_log.unlink()
    for ended in (first, second):
        require_good_manners(ended)
        if ended.code != 0 and not any(words in ended.said for words in DVC_IS_AT_WORK):
            raise Wrong(f"`{ended.command}` ended with {ended.code}, and not for the lock: {ended.said[-300:]}")
    if first.code != 0 and second.code != 0:
        raise Wrong("neither of the two ended well")
    return _disturbed(trial, stage, first, came=True)


# The disk fills up.


def fill_the_disk(trial: Trial) -> Outcome:
    """That of the whole workspace, cache and checkpoints included."""
    stage = trial.draw.choice((*CHAIN, TRAIN))
    with ExitStack() as stack:
        leave = stack.enter_context(small_disk(trial.folder))
        workspace = trial.before(stage)
        grown = size_bytes(trial.reference.after_dir(stage)) - size_bytes(trial.reference.before_dir(stage))
        room = int(trial.draw.random() * 1.1 * (max(grown, 0) + (40 << 20 if stage == TRAIN else 1 << 20)))
        trial.moment = f"{room / 2**20:.2f} MiB left"
        leave(room)

        def meanwhile(process: subprocess.Popen[bytes]) -> None:
            """Where its own database has no room, DVC tries again until there is some (diskcache 5.6)."""
            busy = time.monotonic()
            while process.poll() is None:
                if workspace.process_of("stage") is not None:
                    busy = time.monotonic()
                elif time.monotonic() - busy > PATIENCE_S:
                    trial.moment += "; DVC waited for room"
                    leave(None)
                    return
                time.sleep(0.2)

        first = workspace.dvc("repro", stage, meanwhile=meanwhile)
        waited = trial.moment.endswith("room")
        leave(None)
        try:
            came = waited or first.code != 0 or NOT_SAVED in first.said
            return _disturbed(trial, stage, first, came=came)
        except Wrong:
            _keep(trial.folder)
            raise


def fill_the_disk_of_checkpoints(trial: Trial) -> Outcome:
    """What may be lost is the checkpoints, and never the training."""
    folder = trial.folder / ".bakeoff/checkpoints"
    with ExitStack() as stack:
        workspace = trial.before(TRAIN)
        leave = stack.enter_context(small_disk(folder))
        room = int(trial.draw.random() * 40 * 2**20)
        trial.moment = f"{room / 2**20:.2f} MiB for checkpoints"
        leave(room)
        ended = workspace.dvc("repro", TRAIN)
        require_good_manners(ended)
        if ended.code != 0 and room > 2**16:
            raise Wrong(f"the training ended with {ended.code} where only its checkpoints had no room")
        leave(None)
        return _disturbed(trial, TRAIN, ended, came=ended.code != 0 or NOT_SAVED in ended.said)


def _keep(folder: Path) -> None:
    """A copy for a look, once the disk is gone."""
    shutil.copytree(folder, folder.with_name(f"{folder.name}.kept"), symlinks=True)


# Something is damaged.

BASE, DATA = "data/bases/vlm", "data/prepared/nutrition-tables"
PLAN, TRAINED, MERGED = (f"data/runs/{RECIPE}/{name}" for name in ("plan.yaml", "trained", "merged"))
READ_BY = {
    BASE: (TRAIN, f"merge@{RECIPE}"),
    DATA: (TRAIN, TARGET),
    PLAN: (TRAIN,),
    TRAINED: (f"merge@{RECIPE}",),
    MERGED: (TARGET,),
}
"""Outputs, and stages that read them."""


def truncate_a_model(trial: Trial) -> Outcome:
    return _damaged(trial, (BASE, TRAINED, MERGED), "*.safetensors", _cut)


def flip_a_byte_of_the_base(trial: Trial) -> Outcome:
    return _damaged(trial, (BASE,), "*", _flip)


def flip_a_byte_of_a_result(trial: Trial) -> Outcome:
    return _damaged(trial, (PLAN, TRAINED, MERGED), "*", _flip)


def flip_a_byte_of_the_data(trial: Trial) -> Outcome:
    return _damaged(trial, (DATA,), "*", _flip)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def _damaged(
    trial: Trial, outputs: Sequence[str], pattern: str, change: Callable[[bytes, random.Random], bytes]
) -> Outcome:
    """Silently: with the size, if need be, but never with the time that it was damaged at.

    `make verify` has to name it and mend it; and a stage that reads it either refuses it, or makes the same of it.
    """
    output = trial.draw.choice(outputs)
    reader = trial.draw.choice(READ_BY[output])
    linked = trial.draw.random() < 0.5
    workspace = trial.finished(reader)
    if linked:  # as DVC leaves it where it has brought something back, on most disks
        require_success(workspace.shell(f"rm -rf {output} && dvc checkout {output}"))
    require_success(workspace.dvc("status", "-q", TARGET))  # from now on DVC knows times and sizes
    path = trial.draw.choice(_files(trial.folder / output, pattern))
    trial.moment = f"{path.relative_to(trial.folder)}{' and its link in the cache' if linked else ''}"
    _write(path, change(path.read_bytes(), trial.draw), linked=linked)
    return _found_and_mended(trial, output, reader)


def flip_a_byte_of_the_cache(trial: Trial) -> Outcome:
    """In one object, and half of the time it has been linked into the workspace since."""
    output = trial.draw.choice(tuple(READ_BY))
    reader = trial.draw.choice(READ_BY[output])
    workspace = trial.finished(reader)
    require_success(workspace.dvc("status", "-q", TARGET))
    spread = trial.draw.random() < 0.5
    path = trial.draw.choice(_files(trial.folder / output, "*"))
    (twin,) = (each for each in (trial.folder / ".dvc/cache/files/md5").glob("??/*") if _same(each, path))
    trial.moment = f"of {path.relative_to(trial.folder)}{', and checked out' if spread else ''}"
    _write(twin, _flip(twin.read_bytes(), trial.draw), linked=False)
    if not spread:
        return _verified_and_mended(trial, [output])
    require_success(workspace.shell(f"rm -rf {output} && dvc checkout {output}"))
    return _found_and_mended(trial, output, reader)


def _files(output: Path, pattern: str) -> list[Path]:
    """Those of an output that have a byte to damage."""
    files = [output] if output.is_file() else sorted(output.rglob(pattern))
    return [path for path in files if path.is_file() and path.stat().st_size]


def _same(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()


def _write(path: Path, content: bytes, *, linked: bool) -> None:
    """With the mode and the time that it had. linked: into the file itself, which others may link to."""
    stat = path.stat()
    place = path if linked else path.with_name(f".{path.name}.damaged")
    if linked:
        path.chmod(0o644)
    place.write_bytes(content)
    place.chmod(stat.st_mode & 0o777)
    os.utime(place, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if not linked:
        place.replace(path)


def _found_and_mended(trial: Trial, output: str, reader: str) -> Outcome:
    workspace = trial.workspace
    looked = workspace.verify()
    require_good_manners(looked)
    if looked.code == 0 or output not in looked.said:
        raise Wrong(f"`make verify` does not name {output}: {looked.said[-300:]}")
    read = workspace.dvc("repro", "-f", "-s", reader)
    require_good_manners(read)
    if read.code == 0:
        made = compare_outputs(trial.reference.finished_dir, trial.folder, tuple(trial.written(reader)))
        if made.different:
            raise Wrong(f"{reader} took it, and made other bytes: {', '.join(made.different)}")
        return _verified_and_mended(trial, [output])
    require_success(workspace.shell(refusal_commands(read, [output])[0]))
    return _verified_and_mended(trial, [])


def _verified_and_mended(trial: Trial, damaged: Sequence[str]) -> Outcome:
    """What `make verify` names is done, from the top, until all is as recorded; and is then what it was."""
    workspace = trial.workspace
    for round_ in range(MAX_ROUNDS):
        looked = workspace.verify()
        require_good_manners(looked)
        if looked.code == 0:
            break
        if round_ == 0 and not all(path in looked.said for path in damaged):
            raise Wrong(f"`make verify` does not name {', '.join(damaged)}: {looked.said[-300:]}")
        for command in verify_commands(looked)[:1]:
            mended = workspace.shell(command)
            # `make verify RESTORE=1` ends with 1 for whatever else is damaged.
            (require_good_manners if command.startswith("make verify") else require_success)(mended)
    else:
        raise Wrong(f"after what `make verify` names was done {MAX_ROUNDS} times: {looked.said[-400:]}")
    if not damaged and round_ > 0:
        trial.moment += "; mended by make verify"
    if damaged and round_ == 0:
        raise Wrong(f"`make verify` takes it for as recorded, with a damaged {', '.join(damaged)}")
    require_success(workspace.dvc("repro", TARGET))
    trial.ends_as_the_reference(TARGET)
    return Outcome.REFUSED


NEEDS_A_SMALL_DISK = (fill_the_disk, fill_the_disk_of_checkpoints)

KINDS: dict[str, Callable[[Trial], Outcome]] = {
    "SIGKILL at a moment": kill_at_a_moment,
    "SIGKILL while saving": kill_while_saving,
    "damaged checkpoint": damage_the_newest_checkpoint,
    "SIGKILL while publishing": kill_while_publishing,
    "SIGKILL while dvc keeps": kill_while_dvc_keeps,
    "half of dvc.lock": cut_off_the_lock,
    "SIGTERM at a moment": ask_to_end_at_a_moment,
    "full disk": fill_the_disk,
    "full disk, checkpoints": fill_the_disk_of_checkpoints,
    "truncated safetensors": truncate_a_model,
    "flipped byte, cache": flip_a_byte_of_the_cache,
    "flipped byte, base": flip_a_byte_of_the_base,
    "flipped byte, result": flip_a_byte_of_a_result,
    "flipped byte, data": flip_a_byte_of_the_data,
    "clock set back": set_the_clock_back,
    "two dvc repro": two_at_once,
}
