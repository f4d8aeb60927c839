"""Compares the workspace with dvc.lock, and the objects of DVC's cache with their names."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tools.verify.dvc_files import LockedPath, folder_listing, run_cache_problem
from tools.verify.findings import RESTORE, Findings, quoted, some
from tools.verify.snapshot import WorkspaceSnapshot

Restorable = dict[Path, Path | bytes]
"""Objects that are damaged or missing in the cache: an intact copy of each, or its content."""


def check_outputs(snapshot: WorkspaceSnapshot, findings: Findings) -> tuple[Restorable, int]:
    """Returns what can be restored to the cache, and how many outputs are neither in the workspace nor in the cache."""
    restorable: Restorable = {}
    absent = 0
    ahead = set(_stages_ahead_of_lock(snapshot))
    for output in snapshot.outputs:
        here, expected = snapshot.md5s(output.path), snapshot.expected[output]
        if not here and output.md5 not in snapshot.objects:
            absent += 1
            continue
        changed: list[str] = []
        if here and expected is None:
            changed = ["holds other content than dvc.lock has of it"]
        elif here and expected is not None:
            changed = list(differences(snapshot, output.path, expected, of="dvc.lock"))
        wrong = [digest for digest in _needed(snapshot, output) if snapshot.objects and not snapshot.is_intact(digest)]
        copies = {digest: _intact_copy(snapshot, digest, here) for digest in wrong}
        restorable |= {snapshot.object_path(digest): copy for digest, copy in copies.items() if copy is not None}
        if changed and output.stage in ahead and not wrong:
            problem = (
                f"is newer than dvc.lock, and what the record of {output.stage} describes: dvc was ended too early"
            )
            keep = f"or, where nothing that it is made of was changed since: dvc commit -f {output.stage}"
            findings.add(output.path, problem, fix=f"dvc repro {output.stage}  # {keep}")
        elif changed or wrong:
            if not snapshot.objects or expected is None or None in copies.values():
                fix = _make_again(snapshot, output, wrong)
            elif wrong:
                fix = RESTORE
            else:  # DVC alone does not see it: it takes for unchanged what has the time and size that it knows
                fix = f"rm -rf {shlex.quote(output.path)} && dvc checkout {shlex.quote(output.path)}"
            findings.add(output.path, *changed, *_cache_problems(snapshot, wrong), fix=fix)
    return restorable, absent


def check_lock(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    """Does dvc.lock have the outputs that dvc.yaml declares? One that is no longer declared does no harm."""
    problems: dict[str, list[str]] = {}
    for stage in snapshot.stages:
        if stage.name not in snapshot.locked:
            continue
        locked = [output.path for output in snapshot.locked[stage.name]]
        undeclared = [path for path in locked if path not in stage.outs]
        others = f", but {some(undeclared)}, which dvc.yaml does not declare" if undeclared else ""
        for path in stage.outs:
            if path not in locked and (undeclared or snapshot.files(path)):
                problems.setdefault(stage.name, []).append(f"has {stage.name} without {path}{others}")
    if problems:
        lines = [line for lines in problems.values() for line in lines]
        fix = f"dvc repro {' '.join(problems)}"
        findings.add("dvc.lock", *lines, "it is older than dvc.yaml, or damaged", fix=fix)


def check_rest_of_cache(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    """Objects of other commits and experiments, and the run cache."""
    needed = {digest for output in snapshot.outputs for digest in _needed(snapshot, output)}
    for digest, path in snapshot.objects.items():
        if digest not in needed and not snapshot.is_intact(digest):
            problem = "does not match its name; no output of dvc.lock needs it"
            findings.add(snapshot.shown(path), problem, fix=f"rm -f {quoted(snapshot, [path])}")
    for folder in snapshot.run_cache:
        if problem := run_cache_problem(folder) or "":
            problem += "; DVC's run cache, which has the results of earlier runs of a stage"
            findings.add(snapshot.shown(folder), problem, fix=f"rm -rf {quoted(snapshot, [folder])}")


def differences(snapshot: WorkspaceSnapshot, path: str, expected: Mapping[str, str], *, of: str) -> Iterator[str]:
    """How the files at a path differ from the expected ones. expected: MD5 by name. of: where they were recorded."""
    here, files = snapshot.md5s(path), snapshot.files(path)
    changed = [
        _described(name, files[name], snapshot.digests[files[name]].error)
        for name, md5 in expected.items()
        if here.get(name, md5) != md5
    ]
    if changed:
        yield f"holds other bytes than {of} has{': ' if any(changed) else ''}{some(changed)}"
    if lacking := [name for name in expected if name not in here]:
        yield f"lacks {some(lacking)}"
    if added := [name for name in here if name not in expected]:
        yield f"has {some(added)} besides"


def _described(name: str, file: Path, error: str) -> str:
    """The name of a changed file, and what is known of the change."""
    if error:
        return f"{name or file.name} (cannot be read: {error})"
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as problem:
            return f"{name or file.name} (not a whole safetensors file: {problem})"
    return name


def _stages_ahead_of_lock(snapshot: WorkspaceSnapshot) -> Iterator[str]:
    """Stages that were run again to their end before DVC was killed: their record, another one than dvc.lock has,
    matches the outputs. Where only the record differs, it may as well be damaged."""
    for stage in snapshot.stages:
        outputs = [output for output in snapshot.outputs if output.stage == stage.name]
        changed = {output.path for output in outputs if not output.matches(snapshot.md5s(output.path))}
        record = snapshot.record(stage)
        if record is not None and stage.provenance in changed and len(changed) > 1:
            matching = {path for path, digest in record.outputs.items() if snapshot.content(path) == digest}
            if matching == set(stage.written):
                yield stage.name


def _needed(snapshot: WorkspaceSnapshot, output: LockedPath) -> list[str]:
    """The objects of an output, as far as they are known."""
    files = (snapshot.expected[output] or {}).values()
    return list(dict.fromkeys((output.md5, *files))) if output.is_folder else [output.md5]


def _cache_problems(snapshot: WorkspaceSnapshot, wrong: list[str]) -> Iterator[str]:
    damaged = [digest for digest in wrong if digest in snapshot.objects]
    missing = [digest for digest in wrong if digest not in snapshot.objects]
    for what, digests in (("damaged", damaged), ("missing", missing)):
        if digests:
            shown = [snapshot.shown(snapshot.object_path(digest)) for digest in digests]
            yield f"{what} in DVC's cache: {some(shown)}"


def _intact_copy(snapshot: WorkspaceSnapshot, digest: str, here: dict[str, str]) -> Path | bytes | None:
    """A copy of an object in the workspace. here: MD5 by name of the files of the output that needs it."""
    if not digest.endswith(".dir"):
        return snapshot.copies.get(digest)
    found, content = folder_listing(here) if here else ("", b"")
    return content if found == digest else None


def _make_again(snapshot: WorkspaceSnapshot, output: LockedPath, wrong: list[str]) -> str:
    """After damaged objects are removed from the cache: DVC would take them for what the stage has made again."""
    damaged = [snapshot.objects[digest] for digest in wrong if digest in snapshot.objects]
    remove = f"rm -f {quoted(snapshot, damaged)} && " if damaged else ""
    return f"{remove}dvc repro -f -s {output.stage}"
