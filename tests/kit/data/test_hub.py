"""The hub's client is replaced at the calls that go out; nothing here touches a network."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from stages.core.errors import UserError
from stages.kit.data.hub import fetch_snapshot

FIRST, SECOND = "0123456" + "a" * 33, "0123456" + "b" * 33
HTTP = pytest.importorskip(errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


@dataclass
class Hub:
    """A repository of two commits, and how it was asked for."""

    folder: Path
    failures: list[Exception] = field(default_factory=list)
    """One a download, until none is left."""
    calls: list[dict[str, object]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    def snapshot_download(self, repo_id: str, **options: object) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        if self.failures:
            raise self.failures.pop(0)
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub = Hub(tmp_path)
    commits = [SimpleNamespace(commit_id=FIRST), SimpleNamespace(commit_id=SECOND)]
    newest = SimpleNamespace(sha=SECOND)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_commits", lambda self, repo, repo_type: commits)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda self, repo, revision, repo_type: newest)
    monkeypatch.setattr("stages.kit.data.hub.time.sleep", hub.waits_s.append)
    return hub


@pytest.mark.parametrize(("given", "commit"), [(FIRST, FIRST), (SECOND[:9], SECOND), ("main", SECOND)])
def test_revision_is_resolved_to_the_full_commit(hub: Hub, given: str, commit: str) -> None:
    assert fetch_snapshot("dataset", "owner/name", given, patterns=["data/*"]) == (hub.folder, commit)
    asked = {"repo_id": "owner/name", "repo_type": "dataset", "revision": commit, "allow_patterns": ["data/*"]}
    assert hub.calls == [asked]


@pytest.mark.parametrize(("given", "count"), [("0123456", "2 commits"), ("fffffff", "no commit")])
def test_short_commit_must_name_exactly_one(hub: Hub, given: str, count: str) -> None:
    with pytest.raises(UserError, match=f"{count} of the dataset owner/name on the hub start with {given}"):
        fetch_snapshot("dataset", "owner/name", given, patterns=["data/*"])
    assert not hub.calls


def http_error(status: int) -> Exception:
    response = HTTP.Response(status, request=HTTP.Request("GET", "https://hub"))
    return errors.HfHubHTTPError(f"status {status}", response=response)


def not_in_the_cache(cause: Exception) -> Exception:
    """What snapshot_download makes of a failure."""
    error = errors.LocalEntryNotFoundError("not in the cache")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (http_error(503), 2),
        (http_error(429), 2),
        (not_in_the_cache(http_error(502)), 2),
        (HTTP.ConnectError("name or service not known"), 2),
        (ConnectionResetError("reset by peer"), 2),
        (http_error(404), 1),
        (not_in_the_cache(http_error(401)), 1),
        (not_in_the_cache(errors.OfflineModeIsEnabled("offline")), 1),
        (OSError(28, "No space left on device"), 1),
    ],
)
def test_a_failure_that_may_pass_is_tried_once_more(hub: Hub, error: Exception, tries: int) -> None:
    hub.failures = [error] * 9
    with pytest.raises(UserError, match=r"could not fetch the dataset owner/name@0123\w+ from the hub: .*folder:PATH"):
        fetch_snapshot("dataset", "owner/name", FIRST, patterns=["data/*"])
    assert (len(hub.calls), len(hub.waits_s)) == (tries, tries - 1)


def test_the_second_try_may_succeed(hub: Hub) -> None:
    hub.failures = [http_error(500)]
    assert fetch_snapshot("dataset", "owner/name", FIRST, patterns=["data/*"]) == (hub.folder, FIRST)
