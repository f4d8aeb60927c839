"""Checks of a published folder: any change is refused, and one that somebody else signs again is known by its key."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from stages.core.lineage import Lineage, Parent
from stages.core.provenance import Machine, Provenance
from stages.models.certificate import MergeCertificate, QuantizationCost
from stages.planning.plan import Plan
from stages.publishing.check import LINEAGE, METRICS, MODEL_CARD_FILE, PLAN
from stages.publishing.signing import BUILD_TYPE, KEY_FILE, SIGNATURE_FILE, STATEMENT_FILE, fingerprint, signing_key
from tests.damage import flip
from tests.made_up_publication import RUN, made_up_publication, records_in, sign_again
from tools.verify.__main__ import UNKNOWN_KEY, main

WEIGHTS = "model.safetensors"
ADAPTER = "trained/adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_publication(tmp_path_factory.mktemp("published"))


@pytest.fixture
def copy(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(published, tmp_path / "copy"))


@pytest.fixture
def key(copy: Path, tmp_path: Path) -> Path:
    """The publisher's public key, from elsewhere."""
    return Path(shutil.copy(copy / KEY_FILE, tmp_path / "publisher.pem"))


def verify(folder: Path, key: Path | None = None) -> Result:
    return CliRunner().invoke(main, ["--published", str(folder), *(["--key", str(key)] if key else [])])


def damaged(folder: Path, key: Path | None = None) -> str:
    """The verdict on a folder that is not as it was signed."""
    result = verify(folder, key)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), (result.output, result.exc_info)
    (verdict,) = result.output.splitlines()
    assert verdict.startswith("DAMAGED: ")
    return verdict


def test_the_publishers_key_makes_a_folder_good_and_no_key_leaves_the_signer_unknown(copy: Path, key: Path) -> None:
    good = verify(copy, key)
    assert (good.exit_code, good.output.splitlines()[-1][:4]) == (0, "OK: ")
    for words in (f"train@{RUN}, 2026-11-21T10:01:00", "commit c0ffee", f"merged {RUN}", "folder data/tiny/qwen2-vl"):
        assert words in good.output
    unnamed = verify(copy)
    assert unnamed.exit_code == UNKNOWN_KEY
    assert f"\nsigned by a key you have not named: {fingerprint(key)}\nestablished: " in unnamed.output
    assert "OK" not in unnamed.output
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")  # which the hub adds
    assert verify(copy, key).exit_code == 0


def test_a_folder_that_a_stranger_signs_again_is_as_good_as_the_strangers_key(
    copy: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(copy / WEIGHTS)
    sign_again(copy)
    assert verify(copy).exit_code == UNKNOWN_KEY
    assert "is not by the key" in damaged(copy, key)
    own = tmp_path / ".bakeoff/signing/key.pem"
    own.parent.mkdir(parents=True)
    shutil.copy(copy.parent / "their key/key.pem", own)
    assert verify(copy).exit_code == 0, "the workspace's own key"
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "signing" not in Path(path).parts and access(path, mode))
    assert verify(copy).exit_code == UNKNOWN_KEY, "a key of another account, which this one may not read"


def test_a_flipped_byte_in_any_file_is_refused(published: Path, copy: Path, key: Path) -> None:
    names = [path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()]
    assert {MODEL_CARD_FILE, WEIGHTS, ADAPTER, LINEAGE, STATEMENT_FILE, SIGNATURE_FILE, KEY_FILE} <= set(names)
    for name in names:
        flip(copy / name)
        verdict = damaged(copy, key)
        assert name in verdict or name == KEY_FILE, (name, verdict)
        shutil.copy(published / name, copy / name)
    assert verify(copy, key).exit_code == 0


@pytest.mark.parametrize("name", [WEIGHTS, ADAPTER, PLAN, METRICS, STATEMENT_FILE, SIGNATURE_FILE, KEY_FILE, LINEAGE])
def test_a_missing_file_is_refused(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert name in damaged(copy)


def put(name: str, text: str = "import os") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return write


@pytest.mark.parametrize(
    "name",
    ["modeling_x.py", "pytorch_model.bin", "original/consolidated.safetensors", "trained/adapter/x.py", "evidence/x"],
)
def test_an_unknown_file_is_refused_whoever_signs_it(copy: Path, name: str) -> None:
    put(name)(copy)
    assert f"{name} is no file of a published model" in damaged(copy)
    sign_again(copy)
    assert f"{name} is no file of a published model" in damaged(copy)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("adapter_config.json", "{}"), "holds an adapter"),
        (put("config.json", '{"model_type": "qwen2_vl", "auto_map": {"AutoModel": "x.X"}}'), "run code of its own"),
        (lambda folder: (folder / "tokenizer.json").symlink_to("/etc/passwd"), "leads out of"),
        (lambda folder: (folder / "examples/x.png").symlink_to("/etc"), "leads out of"),
        (lambda folder: os.mkfifo(folder / "tokenizer.json"), "no plain file"),
    ],
    ids=["adapter", "code", "link", "link to a folder", "pipe"],
)
def test_a_folder_that_would_run_or_read_something_else_is_refused(
    copy: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(copy)
    if not any(path.is_fifo() or path.is_symlink() for path in copy.rglob("*")):
        sign_again(copy)
    assert reason in damaged(copy)


def edited(folder: Path, change: Callable[[Any], object]) -> None:
    content = json.loads((folder / STATEMENT_FILE).read_text())
    change(content)
    (folder / STATEMENT_FILE).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(subject=[]),
        lambda content: content["subject"][5].update(name="x"),
        lambda content: content["subject"][5]["digest"].update(sha256="0" * 64),
        lambda content: content.pop("predicate"),
        lambda content: records_in(content)[0].pop("stage"),
    ],
)
def test_a_statement_of_other_files_is_refused_whoever_signs_it(copy: Path, change: Callable[[Any], None]) -> None:
    edited(copy, change)
    sign_again(copy, statement_follows=False)
    damaged(copy)


def test_a_folder_of_another_version_names_both_forms(copy: Path) -> None:
    before = {"buildType": "urn:bakeoff:stages:v1"}
    edited(copy, lambda content: content["predicate"]["buildDefinition"].update(before))
    sign_again(copy, statement_follows=False)
    assert f"has the form urn:bakeoff:stages:v1, and this version of Bakeoff checks {BUILD_TYPE}" in damaged(copy)


def test_the_form_has_another_number_when_its_fields_change() -> None:
    kinds = (Provenance, Machine, Lineage, Parent, MergeCertificate, QuantizationCost, Plan)
    names = ",".join(field.name for kind in kinds for field in fields(kind))
    digest = hashlib.sha256(names.encode()).hexdigest()[:8]
    assert (BUILD_TYPE, digest) == ("urn:bakeoff:stages:v4", "30e87c15"), "raise the number in BUILD_TYPE"


def test_names_cannot_look_like_a_verdict(copy: Path) -> None:
    edited(copy, lambda content: records_in(content)[0].update(commit="x\nOK: the files are good"))
    sign_again(copy)
    result = verify(copy)
    assert result.exit_code == UNKNOWN_KEY
    assert not any(line.startswith("OK") for line in result.output.splitlines())
    put("x\nOK: the files are good")(copy)
    damaged(copy)


def test_a_key_that_is_none_or_came_with_the_folder_is_refused_by_name(copy: Path, tmp_path: Path) -> None:
    none = tmp_path / "none.pem"
    assert "none.pem cannot be read: No such file" in verify(copy, none).output
    none.write_text("")
    assert "is no key in PEM" in verify(copy, none).output
    assert "came with the folder" in verify(copy, copy / KEY_FILE).output
    (tmp_path / "outside.pem").symlink_to(copy / KEY_FILE)
    assert "came with the folder" in verify(copy, tmp_path / "outside.pem").output
    assert "is a private key" in verify(copy, signing_key(tmp_path / "private")).output
