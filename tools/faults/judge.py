"""Judges a workspace after a fault: as undisturbed, refused by name, or wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from stages.core.errors import some
from tools.faults.workspaces import Ended
from tools.verify.differences import Comparison, compare_outputs

TRACEBACK = "Traceback (most recent call last):\n"
NAMES = ("the reference", "the workspace")
DVC_FAILS = re.compile(
    r"join\(\) argument must be str|'\S*dvc\.lock' (?:validation failed|is invalid)|Unable to read RWLock-file"
)
"""Errors of DVC 3.67 after it was killed between making a folder of its run cache and filling it, or while it wrote
dvc.lock or its rwlock, into the file itself. `make verify` names what fixes that."""


class Outcome(StrEnum):
    UNDISTURBED = "as undisturbed"
    REFUSED = "refused"
    NEVER_CAME = "never came"
    WRONG = "WRONG"


class Wrong(Exception):
    """Something that must not happen, in words."""


class NeverCame(Exception):
    """Everything had ended well before the fault."""


def require_same_end(folder: Path, reference: Path, outputs: Iterable[str]) -> Comparison:
    """Every output has the bytes of the reference, times and memory aside, and nothing else was left behind.

    outputs: paths relative to either. Returns the comparison. Raises Wrong.
    """
    comparison = compare_outputs(reference, folder, tuple(outputs), names=NAMES)
    if comparison.different:
        name, where = next(iter(comparison.different.items()))
        raise Wrong(f"other bytes in {len(comparison.different)} files, in {name} first: {where}")
    # A launcher that waited for a job left its lock.
    strays = sorted(name for name in _files(folder) - _files(reference) if Path(name).name != "waiter")
    if any((reference / ".bakeoff/checkpoints").glob("*/*/step-*")):
        # Until a training is merged, any number of its checkpoints may be there.
        strays = [name for name in strays if not re.match(r"\.bakeoff/checkpoints/[^/]+/[^/]+/step-\d+/", name)]
    if strays:
        raise Wrong(f"left behind: {some(strays, 3)}")
    return comparison


def _files(folder: Path) -> set[str]:
    """Files, and folders that are hidden or partial, where nothing may be left behind."""
    return {
        path.relative_to(folder).as_posix()
        for top in ("data", ".bakeoff/checkpoints")
        for path in (folder / top).rglob("*")
        if path.is_file() or path.name.startswith(".") or "partial" in path.name
    }


def require_whole(folder: Path, reference: Path, outputs: Iterable[str]) -> None:
    """Each output is complete or absent: a file or folder that has its name has its content. Raises Wrong."""
    present = tuple(output for output in outputs if (folder / output).exists())
    if different := compare_outputs(reference, folder, present, names=NAMES).different:
        name, where = next(iter(different.items()))
        raise Wrong(f"half published: {name}: {where}")


def require_clean_end(ended: Ended) -> None:
    """It came to an end, without a traceback, and left no process running. Raises Wrong."""
    if ended.code is None:
        raise Wrong(f"`{ended.command}` hung")
    if ended.left_running:
        raise Wrong(f"`{ended.command}` left running: {'; '.join(ended.left_running)}")
    if TRACEBACK in ended.output:
        error = re.search(r"^\S.*", ended.output.partition(TRACEBACK)[2], flags=re.MULTILINE)
        raise Wrong(f"`{ended.command}` ended in a traceback: {error[0] if error else ''}")


def require_success(ended: Ended) -> None:
    """Raises Wrong."""
    require_clean_end(ended)
    if ended.code != 0:
        raise Wrong(f"`{ended.command}` ended with {ended.code}: {_summary(ended)}")


def refusal_command(ended: Ended, damaged: str) -> str:
    """The first command that a refusal names to fix a damaged path. Raises Wrong where it does not name the path, or no
    command."""
    require_clean_end(ended)
    output = " ".join(ended.output.split())
    if damaged not in output:
        raise Wrong(f"`{ended.command}` does not name {damaged}: {_summary(ended)}")
    command = r"(?:rm -f [\w@./-]+ && )?dvc (?:repro|checkout)[\w@./ -]*"
    if (found := re.search(rf"(?:rebuild it with|fix it with|run): ({command})", output)) is None:
        raise Wrong(f"`{ended.command}` names no command: {_summary(ended)}")
    return re.sub(r" (?:ERROR|Error).*", "", found[1]).strip()


def verify_commands(ended: Ended) -> list[str]:
    """The commands that `make verify` names, from the top of the pipeline down."""
    return re.findall(r"^  fix it with: (.*?)(?:  #.*)?$", ended.output, flags=re.MULTILINE)


def _summary(ended: Ended) -> str:
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return " / ".join(errors[:3])[:400]
