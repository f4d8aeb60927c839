"""The hub's client is replaced at the two calls that go out; nothing here touches a network."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from stages.core.errors import UserError
from stages.kit.data.hub import fetch_snapshot

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


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it waited, in seconds, without waiting."""
    waits: list[float] = []
    monkeypatch.setattr("stages.kit.data.hub.time.sleep", waits.append)
    return waits


def http_error(status: int) -> Exception:
    http = pytest.importorskip(errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
    response = http.Response(status, request=http.Request("GET", "https://hub"))
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
        (ConnectionResetError("reset by peer"), 2),
        (http_error(404), 1),
        (not_in_the_cache(http_error(401)), 1),
        (not_in_the_cache(errors.OfflineModeIsEnabled("offline")), 1),
        (OSError(28, "No space left on device"), 1),
    ],
)
def test_a_failure_that_may_pass_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, waited: list[float], error: Exception, tries: int
) -> None:
    calls = []

    def failing(repo_id: str, **options: object) -> str:
        calls.append(repo_id)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    with pytest.raises(UserError, match="could not fetch"):
        fetch_snapshot("dataset", "owner/name", FIRST, patterns=["data/*"])
    assert (len(calls), len(waited)) == (tries, tries - 1)


def test_the_second_try_may_succeed(monkeypatch: pytest.MonkeyPatch, waited: list[float], tmp_path: Path) -> None:
    answers: list[Exception | str] = [http_error(500), str(tmp_path)]

    def once(repo_id: str, **options: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub, "snapshot_download", once)
    assert fetch_snapshot("dataset", "owner/name", FIRST, patterns=["data/*"]) == (tmp_path, FIRST)


def test_no_connection_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch, waited: list[float]) -> None:
    http_library = errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0]
    connect_error = pytest.importorskip(http_library).ConnectError("name or service not known")

    def unreachable(repo_id: str, **options: object) -> str:
        raise connect_error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"owner/name@0123.*name or service not known.*folder:PATH"):
        fetch_snapshot("dataset", "owner/name", FIRST, patterns=["data/*"])
