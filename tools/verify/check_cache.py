"""Compares the workspace with dvc.lock, and the objects of DVC's cache with their names."""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from stages.core.errors import some
from tools.verify.dvc_files import LockedPath, folder_listing, run_cache_problem
from tools.verify.findings import RESTORE, Findings
from tools.verify.snapshot import WorkspaceSnapshot


def check_outputs(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    ahead = set(_stages_ahead_of_lock(snapshot))
    for output in snapshot.outputs:
        here, expected, place = snapshot.md5s(output.path), snapshot.expected[output], shlex.quote(output.path)
        if not here and output.md5 not in snapshot.objects:
            findings.absent += 1
            continue
        changed = list(differences(snapshot, output.path, expected, of="dvc.lock")) if here else []
        wrong = [digest for digest in _needed(snapshot, output) if snapshot.objects and not snapshot.is_intact(digest)]
        copies = {digest: _intact_copy(snapshot, digest, here) for digest in wrong}
        findings.restorable |= {
            snapshot.object_path(digest): copy for digest, copy in copies.items() if copy is not None
        }
        if not (changed or wrong):
            continue
        problems = [*changed, *_cache_problems(snapshot, wrong)]
        if output.stage in ahead and not wrong:
            problems = [
                f"is newer than dvc.lock, and what the record of {output.stage} describes: dvc was ended too early"
            ]
            keep = f"or, where nothing that it is made of was changed since: dvc commit -f {output.stage}"
            fix = f"dvc repro {output.stage}  # {keep}"
        elif not snapshot.objects or expected is None or None in copies.values():
            # Without the damaged objects: DVC would take them for what the stage has made again.
            damaged = [snapshot.shown(snapshot.objects[digest]) for digest in wrong if digest in snapshot.objects]
            fix = (f"rm -f {shlex.join(damaged)} && " if damaged else "") + f"dvc repro -f -s {output.stage}"
        elif wrong:
            fix = RESTORE
        else:  # DVC alone does not see it: it takes for unchanged what has the time and size that it knows
            fix = f"rm -rf {place} && dvc checkout {place}"
        findings.add(output.path, *problems, fix=fix)


def check_lock(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    """Does dvc.lock have the outputs that dvc.yaml declares? One that is no longer declared does no harm."""
    problems: dict[str, list[str]] = {}
    for stage in (stage for stage in snapshot.stages if stage.name in snapshot.locked):
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


def check_sources(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    """Data that stages read, and that no stage makes. DVC keeps no copy of it; git may."""
    changed: dict[str, list[LockedPath]] = {}
    for source in snapshot.sources:
        if not source.matches(snapshot.md5s(source.path)):
            changed.setdefault(source.path, []).append(source)
    for path, sources in changed.items():
        readers = [source.stage for source in sources]
        problem, read_again = f"is not what {', '.join(readers)} read", f"dvc repro {' '.join(readers)}"
        committed = _committed(snapshot.workspace_dir, path)
        if not all(source.matches(committed) for source in sources):
            fix = f"{read_again}  # or put back what it was, where it was not changed on purpose"
            findings.add(path, problem, fix=fix)
            continue
        # git has exactly what was read: files that it does not have do not belong there.
        fix = f"git restore --source=HEAD --staged --worktree -- {shlex.quote(path)}"
        if snapshot.md5s(path).keys() - committed.keys():
            fix += f" && git clean -fdx -- {shlex.quote(path)}"
        fix += f"  # or, where it was changed on purpose: {read_again}"
        findings.add(path, problem, *differences(snapshot, path, committed, of="git"), fix=fix)


def check_rest_of_cache(snapshot: WorkspaceSnapshot, findings: Findings) -> None:
    """Objects of other commits and experiments, and the run cache."""
    needed = {digest for output in snapshot.outputs for digest in _needed(snapshot, output)}
    for digest, path in snapshot.objects.items():
        if digest not in needed and not snapshot.is_intact(digest):
            shown = snapshot.shown(path)
            problem = "does not match its name; no output of dvc.lock needs it"
            findings.add(shown, problem, fix=f"rm -f {shlex.quote(shown)}")
    for folder in snapshot.run_cache:
        if problem := run_cache_problem(folder) or "":
            shown = snapshot.shown(folder)
            problem += "; DVC's run cache, which has the results of earlier runs of a stage"
            findings.add(shown, problem, fix=f"rm -rf {shlex.quote(shown)}")


def differences(
    snapshot: WorkspaceSnapshot, path: str, expected: Mapping[str, str] | None, *, of: str
) -> Iterator[str]:
    """How the files at a path differ from the expected ones.

    expected: MD5 by name; None where only the digest of their listing is known, which differs. of: where they were
    recorded.
    """
    if expected is None:
        yield f"holds other content than {of} has of it"
        return
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
    return list(dict.fromkeys((output.md5, *files)))


def _cache_problems(snapshot: WorkspaceSnapshot, wrong: list[str]) -> Iterator[str]:
    for what, in_cache in (("damaged", True), ("missing", False)):
        paths = [snapshot.object_path(digest) for digest in wrong if (digest in snapshot.objects) == in_cache]
        if paths:
            yield f"{what} in DVC's cache: {some([snapshot.shown(path) for path in paths])}"


def _intact_copy(snapshot: WorkspaceSnapshot, digest: str, here: dict[str, str]) -> Path | bytes | None:
    """A copy of an object in the workspace. here: MD5 by name of the files of the output that needs it."""
    if not digest.endswith(".dir"):
        return snapshot.copies.get(digest)
    found, content = folder_listing(here) if here else ("", b"")
    return content if found == digest else None


def _committed(workspace_dir: Path, path: str) -> dict[str, str]:
    """MD5 by name of the files at a path in git's last commit, as git would write them here; empty without any."""
    try:
        asked = subprocess.run(
            ["git", "archive", "--format=tar", "HEAD", "--", path], cwd=workspace_dir, capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = {}
    with tarfile.open(fileobj=io.BytesIO(asked.stdout)) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                name = PurePosixPath(member.name).relative_to(path).as_posix()
                found["" if name == "." else name] = hashlib.md5(file.read(), usedforsecurity=False).hexdigest()
    return found
