"""Sends a published folder to the hub: as one commit in a new, private repository, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token

from stages.core.errors import UserError, listed, means_full_disk
from stages.kit.publishing.card import CARD_FILE
from stages.kit.publishing.check import check_published
from stages.kit.publishing.signature import UNSIGNED

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

log = logging.getLogger("stages")


def upload(folder: Path, repo_id: str) -> str:
    """The address of the new repository.

    Raises UserError, and leaves nothing on the hub, where the folder is not as it was signed, a licence is not known,
    the hub refuses the token, the card or the name, or the connection fails.
    """
    require_publishable(folder)
    api = HfApi()
    # In the order of what can be refused before anything is made.
    if get_token() is None:
        raise UserError("there is no token; set HF_TOKEN to one that may write")
    with explained("could not sign in to the hub"):
        user = api.whoami()["name"]
    with explained("the hub refuses the model card"):
        try:
            ModelCard.load(folder / CARD_FILE).validate()
        except ValueError as error:  # which has the whole answer as its text; the one that it came of has the message
            raise error.__context__ or error from None
    log.info("sending %s to %s as %s", folder, repo_id, user)
    with explained(f"the repository {repo_id} could not be made"):
        url = api.create_repo(repo_id, private=True)
    try:
        with explained(f"{folder} could not be sent"):
            # Not upload_folder: that commits in several steps.
            api.create_commit(repo_id, files_of(folder), commit_message=f"Publish {folder.name}")
    except BaseException:
        remove(api, repo_id)
        raise
    return str(url)


def require_publishable(folder: Path) -> None:
    """Raises UserError where there is no published folder, it was changed, or its card has no licence."""
    again = f"make publish RUN={folder.name}"
    if not folder.is_dir():
        raise UserError(f"{folder} is not there; write it with: {again}")
    if problems := check_published(folder).problems:
        raise UserError(f"{folder} is not as it was signed; write it anew with: {again}\n{listed(problems)}")
    if ModelCard.load(folder / CARD_FILE).data.license is None:
        raise UserError(
            f"the licence of what {folder.name} was made from is not known, or its bases have several; write it into "
            f"`licenses` of params.yaml ({folder / CARD_FILE} names each source), then: {again}"
        )


def files_of(folder: Path) -> list[CommitOperationAdd]:
    """What was signed, and the signature."""
    left_out = set(UNSIGNED) - {"model.sig"}
    return [
        CommitOperationAdd(path.relative_to(folder).as_posix(), path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in left_out
    ]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Failures of the hub, and of the way to it, as UserError."""
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
    # RuntimeError: what the client makes of anything that happens while it sends a large file.
    except (HTTPError, OSError, RuntimeError) as error:
        if means_full_disk(error):
            raise
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        answered = next((each for each in chain if isinstance(each, HfHubHTTPError)), None)
        said = _answer(answered) if answered is not None else f"the connection failed: {chain[-1]!r}"
        raise UserError(f"{what}: {said}. Nothing was published") from error


def remove(api: HfApi, repo_id: str) -> None:
    """Remove the repository that was just made; where that fails too, say what is left."""
    try:
        with explained(repo_id):
            api.delete_repo(repo_id, missing_ok=True)
    except UserError:
        log.warning("%s/%s was made, is private, and could not be removed again: do that there", api.endpoint, repo_id)


def _answer(error: HfHubHTTPError) -> str:
    meaning = {
        401: "the token is not known there, so set HF_TOKEN to one that may write",
        403: "the token may not write there",
        409: "it exists already, so choose another name",
    }
    status = error.response.status_code
    said = (error.server_message or str(error)).strip().partition("\n")[0].rstrip(".")
    return f"{meaning[status]} ({said})" if status in meaning else said
