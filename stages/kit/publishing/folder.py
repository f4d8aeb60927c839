"""A published folder: write it, and send it to the hub."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token

from stages.core.errors import UserError, bytes_text, is_disk_full, listed, pluralize
from stages.core.lineage import LINEAGE_FILE, Lineage, digested_files, file_digests
from stages.core.provenance import Provenance
from stages.core.records import publish_text, published
from stages.kit.publishing.card import Publication, write_card
from stages.kit.publishing.check import (
    CARD_FILE,
    CERTIFICATE,
    LINEAGE,
    MAKERS,
    METRICS,
    PLAN,
    TRAINED_DIR,
    check_published,
)
from stages.kit.publishing.signing import STATEMENT_FILE, UNSIGNED, sign, signing_key, statement
from stages.kit.reporting.runs import EXAMPLES_DIR

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

log = logging.getLogger("stages")


def write_folder(publication: Publication, run_dir: Path, published_dir: Path, *, key_dir: Path) -> None:
    """Copy a run's model and evidence, and write its card, statement and signature.

    Raises UserError if the files and the records of the run do not agree.
    """
    run, merged_dir = publication.run.name, run_dir / "merged"
    copies = {
        **{path: path.name for path in digested_files(merged_dir)},
        **(_below(run_dir / TRAINED_DIR, TRAINED_DIR) if publication.adapter else {}),
        **_below(run_dir / EXAMPLES_DIR, EXAMPLES_DIR),
        **{run_dir / Path(name).name: name for name in (CERTIFICATE, PLAN, METRICS)},
        merged_dir / LINEAGE_FILE: LINEAGE,
    }
    with published(published_dir) as folder:
        for source, name in copies.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
        write_card(publication, folder)
        digests = file_digests(folder / name for name in (*copies.values(), CARD_FILE))
        files = {path.relative_to(folder).as_posix(): found for path, found in digests.items()}
        content = statement(files, [asdict(record) for record in publication.records])
        publish_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", folder / STATEMENT_FILE)
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
    made = [f"{MAKERS[each.kind]}@{each.name}" for each in model.tree() if each.kind in MAKERS]
    records = [Provenance.read(records_dir / f"{stage}.json") for stage in dict.fromkeys((*made, evaluation))]
    return tuple(sorted(records, key=lambda record: record.ended))


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
