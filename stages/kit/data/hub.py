"""Models and datasets from the Hugging Face hub, always at one full commit."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stages.core.errors import UserError

_FULL_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")

RETRY_AFTER_S = 5.0

RepoType = Literal["model", "dataset"]

log = logging.getLogger("stages")


def fetch_snapshot(repo_type: RepoType, repo_id: str, revision: str, *, patterns: Sequence[str]) -> tuple[Path, str]:
    """Download the files of a repository that match `patterns`, or find them in the local cache.

    revision: a full commit, the first 7 or more hex digits of one, or a branch or tag.
    Returns the folder and the full commit it holds. Only a full commit can be found in the cache without a network.
    Where the connection fails, or the hub itself does, this tries once more; what has arrived is not fetched again.
    Raises UserError where the repository or the revision does not exist, or the hub cannot be reached.
    """
    # Slow to import, and needed for this source only.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    # OSError: no such repository, not in the cache, offline mode. HTTPError: no connection, whatever library makes it.
    failures = (OSError, HTTPError, HFValidationError)

    def fetch() -> tuple[Path, str]:
        commit = _full_commit(repo_type, repo_id, revision)
        folder = snapshot_download(repo_id, repo_type=repo_type, revision=commit, allow_patterns=list(patterns))
        return Path(folder), commit

    try:
        try:
            return fetch()
        except failures as error:
            if not _may_pass(error):
                raise
            log.warning("%s@%s: %s; trying once more in %.0f s", repo_id, revision, _reason(error), RETRY_AFTER_S)
        time.sleep(RETRY_AFTER_S)
        return fetch()
    except failures as error:
        raise UserError(
            f"could not fetch the {repo_type} {repo_id}@{revision} from the hub: {_reason(error)}. "
            "Check the name, the revision and the network (HF_HUB_OFFLINE must be unset), "
            "or use a copy on disk with folder:PATH"
        ) from error


def _reason(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return first.strip().rstrip(".")


def _may_pass(error: BaseException) -> bool:
    """Whether a failure, or what it came of, is the network's or the hub's own, and not that of what was asked for."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(each, OfflineModeIsEnabled) for each in chain):
        return False
    statuses = [each.response.status_code for each in chain if isinstance(each, HfHubHTTPError)]
    if any(400 <= status < 500 and status not in (408, 429) for status in statuses):
        return False
    return any(isinstance(each, HTTPError | ConnectionError | TimeoutError) for each in chain)


def _full_commit(repo_type: RepoType, repo_id: str, revision: str) -> str:
    if _FULL_COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    if not _SHORT_COMMIT.fullmatch(revision):
        commit = HfApi().repo_info(repo_id, revision=revision, repo_type=repo_type).sha
        assert commit is not None, f"the hub gave no commit for {repo_id}@{revision}"
        return commit
    # The hub resolves branches and full commits only.
    commits = [commit.commit_id for commit in HfApi().list_repo_commits(repo_id, repo_type=repo_type)]
    matching = [commit for commit in commits if commit.startswith(revision)]
    if len(matching) != 1:
        count = "no commit" if not matching else f"{len(matching)} commits"
        raise UserError(
            f"{count} of the {repo_type} {repo_id} on the hub start with {revision}, expected exactly one; "
            f"its newest is {commits[0] if commits else 'missing'}"
        )
    return matching[0]
