"""Sending a published folder: the real client against a stand-in of the hub (tests/hub_stand_in.py)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from stages.core.errors import UserError
from stages.kit.publishing.check import check_published
from stages.kit.publishing.folder import upload
from tests.hub_stand_in import TOKEN, Hub, hub_stand_in
from tests.made_up_publication import RUN, made_up_publication, sign_again

REPO = "somebody/tables"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_publication(tmp_path_factory.mktemp("published"))


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / RUN))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_stand_in() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its tries
        yield hub


def test_a_folder_is_sent_unchanged_in_one_commit_to_a_private_repository(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    (folder / ".cache/huggingface").mkdir(parents=True)
    (folder / ".cache/huggingface/note").touch()
    assert upload(folder, REPO) == f"{hub.url}/{REPO}"
    repository = hub.repositories[REPO]
    assert (repository.private, repository.commits) == (True, 1)
    for name, content in repository.files.items():
        path = tmp_path / "download" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert not check_published(tmp_path / "download").problems
    assert not any(name.startswith(".cache") for name in repository.files)


def test_an_existing_repository_is_refused_and_stays(hub: Hub, folder: Path) -> None:
    upload(folder, REPO)
    before = dict(hub.repositories[REPO].files)
    with pytest.raises(UserError, match=f"{REPO} could not be made: it exists already, so choose another name"):
        upload(folder, REPO)
    assert hub.repositories[REPO].files == before
    assert not any(request.startswith("DELETE") for request in hub.requests)


@pytest.mark.parametrize(
    ("token", "repo", "problem"),
    [
        ("hf_wrong", REPO, "could not sign in to the hub: the token is not known there"),
        (None, REPO, "there is no token; set HF_TOKEN"),
        (TOKEN, "others/tables", "others/tables could not be made: the token may not write there"),
        (TOKEN, "no name", "no name could not be made: Repo id must"),
    ],
)
def test_a_wrong_token_or_name_is_refused_and_nothing_is_made(
    hub: Hub, folder: Path, token: str | None, repo: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=problem):
        upload(folder, repo)
    assert not hub.repositories


@pytest.mark.parametrize(
    ("licence", "problem"),
    [
        ("my-own", r'the hub refuses the model card: .*"license" must be one of'),
        (None, r"write it into `licenses` of params\.yaml"),
    ],
)
def test_a_licence_that_is_unknown_is_refused_before_anything_is_made(
    hub: Hub, folder: Path, licence: str | None, problem: str
) -> None:
    card = ModelCard.load(folder / "README.md")
    card.data.license = licence
    card.save(folder / "README.md")
    sign_again(folder)
    with pytest.raises(UserError, match=problem):
        upload(folder, REPO)
    assert not hub.repositories
    assert not any("create" in request for request in hub.requests)


def test_a_changed_or_missing_folder_and_a_missing_network_are_refused(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="write it with: make publish RUN=none"):
        upload(folder.with_name("none"), REPO)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="HF_HUB_OFFLINE is set; unset it"):
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        upload(folder, REPO)
    (folder / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UserError, match=f"(?s)make publish RUN={RUN}.*model.safetensors: has content"):
        upload(folder, REPO)
    assert not hub.requests


@pytest.mark.parametrize("request_lost", ["preupload", "PUT /objects/", "/commit/"])
def test_a_lost_connection_leaves_nothing_and_the_next_try_succeeds(hub: Hub, folder: Path, request_lost: str) -> None:
    hub.lose = request_lost
    with pytest.raises(UserError, match=f"{RUN} could not be sent: the connection failed: .*Nothing was published"):
        upload(folder, REPO)
    assert not hub.repositories
    hub.lose = ""
    upload(folder, REPO)
    assert hub.repositories[REPO].commits == 1
