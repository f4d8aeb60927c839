"""A folder is sent to the hub as it was signed, with a licence, into a new and private repository."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard

from stages.publishing.check import MODEL_CARD_FILE
from tests.damage import flip
from tests.made_up_publication import made_up_publication, sign_again
from tools import send


class Hub:
    """Takes the place of HfApi."""

    called: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012
    error: Exception | None = None

    def create_repo(self, name: str, **options: Any) -> str:
        self.called.append(("create_repo", {"name": name, **options}))
        return f"https://hub/{name}"

    def upload_folder(self, **options: Any) -> None:
        if self.error:
            raise self.error
        self.called.append(("upload_folder", options))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_up_publication(tmp_path_factory.mktemp("published"))
    card = ModelCard.load(folder / MODEL_CARD_FILE)
    card.data.license = "mit"
    card.save(folder / MODEL_CARD_FILE)
    sign_again(folder)
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(send, "HfApi", Hub)
    monkeypatch.setattr(Hub, "called", [])
    return Path(shutil.copytree(published, tmp_path / "r4-joint"))


def sent(folder: Path) -> Result:
    return CliRunner().invoke(send.main, [str(folder), "owner/name"])


def test_repository_is_new_and_private_and_gets_what_was_signed(folder: Path) -> None:
    (folder / ".cache").mkdir()
    result = sent(folder)
    assert (result.exit_code, result.output) == (0, "https://hub/owner/name\n")
    (made, options), (_, upload) = Hub.called
    assert (made, options) == ("create_repo", {"name": "owner/name", "private": True})
    assert (upload["repo_id"], upload["folder_path"]) == ("owner/name", folder)
    assert {".cache/*", ".git/*", ".gitattributes"} <= {*upload["ignore_patterns"]}
    assert "model.sig" not in upload["ignore_patterns"]


def test_changed_folder_is_not_sent(folder: Path) -> None:
    flip(folder / "model.safetensors")
    assert "is not as it was signed" in sent(folder).output
    assert Hub.called == []


def test_model_of_unknown_licence_is_not_sent(folder: Path) -> None:
    card = ModelCard.load(folder / MODEL_CARD_FILE)
    card.data.license = None
    card.save(folder / MODEL_CARD_FILE)
    sign_again(folder)
    assert "`licenses` of params.yaml" in sent(folder).output
    assert Hub.called == []


def test_failure_of_the_hub_is_one_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "error", RuntimeError("connection lost"))
    fix = f"send the rest with: .venv/bin/hf upload owner/name {folder}"
    assert sent(folder).output.endswith(f"was not sent to owner/name: connection lost; {fix}\n")
