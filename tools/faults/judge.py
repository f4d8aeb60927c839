"""What became of a workspace after a fault: as if nothing had been, refused by name, or wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

from tools.faults.workspaces import Ended
from tools.verify.differences import Comparison, compare_outputs

TRACEBACK = "Traceback (most recent call last):\n"
KEPT_DIRS = ("data", ".bakeoff/checkpoints")
"""Where nothing may lie beside what an undisturbed run leaves."""
CHECKPOINT = re.compile(r"\.bakeoff/checkpoints/[^/]+/[^/]+/step-\d+/")
NAMES = ("the reference", "the workspace")


class Outcome(StrEnum):
    UNDISTURBED = "as undisturbed"
    REFUSED = "refused"
    NEVER_CAME = "never came"
    WRONG = "WRONG"


class Wrong(Exception):
    """Something that must not be, in words."""


class NeverCame(Exception):
    """All had ended, as it should, before the fault."""


def require_same_end(folder: Path, reference: Path, outputs: Sequence[str]) -> Comparison:
    """Every output has the bytes of the reference, times and memory aside, and nothing else lies beside them.

    outputs: paths relative to either. Returns what is the same. Raises Wrong.
    """
    comparison = compare_outputs(reference, folder, tuple(outputs), names=NAMES)
    if comparison.different:
        name, where = next(iter(comparison.different.items()))
        raise Wrong(f"other bytes in {len(comparison.different)} files, in {name} first: {where}")
    # How many checkpoints were kept, and of which steps, is nobody's business until what was trained is merged.
    unmerged = any(CHECKPOINT.match(name) for name in _files(reference))
    strays = sorted(_files(folder) - _files(reference))
    if strays := [name for name in strays if not (unmerged and CHECKPOINT.match(name))]:
        raise Wrong(f"left behind: {', '.join(strays[:3])}{f' and {len(strays) - 3} more' if strays[3:] else ''}")
    return comparison


def require_whole(folder: Path, reference: Path, outputs: Iterable[str]) -> None:
    """Each output is complete or absent: a file or folder that has its name has its content. Raises Wrong."""
    for output in outputs:
        if not (folder / output).exists():
            continue
        if different := compare_outputs(reference, folder, (output,), names=NAMES).different:
            name, where = next(iter(different.items()))
            raise Wrong(f"half published: {name}: {where}")


def require_good_manners(ended: Ended) -> None:
    """It came to an end, without a traceback, and left nobody running. Raises Wrong."""
    if ended.code is None:
        raise Wrong(f"`{ended.command}` hung")
    if ended.left_running:
        raise Wrong(f"`{ended.command}` left running: {'; '.join(ended.left_running)}")
    if TRACEBACK in ended.said:
        error = re.search(r"^\S.*", ended.said.partition(TRACEBACK)[2], flags=re.MULTILINE)
        raise Wrong(f"`{ended.command}` ended in a traceback: {error[0] if error else ''}")


def require_success(ended: Ended) -> None:
    """Raises Wrong."""
    require_good_manners(ended)
    if ended.code != 0:
        raise Wrong(f"`{ended.command}` ended with {ended.code}: {last_words(ended)}")


def refusal_commands(ended: Ended, damaged: Sequence[str]) -> list[str]:
    """The commands that a refusal names to mend what is damaged. Raises Wrong where it does not name one of these
    paths, or no command."""
    require_good_manners(ended)
    said = " ".join(ended.said.split())
    if not any(path in said for path in damaged):
        raise Wrong(f"`{ended.command}` names none of {', '.join(damaged)}: {last_words(ended)}")
    if not (commands := list(_commands(said))):
        raise Wrong(f"`{ended.command}` names no command: {last_words(ended)}")
    return commands


def verify_commands(ended: Ended) -> list[str]:
    """Those that `make verify` names, from the top of the pipeline down."""
    return re.findall(r"^  fix it with: (.*?)(?:  #.*)?$", ended.said, flags=re.MULTILINE)


def last_words(ended: Ended) -> str:
    lines = [line.strip() for line in ended.said.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "ERROR" in line or "error" in line] or lines
    return " / ".join(telling[:3])[:400]


def _commands(said: str) -> Iterator[str]:
    """`dvc repro -f -s STAGE` and its like."""
    command = r"(?:rm -f [\w@./-]+ && )?dvc (?:repro|checkout)[\w@./ -]*"
    for match in re.finditer(rf"(?:rebuild it with|fix it with|run): ({command})", said):
        yield re.sub(r" (?:ERROR|Error).*", "", match[1]).strip()


def _files(folder: Path) -> set[str]:
    """Folders too, where they are empty or hidden."""
    return {
        path.relative_to(folder).as_posix()
        for kept in KEPT_DIRS
        for path in (folder / kept).rglob("*")
        if path.is_file() or path.name.startswith(".") or "partial" in path.name
    }
