"""Check that the outputs are what the pipeline made, or that a stage comes out the same when it runs again.

Reads   every byte of the outputs in data/; dvc.lock, lineages
Writes  nothing
Run     make verify
        make verify RERUN=train@r1-llm-only
        make verify RERUN=train@r1-llm-only STEPS=3 KEEP=1     its first steps; equal, DVC keeps the training
        make verify RERUN=evaluate@r1-llm-only SAMPLES=8 KEEP=1
        make verify PUBLISHED=FOLDER KEY=publisher.pem    a published folder, wherever it is

Prints each damaged path with the command that fixes it, and exits with 1; exits with 0 if nothing is damaged.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import click
import psutil
from cryptography.exceptions import UnsupportedAlgorithm

from stages.core.errors import UserError, join_truncated, pluralize
from stages.core.given_files import read_plain
from stages.core.lineage import LINEAGE_FILE, Lineage, lineage_lines, short, verified_lineage
from stages.core.records import rebuild
from stages.core.signals import handling, interrupt
from stages.launcher.pipeline import DeclaredStage, cache_dir, declared_stages
from tools.verify.beginning import rerun_samples, rerun_steps
from tools.verify.rerun import rerun

DATA_DIR = Path("data")
UNKNOWN_KEY = 3
"""Exit code for an intact published folder that is signed by a key that nobody named."""


@click.command(help=__doc__)
@click.option("--rerun", "stage", help="Run this stage again, in a folder of its own, and compare: train@r1-llm-only.")
@click.option("--steps", type=click.IntRange(min=1), help="Of a training, only this many steps.")
@click.option("--samples", type=click.IntRange(min=1), help="Of an evaluation, only this many samples.")
@click.option("--keep", is_flag=True, help="If steps or samples come out the same: dvc commit the stage's outputs.")
@click.option("--published", "folder", type=click.Path(path_type=Path), help="Check only this published folder.")
@click.option("--key", type=click.Path(path_type=Path), help="Public key of its publisher; default: the folder's own.")
def main(
    stage: str | None, steps: int | None, samples: int | None, keep: bool, folder: Path | None, key: Path | None
) -> None:
    if (steps or samples or keep) and (stage is None or (steps is None) == (samples is None)):
        raise click.UsageError("--rerun takes --steps or --samples; --keep goes with one of them")
    if (stage is not None and folder is not None) or (key is not None and folder is None):
        raise click.UsageError("give --rerun, or --published with or without --key, or nothing")
    if folder is not None:
        sys.exit(report_published(folder, key))
    if not Path("dvc.yaml").exists():
        raise UserError("there is no dvc.yaml here; run from the top of the repository")
    if stage is None:
        sys.exit(verify())
    if steps is not None:
        sys.exit(rerun_steps(Path.cwd(), stage, steps, keep=keep))
    sys.exit(rerun(Path.cwd(), stage) if samples is None else rerun_samples(Path.cwd(), stage, samples, keep=keep))


class Findings:
    """The outputs that are not as the pipeline made them, each with its problems and the command that fixes them."""

    def __init__(self, stages: Iterable[DeclaredStage]) -> None:
        self.makers = {out: stage for stage in stages for out in stage.outs}
        """The stage that writes an output, in the order of the pipeline."""
        self._problems: dict[str, list[str]] = {}
        self._objects: dict[str, list[str]] = {}

    def add(self, path: Path | str, problem: str) -> None:
        """Add a problem to the output that a path belongs to."""
        self._problems.setdefault(self.output_of(path) or str(path), []).append(problem)

    def add_object(self, output: str, path: Path) -> None:
        """Add an object of DVC's cache that is one file with a damaged file of an output: DVC would bring it back."""
        self._objects.setdefault(output, []).append(str(path))

    def output_of(self, path: Path | str) -> str | None:
        return next((out for out in self.makers if Path(path).is_relative_to(out)), None)

    def __contains__(self, path: Path | str) -> bool:
        return (self.output_of(path) or str(path)) in self._problems

    def lines(self) -> Iterator[str]:
        """A paragraph for each output, in the order in which they are to be fixed."""
        order = list(self.makers)
        for path in sorted(self._problems, key=lambda path: order.index(path) if path in order else -1):
            maker, place = self.makers.get(path), shlex.quote(path)
            removed = shlex.join([path, *self._objects.get(path, ())])
            rest = f" && dvc checkout {place} || {rebuild(maker.name)}" if maker else "  # no stage makes it"
            problems = (f"  {problem}" for problem in dict.fromkeys(self._problems[path]))
            yield "\n".join([*map(_one_line, (path, *problems, f"  fix it with: rm -rf {removed}{rest}")), ""])


def verify() -> int:
    """Check the workspace and print the findings; returns the exit code.

    Raises UserError if dvc.yaml or dvc.lock cannot be read, or while DVC runs stages here.
    """
    _refuse_beside_dvc()
    started, findings = time.monotonic(), Findings(declared_stages(Path.cwd()))
    absent = check_outputs(findings) if Path("dvc.lock").exists() else 0
    models = check_lineages(findings)
    lines = list(findings.lines())
    for line in lines:
        click.echo(line)
    if absent:
        click.echo(f"not checked, as they are not here: {pluralize(absent, 'output')} of dvc.lock")
    present = sum(Path(output).exists() for output in findings.makers)
    checked = (
        f"{pluralize(present, 'output')}, {pluralize(models, 'model folder')} in {time.monotonic() - started:.1f} s"
    )
    if lines:
        paths = pluralize(len(lines), "path")
        click.echo(f"NOT AS RECORDED: {paths}; fix them from the top, then run make verify again. {checked}")
        return 1
    click.echo(
        f"OK: all outputs match dvc.lock and their lineages. {checked}"
        if present
        else "nothing to verify: no output of dvc.lock is here"
    )
    return 0


def check_outputs(findings: Findings) -> int:
    """Compare every byte of the outputs with dvc.lock; returns the number of outputs that are not here."""
    changes = dvc_changes()
    absent = {path for path, change in changes if change == "deleted" and path in findings.makers}
    changed: dict[str, list[str]] = {}
    for path, _ in changes:
        if (output := findings.output_of(path)) and output not in absent:
            changed.setdefault(output, []).append(path.removeprefix(output).lstrip("/"))
    cache = cache_dir(Path.cwd())
    objects = {_inode(path): path for path in cache.glob("??/*")} if changed else {}
    for output, names in changed.items():
        intact = []
        for file in filter(Path.is_file, (Path(output, name) for name in names)):
            own_object = _object(cache, file)
            linked = objects.get(_inode(file), own_object)
            intact.append(linked == own_object and own_object.exists())
            if linked != own_object:
                findings.add_object(output, Path(os.path.relpath(linked)))
        files = join_truncated([name for name in names if name])
        findings.add(output, f"differs from dvc.lock{f' in {files}' if files else ''}")
        if intact and all(intact):
            findings.add(output, "is another result that DVC has, such as another branch's")
    return len(absent)


def dvc_changes() -> list[tuple[str, str]]:
    """(path, change) of everything that is not as dvc.lock says: modified, added, renamed or deleted.

    DVC does not read a file again if it knows its time and size; with an empty database it knows none. Its code runs in
    this process, so that no child of it outlives a signal.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    # Signals that ask to end raise KeyboardInterrupt, as Ctrl-C does, so that the database is removed.
    with handling(interrupt), TemporaryDirectory() as empty:
        try:
            with patch.dict(os.environ, DVC_SITE_CACHE_DIR=empty), Repo() as repo:
                status = repo.data_status(granular=True)["uncommitted"]
        except DvcException as error:
            raise UserError(
                f"DVC cannot compare the outputs: {error}\n"
                "  if dvc.lock is damaged, fix it with: git checkout HEAD -- dvc.lock || rm dvc.lock"
            ) from None
    status.pop("unknown", None)  # files of a folder without its listing in the cache
    paths = [(path["new"] if isinstance(path, dict) else path, change) for change in status for path in status[change]]
    return [(path.rstrip("/"), change) for path, change in paths]


def check_lineages(findings: Findings) -> int:
    """Compare each model folder with its lineage, and with the folders that it was made from; returns their number."""
    lineages: dict[Path, Lineage] = {}
    for path in sorted(DATA_DIR.rglob(LINEAGE_FILE)):
        if any(part.startswith(".") for part in path.parts):  # a killed stage was writing it
            continue
        try:
            lineages[path.parent] = verified_lineage(path.parent, fix="")
        except UserError as error:
            findings.add(path.parent, error.message.partition("; rebuild it with")[0])
    for folder, lineage in lineages.items():
        for role, parent in lineage.parents.items():
            parent_dir = Path(os.path.normpath(folder / parent.path))
            now, was = lineages.get(parent_dir), parent.lineage
            if not (parent_dir / LINEAGE_FILE).exists():
                findings.add(parent_dir, f"is missing, although it is the {role} of {folder}")
            elif now is not None and now != was and parent_dir not in findings:
                other = f"content {short(now.digest)}" if now.digest != was.digest else "another lineage"
                findings.add(folder, f"its {role} {parent_dir} had content {short(was.digest)}, and now has {other}")
    return len(lineages)


def report_published(folder: Path, key: Path | None) -> int:
    """Check a published folder, and print how it was made. Returns the exit code: 1 for a folder that is not as it was
    signed, UNKNOWN_KEY for one that anybody could have signed."""
    from stages.publishing.check import check_published  # imports the families of models

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    named = _named_key(key, folder)
    try:
        checked = check_published(folder, key)
    except Exception as error:  # noqa: BLE001  # a damaged folder makes libraries raise anything
        why = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        click.echo(f"DAMAGED: {_one_line(f'{folder}: {why}'[:2000])}; download it again")
        return 1
    stages = (f"{each.stage}, {each.ended}, commit {each.commit or 'not known'}" for each in checked.records)
    for line in (*stages, *lineage_lines(checked.model)):
        click.echo(_one_line(line))
    if checked.key not in named:
        click.echo(
            f"signed by a key you have not named: {checked.key}\n"
            "established: the files are those that this key signed, and no others\n"
            "not established: who signed. Whoever changes such a folder can sign it again with a key of their own; get "
            f"the publisher's from elsewhere, then: make verify PUBLISHED={shlex.quote(str(folder))} KEY=publisher.pem"
        )
        return UNKNOWN_KEY
    click.echo(
        f"OK: the files are those that this key signed, and no others. Signed by {named[checked.key]}: {checked.key}"
    )
    return 0


def _named_key(key: Path | None, folder: Path) -> dict[str, str]:
    """In words, by its fingerprint: the key that a person named, or else the one that this workspace signs with."""
    from stages.publishing.signing import fingerprint  # imports cryptography

    own = Path(".bakeoff/signing/key.pem")
    if key is None and not os.access(own, os.R_OK):  # there is none, or it is another account's
        return {}
    path, words = (own, "this workspace's own key") if key is None else (key, f"the key {key}")
    if key is not None and key.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{key} came with the folder, and whoever changed that can have changed the key; name another")
    try:
        if key is not None and b"PRIVATE KEY" in read_plain(key):
            raise UserError(f"{key} is a private key, which a check needs not; name the public key of its owner")
        return {fingerprint(path): words}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name the publisher's public key, in PEM") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is no key in PEM: {error}") from None


def _inode(path: Path) -> tuple[int, int]:
    """The file behind a path: DVC makes an output and its object in the cache hard links of one."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _object(cache: Path, path: Path) -> Path:
    """The place of a file's content in DVC's cache, which is its MD5."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "md5").hexdigest()
    return cache / digest[:2] / digest[2:]


def _one_line(text: str) -> str:
    """Names of files and records may be made to look like a verdict."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


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
