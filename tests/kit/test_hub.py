"""The hub's client is replaced at the two calls that go out; nothing here touches a network."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from stages.kit.errors import UserError
from stages.kit.hub import fetch_snapshot

FIRST, SECOND = "0123456" + "a" * 33, "0123456" + "b" * 33


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, object]]:
    """What snapshot_download is called with; the repository has two commits."""
    calls: list[dict[str, object]] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(tmp_path)

    commits = [SimpleNamespace(commit_id=FIRST), SimpleNamespace(commit_id=SECOND)]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_commits", lambda self, repo, repo_type: commits)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "repo_info",
        lambda self, repo, revision, repo_type: SimpleNamespace(sha=SECOND),
    )
    return calls


@pytest.mark.parametrize(("given", "commit"), [(FIRST, FIRST), (SECOND[:9], SECOND), ("main", SECOND)])
def test_revision_is_resolved_to_the_full_commit(
    asked: list[dict[str, object]], tmp_path: Path, given: str, commit: str
) -> None:
    assert fetch_snapshot("dataset", "owner/name", given, patterns=["data/*"]) == (tmp_path, commit)
    assert asked == [
        {
            "repo_id": "owner/name",
            "repo_type": "dataset",
            "revision": commit,
            "allow_patterns": ["data/*"],
        }
    ]


@pytest.mark.parametrize(("given", "count"), [("0123456", "2 commits"), ("fffffff", "no commit")])
def test_short_commit_must_name_exactly_one(asked: list[dict[str, object]], given: str, count: str) -> None:
    with pytest.raises(UserError, match=f"{count} of the dataset owner/name on the hub start with {given}"):
        fetch_snapshot("dataset", "owner/name", given, patterns=["data/*"])
    assert not asked


def test_no_connection_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    http_library = huggingface_hub.errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0]
    connect_error = pytest.importorskip(http_library).ConnectError("name or service not known")

    def unreachable(repo_id: str, **options: object) -> str:
        raise connect_error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"owner/name@0123.*name or service not known.*folder:PATH"):
        fetch_snapshot("dataset", "owner/name", FIRST, patterns=["data/*"])
