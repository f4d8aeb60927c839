"""Is what DVC recorded in the workspace and in its cache? Content against dvc.lock, and objects against their names."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from stages.kit.verification.damage import RESTORE, Damages, some
from stages.kit.verification.holdings import Holdings
from stages.kit.verification.store import Recorded, listing_object, run_cache_problem

Restorable = dict[Path, Path | bytes]
"""Objects that are damaged or missing in the cache, and where the same lies intact, or what it is."""


def check_outputs(holdings: Holdings, damages: Damages) -> tuple[Restorable, int]:
    """Returns what can be put back into the cache, and how many outputs are neither here nor there."""
    restorable: Restorable = {}
    absent = 0
    for output in holdings.store.outputs:
        here = holdings.listing(output.path)
        if not here and output.md5 not in holdings.store.objects:
            absent += 1
            continue
        unlike = list(_unlike(holdings, output)) if here else []
        wrong = list(_wrong_objects(holdings, output))
        elsewhere = {digest: _elsewhere(holdings, digest, here) for digest in wrong}
        restorable |= {holdings.store.object_path(digest): found for digest, found in elsewhere.items() if found}
        if unlike or wrong:
            found = [*unlike, *_in_cache(holdings, wrong)]
            can_be_had = holdings.expected(output) is not None and all(elsewhere.values()) and holdings.store.has_cache
            mend = _bring_back(output, wrong) if can_be_had else _make_anew(holdings, damages, output, wrong)
            damages.add(output.path, found, mend)
    return restorable, absent


def check_sources(holdings: Holdings, damages: Damages) -> None:
    """Data that stages read and none makes."""
    readers: dict[str, list[str]] = {}
    for source in holdings.store.sources:
        here = holdings.listing(source.path)
        now = listing_object(here)[0] if source.is_folder else here.get("")
        if now != source.md5:
            readers.setdefault(source.path, []).append(source.stage)
    for path, stages in readers.items():
        damages.add(
            path,
            [f"is not what {', '.join(stages)} read"],
            f"git checkout -- {shlex.quote(path)}  # or, where it was changed on purpose: dvc repro {' '.join(stages)}",
        )


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


def _unlike(holdings: Holdings, output: Recorded) -> Iterator[str]:
    """How what is here differs from what dvc.lock has."""
    here, expected = holdings.listing(output.path), holdings.expected(output)
    if expected is None:
        yield "holds something else than dvc.lock has of it"
        return
    differing = [name for name, md5 in expected.items() if here.get(name, md5) != md5]
    others = [_described(holdings, output.path, name) for name in differing]
    if others:
        yield f"holds other bytes than dvc.lock has{': ' if any(others) else ''}{some(others)}"
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
