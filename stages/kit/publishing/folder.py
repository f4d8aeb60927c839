"""A published folder: write it, check it against itself, and send it to the hub.

The check needs neither DVC nor the workspace that the folder comes from, so that it checks a copy or a download too.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token
from yaml import YAMLError

from stages.core.errors import UserError, bytes_text, is_disk_full, listed, pluralize
from stages.core.lineage import (
    LINEAGE_FILE,
    Lineage,
    combined_digest,
    digested_files,
    file_digest,
    file_digests,
    read_lineage,
    short,
)
from stages.core.provenance import Provenance
from stages.core.records import published
from stages.kit.models.certificate import MergeCertificate
from stages.kit.publishing.card import CARD_FILE, Publication, lineage_tree, write_card
from stages.kit.publishing.signing import (
    KEY_FILE,
    STATEMENT_FILE,
    UNSIGNED,
    Problem,
    PublishedFile,
    Statement,
    fingerprint,
    read_statement,
    sign,
    signature_problems,
    signing_key,
    write_statement,
)
from stages.kit.reporting.runs import EXAMPLES_DIR, MODEL_LINEAGE_FILE

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

log = logging.getLogger("stages")

EVIDENCE_DIR = "evidence"
MAKERS = {"trained": "train", "merged": "merge"}
"""The stage that makes a model folder, by the kind of its lineage."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    problems: tuple[str, ...]
    """A line for each file: its name, and the problems with it."""
    key: str
    """Fingerprint of the key that signed; "" if it cannot be read."""
    model: Lineage | None
    records: tuple[Provenance, ...]
    """Records of the stages that made the model, in the order in which they ended."""


def write_folder(publication: Publication, run_dir: Path, published_dir: Path, *, key_dir: Path) -> None:
    """Copy a run's model and evidence, and write its card, statement and signature.

    Raises UserError if the files and the records of the run do not agree.
    """
    run, merged_dir = publication.run.name, run_dir / "merged"
    copies = {
        **{path: path.name for path in digested_files(merged_dir)},
        **(_below(run_dir / "trained", "trained") if publication.adapter else {}),
        **_below(run_dir / EXAMPLES_DIR, EXAMPLES_DIR),
        **{run_dir / name: f"{EVIDENCE_DIR}/{name}" for name in ("merge.json", "plan.yaml", "metrics.json")},
        merged_dir / LINEAGE_FILE: f"{EVIDENCE_DIR}/{MODEL_LINEAGE_FILE}",
    }
    with published(published_dir) as folder:
        for source, name in copies.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        digests = file_digests(folder / name for name in copies.values())
        files = [
            PublishedFile(name=name, source=source.as_posix(), sha256=digests[folder / name])
            for source, name in copies.items()
        ]
        write_statement(folder, Statement(files=tuple(files), records=publication.records))
        write_card(publication, folder)
        sign(folder, signing_key(key_dir))
        checked = check_published(folder)
        if checked.problems:
            raise UserError(
                f"{run} cannot be published, as its files and records do not agree:\n{listed(checked.problems)}\n"
                f"run dvc repro evaluate@{run}; if nothing is out of date there, make verify says what to run again"
            )
    sizes = [path.stat().st_size for path in published_dir.rglob("*") if path.is_file()]
    size = f"{pluralize(len(sizes), 'file')}, {bytes_text(sum(sizes))}"
    log.info("%s: %s, signed by the key %s", published_dir, size, checked.key)


def records_of(model: Lineage, evaluation: str, records_dir: Path) -> tuple[Provenance, ...]:
    """The records of all stages that trained and merged what the model comes from, and of its evaluation."""
    made = [f"{MAKERS[each.kind]}@{each.name}" for each in lineage_tree(model) if each.kind in MAKERS]
    records = [Provenance.read(records_dir / f"{stage}.json") for stage in dict.fromkeys((*made, evaluation))]
    return tuple(sorted(records, key=lambda record: record.ended))


def check_published(folder: Path, public_key: Path | None = None) -> Checked:
    """Compare the signature, digests, statement, certificate and card of a published folder with each other.

    public_key: of the publisher, from elsewhere; by default the one in the folder, which proves that nothing was
    changed by accident, and not who signed.
    """
    key = public_key or folder / KEY_FILE
    problems = list(signature_problems(folder, key))
    model: Lineage | None = None
    records: tuple[Provenance, ...] = ()
    try:
        model = read_lineage(folder / EVIDENCE_DIR, name=MODEL_LINEAGE_FILE)
        problems += _evidence_problems(model, folder)
    except UserError:
        problems.append((f"{EVIDENCE_DIR}/{MODEL_LINEAGE_FILE}", "cannot be read"))
    try:
        statement = read_statement(folder)
        records = statement.records
        problems += _file_problems(statement, folder)
    except ValueError as error:
        problems.append((STATEMENT_FILE, f"is no statement of stages: {error}"))
    else:
        if model is not None:
            problems += _chain_problems(model, {record.stage: record for record in records})
    by_file: dict[str, list[str]] = {}
    for file, problem in problems:
        by_file.setdefault(file, []).append(problem)
    return Checked(
        problems=tuple(f"{file}: {'; '.join(dict.fromkeys(found))}" for file, found in by_file.items()),
        key=fingerprint(key) if key.is_file() else "",
        model=model,
        records=records,
    )


def _file_problems(statement: Statement, folder: Path) -> Iterator[Problem]:
    """Files that differ from the statement, and outputs whose files are not those that their stage left."""
    found = {}
    for file in statement.files:
        path = folder / file.name
        if not path.is_file():
            yield file.name, f"is missing, although {STATEMENT_FILE} has it"
        elif (digest := file_digest(path)) != file.sha256:
            yield file.name, f"has content {short(digest)}, but {STATEMENT_FILE} says {short(file.sha256)}"
        else:
            found[file.source] = digest
    if len(found) < len(statement.files):
        return
    for record in statement.records:
        for output, digest in record.outputs.items():
            inside = {
                source.removeprefix(f"{output}/"): content
                for source, content in found.items()
                if source.startswith(f"{output}/") and not source.endswith(f"/{LINEAGE_FILE}")
            }
            if found.get(output, digest) != digest or (inside and combined_digest(inside) != digest):
                yield STATEMENT_FILE, f"has files of {output} that are not those that {record.stage} left"


def _chain_problems(model: Lineage, by_stage: Mapping[str, Provenance]) -> Iterator[Problem]:
    """Every model of the lineage was made by its stage, from the parents in the lineage, and the last evaluated."""
    for each in lineage_tree(model):
        if each.kind not in MAKERS:
            continue
        stage = f"{MAKERS[each.kind]}@{each.name}"
        if stage not in by_stage:
            yield STATEMENT_FILE, f"has no record of {stage}, which made the {each.kind} {each.name}"
            continue
        record = by_stage[stage]
        if each.digest not in record.outputs.values():
            yield STATEMENT_FILE, f"{stage} made nothing with content {short(each.digest)}, which the lineage has"
        for role, parent in each.parents.items():
            if parent.lineage.digest not in record.inputs.values():
                digest = short(parent.lineage.digest)
                yield STATEMENT_FILE, f"{stage} read nothing with content {digest}, the {role} by the lineage"
    evaluation = by_stage.get(f"evaluate@{model.name}")
    if evaluation is None:
        yield STATEMENT_FILE, f"has no record of evaluate@{model.name}"
    elif model.digest not in evaluation.inputs.values():
        yield (
            STATEMENT_FILE,
            f"evaluate@{model.name} read another model than the one with content {short(model.digest)}",
        )


def _evidence_problems(model: Lineage, folder: Path) -> Iterator[Problem]:
    """Problems of the certificate, and of the card's figures."""
    try:
        certificate = MergeCertificate.read(folder / EVIDENCE_DIR / "merge.json")
        if certificate.merged_digest != model.digest or certificate.problems():
            yield f"{EVIDENCE_DIR}/merge.json", f"does not certify the model with content {short(model.digest)}"
    except UserError:
        yield f"{EVIDENCE_DIR}/merge.json", "is no certificate"
    try:
        metrics = json.loads((folder / EVIDENCE_DIR / "metrics.json").read_text(encoding="utf-8"))
        for result in ModelCard.load(folder / CARD_FILE).data.eval_results or []:
            if metrics[result.metric_type] != result.metric_value:
                yield CARD_FILE, f"says {result.metric_type} {result.metric_value}, metrics.json another figure"
    except (OSError, ValueError, LookupError, TypeError, YAMLError) as error:
        yield CARD_FILE, f"its figures cannot be compared with {EVIDENCE_DIR}/metrics.json: {type(error).__name__}"


def upload(folder: Path, repo_id: str) -> str:
    """Send a published folder to the hub, as one commit in a new, private repository; returns its address.

    Raises UserError, and leaves nothing on the hub, if the folder is not as it was signed, a licence is not known, the
    hub refuses the token, the card or the name, or the connection fails.
    """
    _require_publishable(folder)
    api = HfApi()
    # In the order of what can be refused before anything is made.
    if get_token() is None:
        raise UserError("there is no token; set HF_TOKEN to one that may write")
    with _explained("could not sign in to the hub"):
        user = api.whoami()["name"]
    with _explained("the hub refuses the model card"):
        try:
            ModelCard.load(folder / CARD_FILE).validate()
        except ValueError as error:  # its text is the whole response; its cause has the message
            raise error.__context__ or error from None
    log.info("sending %s to %s as %s", folder, repo_id, user)
    with _explained(f"the repository {repo_id} could not be made"):
        url = api.create_repo(repo_id, private=True)
    try:
        with _explained(f"{folder} could not be sent"):
            left_out = set(UNSIGNED) - {"model.sig"}
            operations = [
                CommitOperationAdd(path.relative_to(folder).as_posix(), path)
                for path in sorted(folder.rglob("*"))
                if path.is_file() and path.relative_to(folder).parts[0] not in left_out
            ]
            # upload_folder would commit in several steps.
            api.create_commit(repo_id, operations, commit_message=f"Publish {folder.name}")
    except BaseException:
        try:
            with _explained(repo_id):
                api.delete_repo(repo_id, missing_ok=True)
        except UserError:
            log.warning("%s/%s was made, is private, and could not be removed: do that there", api.endpoint, repo_id)
        raise
    return str(url)


def _require_publishable(folder: Path) -> None:
    """Raise UserError if there is no published folder, it was changed, or its card has no licence."""
    again = f"make publish RUN={folder.name}"
    if not folder.is_dir():
        raise UserError(f"there is no {folder}; write it with: {again}")
    if problems := check_published(folder).problems:
        raise UserError(f"{folder} is not as it was signed; write it again with: {again}\n{listed(problems)}")
    if ModelCard.load(folder / CARD_FILE).data.license is None:
        raise UserError(
            f"the licence of what {folder.name} was made from is not known, or its bases have several; write it into "
            f"`licenses` of params.yaml ({folder / CARD_FILE} names each source), then: {again}"
        )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise failures of the hub and of the connection as UserError."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(f"{what}: HF_HUB_OFFLINE is set; unset it") from None
    except HFValidationError as error:
        raise UserError(f"{what}: {error}") from None
    # The client raises RuntimeError for anything that happens while it sends a large file.
    except (HTTPError, OSError, RuntimeError) as error:
        if is_disk_full(error):
            raise
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        refusal = next((each for each in chain if isinstance(each, HfHubHTTPError)), None)
        reason = _refusal_words(refusal) if refusal is not None else f"the connection failed: {chain[-1]!r}"
        raise UserError(f"{what}: {reason}. Nothing was published") from error


def _refusal_words(error: HfHubHTTPError) -> str:
    meaning = {
        401: "the token is not known there, so set HF_TOKEN to one that may write",
        403: "the token may not write there",
        409: "it exists already, so choose another name",
    }
    status = error.response.status_code
    message = (error.server_message or str(error)).strip().partition("\n")[0].rstrip(".")
    return f"{meaning[status]} ({message})" if status in meaning else message


def _below(folder: Path, name: str) -> dict[Path, str]:
    """The files below a folder, each with its path in the published folder."""
    return {path: f"{name}/{path.relative_to(folder).as_posix()}" for path in digested_files(folder)}
