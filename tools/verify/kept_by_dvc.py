"""Is what DVC recorded in the workspace and in its cache? Content against dvc.lock, and objects against their names."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tools.verify.damage import RESTORE, Damages, some
from tools.verify.holdings import Holdings
from tools.verify.store import Recorded, listing_object, run_cache_problem

Restorable = dict[Path, Path | bytes]
"""Objects that are damaged or missing in the cache, and where the same lies intact, or what it is."""


def check_outputs(holdings: Holdings, damages: Damages) -> tuple[Restorable, int]:
    """Returns what can be put back into the cache, and how many outputs are neither here nor there."""
    restorable: Restorable = {}
    absent = 0
    ahead = set(_ahead_of_lock(holdings))
    for output in holdings.store.outputs:
        here = holdings.listing(output.path)
        if not here and output.md5 not in holdings.store.objects:
            absent += 1
            continue
        unlike = list(_unlike(holdings, output)) if here else []
        wrong = list(_wrong_objects(holdings, output))
        elsewhere = {digest: _elsewhere(holdings, digest, here) for digest in wrong}
        restorable |= {holdings.store.object_path(digest): found for digest, found in elsewhere.items() if found}
        if unlike and output.stage in ahead and not wrong:
            newer = f"is newer than dvc.lock, and what the record of {output.stage} tells of: dvc was ended too early"
            keep = f"or, where nothing that it is made of was changed since: dvc commit -f {output.stage}"
            damages.add(output.path, [newer], f"dvc repro {output.stage}  # {keep}")
        elif unlike or wrong:
            found = [*unlike, *_in_cache(holdings, wrong)]
            can_be_had = holdings.expected(output) is not None and all(elsewhere.values()) and holdings.store.has_cache
            mend = _bring_back(output, wrong) if can_be_had else _make_anew(holdings, damages, output, wrong)
            damages.add(output.path, found, mend)
    return restorable, absent


def check_lock(holdings: Holdings, damages: Damages) -> None:
    """Does dvc.lock know what dvc.yaml declares? An output that is no longer declared stays in it, and harms nobody."""
    store = holdings.store
    found: dict[str, list[str]] = {}
    for path, stage in store.unlocked.items():
        instead = [entry.path for entry in store.undeclared if entry.stage == stage]
        if instead or holdings.files(path):
            others = f", but {some(instead)}, which dvc.yaml does not declare" if instead else ""
            found.setdefault(stage, []).append(f"has {stage} without {path}{others}")
    if found:
        said = [*(line for lines in found.values() for line in lines), "it is older than dvc.yaml, or damaged"]
        damages.add("dvc.lock", said, f"dvc repro {' '.join(found)}")


def check_rest_of_cache(holdings: Holdings, damages: Damages) -> None:
    """Objects of other commits and experiments, and the run cache."""
    outputs = holdings.store.outputs
    needed = {digest for output in outputs for digest in _needed(holdings, output)}
    for digest, path in holdings.store.objects.items():
        if digest not in needed and not _is_intact(holdings, digest):
            found = "is not what its name says; no output of dvc.lock needs it"
            damages.add(holdings.shown(path), [found], f"rm -f {damages.quoted([path])}")
    for folder in holdings.store.run_cache:
        if problem := run_cache_problem(folder):
            found = f"{problem}; DVC's run cache, which says what a stage that was run before gave"
            damages.add(holdings.shown(folder), [found], f"rm -rf {damages.quoted([folder])}")


def _ahead_of_lock(holdings: Holdings) -> Iterator[str]:
    """Stages that were run again to their end, whereupon DVC was killed: their records, other ones than dvc.lock has,
    tell of just what is here. Where nothing but the record differs, that may as well be what is damaged."""
    for stage in holdings.store.stages:
        outputs = [output for output in holdings.store.outputs if output.stage == stage.name]
        changed = {output.path for output in outputs if not output.agrees_with(holdings.listing(output.path))}
        record = holdings.record(stage)
        if record is not None and stage.provenance in changed and len(changed) > 1:
            told = record.outputs.items()
            if {path for path, digest in told if holdings.content(path) == digest} == set(stage.written):
                yield stage.name


def _unlike(holdings: Holdings, output: Recorded) -> Iterator[str]:
    """How what is here differs from what dvc.lock has."""
    expected = holdings.expected(output)
    if expected is None:
        yield "holds something else than dvc.lock has of it"
    else:
        yield from differing(holdings, output.path, expected, of="dvc.lock")


def differing(holdings: Holdings, path: str, expected: Mapping[str, str], *, of: str) -> Iterator[str]:
    """How what is at a path differs from what it should be. expected: MD5 by name. of: who has it so."""
    here = holdings.listing(path)
    others = [_described(holdings, path, name) for name, md5 in expected.items() if here.get(name, md5) != md5]
    if others:
        yield f"holds other bytes than {of} has{': ' if any(others) else ''}{some(others)}"
    if lacking := [name for name in expected if name not in here]:
        yield f"lacks {some(lacking)}"
    if added := [name for name in here if name not in expected]:
        yield f"has {some(added)} besides"


def _described(holdings: Holdings, path: str, name: str) -> str:
    """A file that is not as it was, with what can be said of that."""
    file = holdings.files(path)[name]
    if error := holdings.digests[file].error:
        return f"{name or file.name} (cannot be read: {error})"
    problem = safetensors_problem(file) if file.suffix == ".safetensors" else ""
    return f"{name or file.name} ({problem})" if problem else name


def safetensors_problem(path: Path) -> str:
    """What its own header says of a file that was cut off, or is none; "" where nothing."""
    try:
        with safe_open(path, framework="numpy"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"not a whole safetensors file: {error}"


def _needed(holdings: Holdings, output: Recorded) -> list[str]:
    """The objects that an output is made of, as far as they are known."""
    files = (holdings.expected(output) or {}).values()
    return list(dict.fromkeys((output.md5, *files))) if output.is_folder else [output.md5]


def _wrong_objects(holdings: Holdings, output: Recorded) -> Iterator[str]:
    if holdings.store.has_cache:
        yield from (digest for digest in _needed(holdings, output) if not _is_intact(holdings, digest))


def _is_intact(holdings: Holdings, digest: str) -> bool:
    path = holdings.store.objects.get(digest)
    return path is not None and holdings.digests[path].md5 == digest.removesuffix(".dir")


def _in_cache(holdings: Holdings, wrong: list[str]) -> Iterator[str]:
    damaged = [digest for digest in wrong if digest in holdings.store.objects]
    missing = [digest for digest in wrong if digest not in holdings.store.objects]
    for what, digests in (("damaged", damaged), ("missing", missing)):
        if digests:
            shown = [holdings.shown(holdings.store.object_path(digest)) for digest in digests]
            yield f"{what} in DVC's cache: {some(shown)}"


def _elsewhere(holdings: Holdings, digest: str, here: dict[str, str]) -> Path | bytes | None:
    """What the workspace has of an object. here: the output that it may list."""
    if not digest.endswith(".dir"):
        return holdings.copies.get(digest)
    found, content = listing_object(here) if here else ("", b"")
    return content if found == digest else None


def _bring_back(output: Recorded, wrong: list[str]) -> str:
    """First from the workspace to the cache, then from there to the workspace. DVC alone would do neither: it takes for
    unchanged what has the time and size that it knows."""
    path = shlex.quote(output.path)
    return RESTORE if wrong else f"rm -rf {path} && dvc checkout {path}"


def _make_anew(holdings: Holdings, damages: Damages, output: Recorded, wrong: list[str]) -> str:
    """After what is damaged has gone from the cache: else DVC would take it for what the stage has made again."""
    damaged = [holdings.store.objects[digest] for digest in wrong if digest in holdings.store.objects]
    return " && ".join([*([f"rm -f {damages.quoted(damaged)}"] if damaged else []), f"dvc repro -f -s {output.stage}"])
