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

from stages.core.errors import UserError, join_truncated, pluralize, printable
from stages.core.given_files import cache_dir
from stages.core.lineage import (
    LINEAGE_FILE,
    Lineage,
    content_digest,
    lineage_lines,
    map_largest_first,
    short,
    verified_lineage,
)
from stages.core.provenance import PROVENANCE_DIR, Provenance
from stages.kit.launcher.pipeline import DeclaredStage, declared_stages
from stages.kit.mixture.certificate import BuildCertificate
from stages.kit.models.certificate import MergeCertificate
from tools.verify.rerun import rerun

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
    """The damaged paths of the workspace, each with its problems and the command that fixes them."""

    def __init__(self, stages: Iterable[DeclaredStage]) -> None:
        self.makers = {out: stage.name for stage in stages for out in stage.outs}
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
        return next((out for out in self.makers if _is_within(str(path), out)), None)

    def __contains__(self, path: Path | str) -> bool:
        """Whether there is a finding at a path, below it or around it."""
        return any(_is_within(str(path), found) or _is_within(found, str(path)) for found in self._found)

    def lines(self) -> Iterator[str]:
        """A paragraph for each path, in the order in which they are to be fixed."""
        order = list(self.makers)
        for path in sorted(self._found, key=lambda path: order.index(path) if path in order else -1):
            problems, fix = self._found[path]
            if not fix:
                maker = self.makers.get(path)
                remove = f"rm -rf {shlex.quote(path)}  # no stage of dvc.yaml makes it"
                fix = f"dvc repro -f -s {maker}" if maker else remove
            yield "\n".join([path, *(f"  {problem}" for problem in dict.fromkeys(problems)), f"  fix it with: {fix}\n"])


def verify() -> int:
    """Check the workspace and print the findings; returns the exit code.

    Outputs that are neither here nor in the cache are counted and not checked. Raises UserError if dvc.yaml or dvc.lock
    cannot be read, or while DVC runs stages here.
    """
    _refuse_beside_dvc()
    started, stages = time.monotonic(), declared_stages(Path.cwd())
    findings = Findings(stages)
    objects = check_cache(findings)
    lineages = check_lineages(findings)
    absent = check_outputs(findings, cached=bool(objects)) if Path(".dvc").is_dir() else 0
    check_certificates(findings, lineages)
    num_records = check_records(findings, lineages)
    lines = list(findings.lines())
    for line in lines:
        click.echo(printable(line))
    if absent:
        click.echo(f"not checked, as they are not here: {pluralize(absent, 'output')} of dvc.lock")
    present = sum(Path(output).exists() for output in findings.makers)
    checked = (
        f"{pluralize(present, 'output')}, {pluralize(objects, 'cached object')}, "
        f"{pluralize(len(lineages), 'model folder')}, {pluralize(num_records, 'record')} "
        f"in {time.monotonic() - started:.1f} s"
    )
    if lines:
        click.echo(
            f"DAMAGED: {pluralize(len(lines), 'path')}; fix them from the top, then run make verify again. {checked}"
        )
        return 1
    click.echo(f"OK: all outputs match their records. {checked}")
    return 0


def check_cache(findings: Findings) -> int:
    """Compare every object of DVC's cache with the MD5 in its name; DVC itself trusts a read-only one. Returns their
    number."""
    objects = {path: path.stat().st_size for path in cache_dir(Path.cwd()).glob("??/*") if len(path.name) >= 30}

    def md5(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

    for path, found in map_largest_first(md5, objects).items():
        if found != f"{path.parent.name}{path.name.removesuffix('.dir')}":
            shown = os.path.relpath(path)
            findings.add(shown, "does not have the MD5 that it is named by", fix=f"rm -f {shlex.quote(shown)}")
    return len(objects)


def check_outputs(findings: Findings, *, cached: bool) -> int:
    """Compare data/ with dvc.lock, by DVC with an empty database, so that it reads every file. Returns the number of
    outputs that are not here.

    cached: whether DVC's cache has any object.
    """
    command = [sys.executable, "-m", "dvc", "data", "status", "--granular", "--json"]
    with TemporaryDirectory() as empty:
        environment = {**os.environ, "DVC_SITE_CACHE_DIR": empty}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise UserError(
            f"dvc data status failed: {ended.stderr.strip()}\n"
            "  if dvc.lock is damaged, fix it with: git checkout HEAD -- dvc.lock || rm dvc.lock"
        )
    status = json.loads(ended.stdout)
    changes = status.get("uncommitted", {})
    deleted = [path.rstrip("/") for path in changes.get("deleted", [])]
    absent = [path for path in deleted if path in findings.makers]
    changed: dict[str, list[str]] = {}
    renamed = [path for names in changes.get("renamed", []) for path in names.values()]
    for entry in (*changes.get("modified", []), *changes.get("added", []), *renamed, *deleted):
        output = findings.output_of(path := entry.rstrip("/"))
        if output and output not in absent:
            changed.setdefault(output, []).extend([path.removeprefix(f"{output}/")] if path != output else [])
    for output, files in changed.items():
        stage, place = findings.makers[output], shlex.quote(output)
        problem = "differs from dvc.lock" + (f" in {join_truncated(files)}" if files else "")
        fix = f"rm -rf {place} && dvc checkout {place} || dvc repro -f -s {stage}"
        fix += f"  # or, to keep it, if dvc was killed before it recorded it: dvc commit -f {stage}"
        findings.add(output, problem, fix=fix)
    for output in dict.fromkeys(findings.output_of(path.rstrip("/")) for path in status.get("not_in_cache", [])):
        if output and cached and output not in absent and output not in changed:
            stage = findings.makers[output]
            fix = f"dvc commit -f {stage}  # or, if its code or inputs were changed since: dvc repro {stage}"
            findings.add(output, "is not complete in DVC's cache", fix=fix)
    return len(absent)


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
                fix = f"dvc checkout {shlex.quote(output)} || dvc repro {findings.makers[output]}" if output else ""
                findings.add(parent_dir, f"is missing, although it is the {role} of {folder}", fix=fix)
            elif now is not None and now != was and parent_dir not in findings:
                other = f"content {short(now.digest)}" if now.digest != was.digest else "another lineage"
                findings.add(folder, f"its {role} {parent_dir} had content {short(was.digest)}, and now has {other}")
    return lineages


def check_certificates(findings: Findings, lineages: Mapping[Path, Lineage]) -> None:
    """Each merged or built model has a certificate without problems, about its content."""
    for folder, lineage in lineages.items():
        if lineage.kind not in ("merged", "built") or folder in findings:
            continue
        path = folder.with_name("merge.json" if lineage.kind == "merged" else f"{folder.name}.json")
        certificate: MergeCertificate | BuildCertificate
        try:
            certificate = (MergeCertificate if lineage.kind == "merged" else BuildCertificate).read(path)
        except UserError as error:
            findings.add(path, _problem(error))
            continue
        certified = certificate.merged_digest if isinstance(certificate, MergeCertificate) else certificate.built_digest
        if problems := certificate.problems():
            findings.add(path, f"certifies a failure: {'; '.join(problems)}")
        if certified != lineage.digest:
            findings.add(path, f"certifies content {short(certified)}, but {folder} holds {short(lineage.digest)}")


def check_records(findings: Findings, lineages: Mapping[Path, Lineage]) -> int:
    """Outputs have the content that the record of their stage says, and so has what it read that no stage makes.
    Returns the number of records."""
    paths = _data_files(f"{Path(PROVENANCE_DIR).name}/**/*.json")

    @functools.cache
    def digest_of(path: str) -> str | None:
        """The content of a path that is here; a model folder's only if it is intact."""
        with suppress(UserError, OSError):
            if Path(path) in lineages or not (Path(path) / LINEAGE_FILE).exists():
                return content_digest(Path(path))
        return None

    for path in paths:
        try:
            record = Provenance.read(path)
        except UserError as error:
            findings.add(path, _problem(error))
            continue
        for output, digest in record.outputs.items():
            if output not in findings and (now := digest_of(output)) not in (None, digest):
                findings.add(path, f"records {output} with content {short(digest)}, which now has {short(str(now))}")
        for source, digest in record.inputs.items():
            if findings.output_of(source) is None and digest_of(source) not in (None, digest):
                fix = f"dvc repro {record.stage}  # or, if it was not changed on purpose, put back what it was"
                findings.add(source, f"is not what {record.stage} read", fix=fix)
    return len(paths)


def report_published(folder: Path, key: Path | None) -> int:
    """Check a published folder, and print how it was made and what of it is established. Returns the exit code: 1 for a
    folder that does not agree with itself, UNKNOWN_KEY for one that anybody could have signed."""
    from stages.kit.publishing.check import check_published  # imports the families of models

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    named = _named_key(key)
    checked = check_published(folder, key)
    unknown = "" if checked.key in named else f"signed by a key you have not named: {checked.key or 'it has none'}\n"
    if checked.problems:
        click.echo(printable("\n".join(checked.problems)))
        click.echo(f"{unknown}DAMAGED: {pluralize(len(checked.problems), 'file')} of {folder}; download it again")
        return 1
    assert checked.model is not None
    for record in checked.records:
        click.echo(printable(f"{record.stage}, {record.ended}, commit {record.commit or 'not known'}"))
    for line in lineage_lines(checked.model):
        click.echo(printable(line))
    agree = "the files are those that this key signed; lineage, records, plan, certificate and figures agree with them"
    if unknown:
        click.echo(
            f"{unknown}established: {agree}\n"
            "not established: who signed. Whoever changes such a folder can sign it again with a key of their own; get "
            f"the publisher's from elsewhere, then: make verify PUBLISHED={shlex.quote(str(folder))} KEY=publisher.pem"
        )
        return UNKNOWN_KEY
    click.echo(f"OK: {agree}. Signed by {named[checked.key]}: {checked.key}")
    return 0


def _named_key(key: Path | None) -> dict[str, str]:
    """In words, by its fingerprint: the key that a person named, or else the one that this workspace signs with."""
    from stages.kit.publishing.signing import fingerprint  # imports cryptography

    own = Path(".bakeoff/signing/key.pem")
    if key is None:
        return {fingerprint(own): "this workspace's own key"} if own.is_file() else {}
    try:
        return {fingerprint(key): f"the key {key}"}
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{key} is no public key in PEM: {error}") from None


def _data_files(pattern: str) -> list[Path]:
    """Files below data/, without those that a killed stage was writing."""
    return sorted(path for path in DATA_DIR.glob(pattern) if not any(part.startswith(".") for part in path.parts))


def _is_within(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


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
