"""Check that everything on the disk is what was recorded of it, or that a stage comes out the same when it runs again.

Reads   every byte of the outputs in data/ and of DVC's cache; dvc.lock, lineages, certificates, records of provenance
Writes  nothing
Run     make verify
        make verify RERUN=train@r1-llm-only
        make verify PUBLISHED=FOLDER KEY=publisher.pem    a published folder, wherever it is

Prints each damaged path with the command that fixes it, and exits with 1; exits with 0 if nothing is damaged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import psutil
from cryptography.exceptions import UnsupportedAlgorithm

from stages.core.errors import UserError, join_truncated, pluralize
from stages.core.given_files import read_plain
from stages.core.lineage import (
    LINEAGE_FILE,
    Lineage,
    content_digest,
    lineage_lines,
    map_largest_first,
    short,
    verified_lineage,
)
from stages.core.provenance import PROVENANCE_DIR, read_provenance
from stages.core.records import rebuild
from stages.launcher.pipeline import DeclaredStage, cache_dir, declared_stages
from stages.mixture.certificate import BuildCertificate
from stages.models.certificate import MergeCertificate
from tools.verify.rerun import files_of, rerun

DATA_DIR = Path("data")
UNKNOWN_KEY = 3
"""Exit code for a published folder that agrees with itself, signed by a key that nobody named."""


@click.command(help=__doc__)
@click.option("--rerun", "stage", help="Run this stage again, in a folder of its own, and compare: train@r1-llm-only.")
@click.option("--published", "folder", type=click.Path(path_type=Path), help="Check only this published folder.")
@click.option("--key", type=click.Path(path_type=Path), help="Public key of its publisher; default: the folder's own.")
def main(stage: str | None, folder: Path | None, key: Path | None) -> None:
    if (stage is not None and folder is not None) or (key is not None and folder is None):
        raise click.UsageError("give --rerun, or --published with or without --key, or nothing")
    if folder is not None:
        sys.exit(report_published(folder, key))
    if not Path("dvc.yaml").exists():
        raise UserError("there is no dvc.yaml here; run from the top of the repository")
    sys.exit(rerun(Path.cwd(), stage) if stage is not None else verify())


class Findings:
    """The paths of the workspace that are not as recorded, each with its problems and the command that settles them."""

    def __init__(self, stages: Iterable[DeclaredStage]) -> None:
        self.makers = {out: stage for stage in stages for out in stage.outs}
        """The stage that writes an output, in the order of the pipeline."""
        self._found: dict[str, tuple[list[str], str]] = {}

    def add(self, path: Path | str, problem: str, fix: str = "") -> None:
        """Add a problem to the output that a path belongs to.

        fix: the command; by default the one of its other problems, or else the one that runs its stage again.
        """
        owner = self.output_of(path) or str(path)
        problems, command = self._found.get(owner, ([], ""))
        self._found[owner] = ([*problems, problem], command or fix)

    def output_of(self, path: Path | str) -> str | None:
        return next((out for out in self.makers if Path(path).is_relative_to(out)), None)

    def __contains__(self, path: Path | str) -> bool:
        """Whether there is a finding at a path, below it or around it."""
        return any(Path(path).is_relative_to(found) or Path(found).is_relative_to(path) for found in self._found)

    def lines(self) -> Iterator[str]:
        """A paragraph for each path, in the order in which they are to be fixed."""
        order = list(self.makers)
        for path in sorted(self._found, key=lambda path: order.index(path) if path in order else -1):
            problems, fix = self._found[path]
            if not fix:
                maker = self.makers.get(path)
                remove = f"rm -rf {shlex.quote(path)}  # no stage of dvc.yaml makes it"
                fix = rebuild(maker.name) if maker else remove
            lines = [path, *(f"  {problem}" for problem in dict.fromkeys(problems)), f"  fix it with: {fix}"]
            yield "\n".join([*map(_one_line, lines), ""])


def verify() -> int:
    """Check the workspace and print the findings; returns the exit code.

    Outputs that are neither here nor in the cache are counted and not checked. Raises UserError if dvc.yaml or dvc.lock
    cannot be read, or while DVC runs stages here.
    """
    _refuse_beside_dvc()
    started, stages = time.monotonic(), declared_stages(Path.cwd())
    findings = Findings(stages)
    lineages = check_lineages(findings)
    absent, objects = check_dvc(findings, lineages) if Path(".dvc").is_dir() else (0, 0)
    check_certificates(findings, lineages)
    num_records = check_records(findings, lineages)
    lines = list(findings.lines())
    for line in lines:
        click.echo(line)
    if absent:
        click.echo(f"not checked, as they are not here: {pluralize(absent, 'output')} of dvc.lock")
    present = sum(Path(output).exists() for output in findings.makers)
    checked = (
        f"{pluralize(present, 'output')}, {pluralize(objects, 'cached object')}, "
        f"{pluralize(len(lineages), 'model folder')}, {pluralize(num_records, 'record')} "
        f"in {time.monotonic() - started:.1f} s"
    )
    if lines:
        found = pluralize(len(lines), "path")
        click.echo(f"NOT AS RECORDED: {found}; fix them from the top, then run make verify again. {checked}")
        return 1
    click.echo(
        f"OK: all outputs match their records. {checked}"
        if present
        else "nothing to verify: no output of dvc.lock is here"
    )
    return 0


def check_dvc(findings: Findings, lineages: Mapping[Path, Lineage]) -> tuple[int, int]:
    """Compare data/ with dvc.lock, and DVC's cache with the names of its objects. Returns (outputs that are not here,
    objects).

    lineages: of the model folders that were read whole and are intact. There DVC goes by size and time; for all others
    it starts with an empty database, so that it reads every byte.
    """
    known = {output for output in findings.makers if Path(output) in lineages}
    with TemporaryDirectory() as empty:
        changes = dvc_changes(findings.makers.keys() - known, DVC_SITE_CACHE_DIR=empty) + dvc_changes(known)
    absent = {path for path, change in changes if change == "deleted" and path in findings.makers}
    found: dict[str, list[tuple[str, str]]] = {}
    for path, change in changes:
        if (output := findings.output_of(path)) and output not in absent:
            found.setdefault(output, []).append((path.removeprefix(output).lstrip("/"), change))
    objects = list(cache_dir(Path.cwd()).glob("??/*"))
    read = {_inode(file) for output in findings.makers if output not in found for file in files_of(Path(output))}
    check_objects(findings, [path for path in objects if _inode(path) not in read])
    for output, files in found.items():
        stage = findings.makers[output]
        if different := [name for name, change in files if change != "not_in_cache"]:
            names = join_truncated([name for name in different if name])
            findings.add(
                output, f"differs from dvc.lock{f' in {names}' if names else ''}", _fix(stage, output, lineages)
            )
        elif objects:
            fix = f"dvc commit -f {stage.name}  # or, if its code or inputs were changed since: dvc repro {stage.name}"
            findings.add(output, "is not complete in DVC's cache", fix)
    return len(absent), len(objects)


def dvc_changes(outputs: Iterable[str], **variables: str) -> list[tuple[str, str]]:
    """(path, change) of what is not as dvc.lock says at or below some outputs: modified, added, renamed, deleted or
    not_in_cache."""
    if not (targets := sorted(outputs)):
        return []
    command = [sys.executable, "-m", "dvc", "data", "status", "--granular", "--json", "--", *targets]
    ended = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise UserError(
            f"dvc data status failed: {ended.stderr.strip()}\n"
            "  if dvc.lock is damaged, fix it with: git checkout HEAD -- dvc.lock || rm dvc.lock"
        )
    status = json.loads(ended.stdout)
    groups = {**status.get("uncommitted", {}), "not_in_cache": status.get("not_in_cache", [])}
    groups.pop("unknown", None)  # files of a folder whose listing is not in the cache
    paths = [(path["new"] if isinstance(path, dict) else path, group) for group in groups for path in groups[group]]
    return [(path.rstrip("/"), group) for path, group in paths]


def _fix(stage: DeclaredStage, output: str, lineages: Mapping[Path, Lineage]) -> str:
    """The command for an output that differs from dvc.lock: it is damaged, or DVC was killed before it recorded it."""
    with suppress(UserError):
        made = read_provenance(Path(stage.provenance or "")).outputs
        if output in {*made, stage.provenance} and all(_digest(path, lineages) == made[path] for path in made):
            return f"dvc commit -f {stage.name}  # good by its record, and newer: dvc was killed before it recorded it"
    place = shlex.quote(output)
    return f"rm -rf {place} && dvc checkout {place} || {rebuild(stage.name)}"


def check_objects(findings: Findings, objects: Iterable[Path]) -> None:
    """Compare objects of DVC's cache with the MD5 in their names; DVC itself trusts a read-only one."""

    def md5(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

    sizes = {path: path.stat().st_size for path in objects if len(path.name) >= 30}
    for path, found in map_largest_first(md5, sizes).items():
        if found != f"{path.parent.name}{path.name.removesuffix('.dir')}":
            shown = os.path.relpath(path)
            findings.add(shown, "does not have the MD5 that it is named by", fix=f"rm -f {shlex.quote(shown)}")


def check_lineages(findings: Findings) -> dict[Path, Lineage]:
    """Compare each model folder with its lineage, and with the folders that it was made from. Returns the intact."""
    lineages: dict[Path, Lineage] = {}
    for path in _data_files(f"**/{LINEAGE_FILE}"):
        try:
            lineages[path.parent] = verified_lineage(path.parent, fix="")
        except UserError as error:
            findings.add(path.parent, _problem(error))
    for folder, lineage in lineages.items():
        for role, parent in lineage.parents.items():
            parent_dir = Path(os.path.normpath(folder / parent.path))
            now, was = lineages.get(parent_dir), parent.lineage
            if not (parent_dir / LINEAGE_FILE).exists():
                output = findings.output_of(parent_dir)
                fix = (
                    f"dvc checkout {shlex.quote(output)} || dvc repro {findings.makers[output].name}" if output else ""
                )
                findings.add(parent_dir, f"is missing, although it is the {role} of {folder}", fix)
            elif now is not None and now != was and parent_dir not in findings:
                other = f"content {short(now.digest)}" if now.digest != was.digest else "another lineage"
                findings.add(folder, f"its {role} {parent_dir} had content {short(was.digest)}, and now has {other}")
    return lineages


def check_certificates(findings: Findings, lineages: Mapping[Path, Lineage]) -> None:
    """Each merged or built model has a certificate without problems, about its content."""
    for folder, lineage in lineages.items():
        if folder in findings or lineage.kind not in ("merged", "built"):
            continue
        merged = lineage.kind == "merged"
        path = folder.with_name("merge.json" if merged else f"{folder.name}.json")
        try:
            certificate = (MergeCertificate if merged else BuildCertificate).read(path, fix="")
        except UserError as error:
            findings.add(path, _problem(error))
            continue
        if problems := certificate.problems():
            findings.add(path, f"certifies a failure: {'; '.join(problems)}")
        if certificate.digest != lineage.digest:
            certified = short(certificate.digest)
            findings.add(path, f"certifies content {certified}, but {folder} holds {short(lineage.digest)}")


def check_records(findings: Findings, lineages: Mapping[Path, Lineage]) -> int:
    """Outputs have the content that the record of their stage says, and so has what it read that no stage makes.
    Returns the number of records."""
    paths = _data_files(f"{Path(PROVENANCE_DIR).name}/**/*.json")
    digest_of = functools.cache(functools.partial(_digest, lineages=lineages))
    for path in paths:
        try:
            record = read_provenance(path)
        except UserError as error:
            findings.add(path, _problem(error))
            continue
        for output, digest in record.outputs.items():
            if output not in findings and (now := digest_of(output)) not in (None, digest):
                findings.add(path, f"records {output} with content {short(digest)}, which now has {short(str(now))}")
        for source, digest in record.inputs.items():
            if findings.output_of(source) is None and digest_of(source) not in (None, digest):
                make = f"dvc repro {shlex.quote(record.stage)}"
                fix = f"{make}  # or, if it was not changed on purpose, put back what it was"
                findings.add(source, f"is not what {record.stage} read", fix=fix)
    return len(paths)


def _digest(path: str, lineages: Mapping[Path, Lineage]) -> str | None:
    """The content of a path that is here; a model folder's only if it is intact."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        return None  # of no stage; it may be a file of the machine that never ends
    with suppress(UserError, OSError):
        if Path(path) in lineages or not (Path(path) / LINEAGE_FILE).exists():
            return content_digest(Path(path))
    return None


def report_published(folder: Path, key: Path | None) -> int:
    """Check a published folder, and print how it was made and what of it is established. Returns the exit code: 1 for a
    folder that does not agree with itself, UNKNOWN_KEY for one that anybody could have signed."""
    from stages.publishing.check import check_published  # imports the families of models

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    try:
        named = _named_key(key, folder)
        checked = check_published(folder, key)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  # a hostile folder or key may make any library raise anything
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} cannot be verified: {' '.join(why.split())[:300]}") from None
    unknown = "" if checked.key in named else f"signed by a key you have not named: {checked.key or 'not read'}\n"
    made = [f"{each.stage}, {each.ended}, commit {each.commit or 'not known'}" for each in checked.records]
    for line in checked.problems or [*made, *(lineage_lines(checked.model) if checked.model else ())]:
        click.echo(_one_line(line))
    if checked.problems:
        click.echo(f"{unknown}DAMAGED: {pluralize(len(checked.problems), 'file')} of {folder}; download it again")
        return 1
    agree = (
        "the files are those that this key signed; lineage, records, plan, certificate, figures and the card's "
        "metadata, not its text, agree with them"
    )
    if unknown:
        click.echo(
            f"{unknown}established: {agree}\n"
            "not established: who signed. Whoever changes such a folder can sign it again with a key of their own; get "
            f"the publisher's from elsewhere, then: make verify PUBLISHED={shlex.quote(str(folder))} KEY=publisher.pem"
        )
        return UNKNOWN_KEY
    click.echo(f"OK: {agree}. Signed by {named[checked.key]}: {checked.key}")
    return 0


def _named_key(key: Path | None, folder: Path) -> dict[str, str]:
    """In words, by its fingerprint: the key that a person named, or else the one that this workspace signs with."""
    from stages.publishing.signing import fingerprint  # imports cryptography

    own = Path(".bakeoff/signing/key.pem")
    if key is None:
        return {fingerprint(own): "this workspace's own key"} if own.is_file() else {}
    places = [Path(os.path.abspath(key))]  # noqa: PTH100  # absolute() keeps `..`, resolve() follows the links
    while places[-1].is_symlink() and len(places) <= 40:
        places.append(Path(os.path.abspath(places[-1].parent / places[-1].readlink())))  # noqa: PTH100
    within = (
        above.exists() and above.samefile(folder) for place in (*places, key.resolve()) for above in place.parents
    )
    if any(within) or (key.is_file() and any(path.is_file() and path.samefile(key) for path in folder.rglob("*"))):
        raise UserError(f"{key} came with the folder, and whoever changed that can have changed the key; name another")
    try:
        if b"PRIVATE KEY" in read_plain(key):
            raise UserError(f"{key} is a private key, which a check needs not; name the public key of its owner")
        return {fingerprint(key): f"the key {key}"}
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{key} is no public key in PEM: {error}") from None


def _inode(path: Path) -> tuple[int, int]:
    """The file behind a path: an output and its object in the cache are hard links of one."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _one_line(text: str) -> str:
    """Names of files and records may be made to look like a verdict."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _data_files(pattern: str) -> list[Path]:
    """Files below data/, without those that a killed stage was writing."""
    return sorted(path for path in DATA_DIR.glob(pattern) if not any(part.startswith(".") for part in path.parts))


def _problem(error: UserError) -> str:
    """The message without the command that fixes it."""
    return " ".join(error.message.split("; rebuild it with")[0].split())


def _refuse_beside_dvc() -> None:
    """Raise UserError while DVC runs stages here: what it has not recorded yet would look damaged."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = process.cmdline()
            runs_stages = {"repro", "run"} & {*words} and "dvc" in [Path(word).name for word in words]
            if runs_stages and Path(process.cwd()) == Path.cwd():
                raise UserError(f"dvc is running here (pid {process.pid}); try again when it has ended")


if __name__ == "__main__":
    main()
