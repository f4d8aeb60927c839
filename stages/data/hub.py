"""Repositories of the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stages.core.errors import UserError, pluralize


def fetch_snapshot(
    repo_type: Literal["model", "dataset"], repo_id: str, revision: str, *, patterns: Sequence[str]
) -> tuple[Path, str]:
    """Download the files of a hub repository that match `patterns`, or find them in the local cache.

    revision: a full commit, the first 7 or more hex digits of one, or a branch or tag.
    Returns the folder and the full commit it holds. Only a full commit can be found in the cache without a network.
    Raises UserError if the repository or the revision does not exist, or the hub cannot be reached.
    """
    # Slow to import, and needed for this source only.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        commit = _full_commit(repo_type, repo_id, revision)
        folder = snapshot_download(repo_id, repo_type=repo_type, revision=commit, allow_patterns=list(patterns))
    # OSError: no such repository, not in the cache, offline mode. HTTPError: no connection, whatever library makes it.
    except (OSError, HTTPError, HFValidationError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"could not fetch the {repo_type} {repo_id}@{revision} from the hub: {reason.strip().rstrip('.')}. "
            "Check the name, the revision and the network (HF_HUB_OFFLINE must be unset), "
            "or use a copy on disk with folder:PATH"
        ) from error
    return Path(folder), commit


def _full_commit(repo_type: str, repo_id: str, revision: str) -> str:
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi

    if not re.fullmatch("[0-9a-f]{7,39}", revision):
        commit = HfApi().repo_info(repo_id, revision=revision, repo_type=repo_type).sha
        assert commit is not None, f"the hub gave no commit for {repo_id}@{revision}"
        return commit
    # The hub resolves branches and full commits only.
    commits = [commit.commit_id for commit in HfApi().list_repo_commits(repo_id, repo_type=repo_type)]
    matching = [commit for commit in commits if commit.startswith(revision)]
    if len(matching) != 1:
        count = pluralize(len(matching), "commit")
        raise UserError(
            f"{count} of {repo_id} on the hub start with {revision}, expected one; the newest is {commits[0]}"
        )
    return matching[0]
