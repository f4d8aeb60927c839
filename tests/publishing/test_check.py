"""Checks of a published folder: any change is found and named, also if somebody signs it again with their own key."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from stages.core.lineage import Lineage, Parent, combined_digest, file_digest, read_lineage
from stages.core.provenance import Machine, Provenance
from stages.core.records import parse, parse_yaml, yaml_text
from stages.models.certificate import MergeCertificate, QuantizationCost
from stages.planning.ladder import lowered
from stages.planning.plan import Plan
from stages.publishing.check import CARD_FILE, CERTIFICATE, LINEAGE, METRICS, MODEL, PLAN, check_published
from stages.publishing.signing import BUILD_TYPE, KEY_FILE, SIGNATURE_FILE, STATEMENT_FILE, fingerprint, signing_key
from tests.damage import damaged_bytes, damaged_tree, flip, nested, quick
from tests.made_up_publication import RUN, made_up_publication, records_in, sign_again
from tools.verify.__main__ import UNKNOWN_KEY, main

WEIGHTS = "model.safetensors"
ADAPTER = "trained/adapter/adapter_model.safetensors"
RUN_DIR = f"data/runs/{RUN}"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_publication(tmp_path_factory.mktemp("published"))


@pytest.fixture
def copy(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(published, tmp_path / "copy"))


def verify(folder: Path, key: Path | None = None) -> Result:
    return CliRunner().invoke(main, ["--published", str(folder), *(["--key", str(key)] if key else [])])


def test_only_a_named_key_makes_a_folder_good(copy: Path, tmp_path: Path) -> None:
    key = Path(shutil.copy(copy / KEY_FILE, tmp_path / "publisher.pem"))
    good = verify(copy, key)
    assert (good.exit_code, good.output.splitlines()[-1][:4]) == (0, "OK: ")
    for words in (f"train@{RUN}, 2026-11-21T10:01:00", "commit c0ffee", f"merged {RUN}", "folder data/tiny/qwen2-vl"):
        assert words in good.output
    assert verify(copy, copy / f"../{key.name}").exit_code == 0, "it lies outside"
    unnamed = verify(copy)
    assert unnamed.exit_code == UNKNOWN_KEY
    assert f"\nsigned by a key you have not named: {fingerprint(key)}\nestablished: " in unnamed.output
    assert "\nnot established: who signed." in unnamed.output
    assert "OK" not in unnamed.output
    own = tmp_path / ".bakeoff/signing/key.pem"
    own.parent.mkdir(parents=True)
    sign_again(copy)
    shutil.copy(copy.parent / "their key/key.pem", own)
    assert verify(copy).exit_code == 0, "the workspace's own key"
    theirs = verify(copy, key)
    assert theirs.exit_code == 1
    assert f"\nsigned by a key you have not named: {fingerprint(own)}\nDAMAGED" in theirs.output
    no_key = tmp_path / "none.pem"
    assert "is no public key in PEM" in verify(copy, no_key).output
    no_key.write_text("")
    assert "is no public key in PEM" in verify(copy, no_key).output
    assert "came with the folder" in verify(copy, copy / KEY_FILE).output


def test_a_key_that_came_with_the_folder_by_a_link_is_not_a_named_one(copy: Path, tmp_path: Path) -> None:
    theirs = Path(shutil.move(copy / KEY_FILE, tmp_path / "theirs.pem"))
    (copy / KEY_FILE).symlink_to("../theirs.pem")
    (tmp_path / "outside.pem").symlink_to(copy / KEY_FILE)
    (tmp_path / "other way").symlink_to(copy)
    for key in (copy / KEY_FILE, theirs, tmp_path / "outside.pem", tmp_path / "other way" / KEY_FILE):
        assert "came with the folder" in verify(copy, key).output
    assert f"{KEY_FILE}: is a link that leads out of the folder" in verify(copy).output


def test_a_private_or_damaged_key_is_refused_by_name(copy: Path, tmp_path: Path) -> None:
    own = signing_key(tmp_path / ".bakeoff/signing")
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    for key in (own, encrypted):
        assert f"{key} is a private key" in verify(copy, key).output
    for damage in (encrypted.read_text(), own.read_text()[:60], "-----BEGIN PRIVATE KEY-----"):
        own.write_text(damage)
        result = verify(copy)
        assert result.exit_code == 1
        assert "cannot be verified: " in result.output, result.exc_info


def test_a_flipped_byte_in_any_file_is_found_and_the_file_named(published: Path, copy: Path) -> None:
    names = [path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()]
    assert {CARD_FILE, WEIGHTS, ADAPTER, STATEMENT_FILE, SIGNATURE_FILE, KEY_FILE} <= set(names)
    for name in names:
        flip(copy / name)
        problems = check_published(copy).problems
        assert any(name in problem for problem in problems), (name, problems)
        assert "dvc repro" not in "".join(problems), "no stage of this workspace need have made the folder"
        shutil.copy(published / name, copy / name)
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")  # which the hub adds
    assert not check_published(copy).problems


# Changes that somebody else signs again, with a statement that follows from the files.


def edited(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A change to the content of a JSON file."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def in_record(stage: str, *steps: str, to: Any) -> Callable[[Path], None]:
    """Another value at a place of the record of a stage."""

    def change(content: Any) -> None:
        here = next(record for record in records_in(content) if record["stage"] == f"{stage}@{RUN}")
        for step in steps[:-1]:
            here = here[step]
        here[steps[-1]] = to

    return edited(STATEMENT_FILE, change)


def put(name: str, text: str = "import os") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return write


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change_all(folder: Path) -> None:
        for change in changes:
            change(folder)

    return change_all


def other_weights(folder: Path) -> None:
    flip(folder / WEIGHTS)


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return replace


def in_card(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A change to the metadata of the card."""

    def edit(folder: Path) -> None:
        _, front, text = (folder / CARD_FILE).read_text().split("---\n", 2)
        content = parse_yaml(front)
        change(content)
        (folder / CARD_FILE).write_text(f"---\n{yaml_text(content)}---\n{text}")

    return edit


def in_result(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A change to the result in the card."""
    return in_card(lambda card: change(card["model-index"][0]["results"][0]))


all_detected = in_result(lambda it: it["metrics"][1].update(value=True))


def in_lineage(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A change to the lineage, unsealed."""
    return edited(LINEAGE, lambda content: (change(content), content.update(seal=None)))


def forged(folder: Path) -> None:
    """Everything as if the stages had made the files as they are now: nothing contradicts anything."""
    before = read_lineage(folder / "evidence", name=Path(LINEAGE).name)
    parts = {path.name: file_digest(path) for path in folder.glob("*") if path.is_file()}
    for name in (CARD_FILE, STATEMENT_FILE, KEY_FILE, SIGNATURE_FILE):
        del parts[name]
    lineage = json.loads((folder / LINEAGE).read_text())
    lineage["digest"] = combined_digest(parts)
    del lineage["seal"]
    (folder / LINEAGE).write_text(json.dumps(lineage))
    certificate = records_in(json.loads((folder / STATEMENT_FILE).read_text()))[1]["outputs"][f"{RUN_DIR}/merge.json"]
    replaced(CERTIFICATE, before.digest, lineage["digest"])(folder)
    replaced(STATEMENT_FILE, before.digest, lineage["digest"])(folder)
    replaced(STATEMENT_FILE, certificate, file_digest(folder / CERTIFICATE))(folder)


def one_record_more(content: Any) -> None:
    """A record that agrees with itself, of a training that this model does not come from."""
    first = records_in(content)[0]
    inputs = {**first["inputs"], "data/runs/x/plan.yaml": first["inputs"][f"{RUN_DIR}/plan.yaml"]}
    records_in(content).insert(0, {**first, "stage": "train@x", "inputs": inputs})


def beside(folder: Path) -> None:
    save_file({"x": np.zeros(1, dtype=np.float32)}, folder / "adapter_model.safetensors")
    shutil.copy(folder / "trained/adapter/adapter_config.json", folder)


ANOTHER = {"kind": "base", "name": "x", "digest": "1" * 64, "source": {"hub": "evil/x", "revision": "0" * 40}}
Change = Callable[[Path], object]
CODE = {"auto_map": {"AutoModel": "x.X"}}
NOT_QUANTIZED = {"trained_quantization": "none", "quantization_cost": None}
OF_ANOTHER = {"path": "../../../bases/x", "lineage": ANOTHER}
MERGED_ELSEWHERE = in_record("merge", "outputs", to={"data/runs/x/merged": "0" * 64})
MERGED_OTHERWISE = in_record("merge", "outputs", f"{RUN_DIR}/merged", to="0" * 64)
OTHER_SEED = both(in_record("train", "seed", to=1), in_record("train", "plan", "seed", to=1))
OTHER_COMMIT = edited(STATEMENT_FILE, lambda it: records_in(it).insert(0, {**records_in(it)[0], "commit": "0" * 40}))
SECOND_ENTRY = replaced(CARD_FILE, "model-index:\n", "model-index:\n- name: x\n  results: []\n")
HIGHER = replaced(CARD_FILE, "type: mean_iou\n      value: 0.", "type: mean_iou\n      value: 1.")
CHANGES: dict[str, dict[str, Change]] = {
    MODEL: {
        "weights": other_weights,
        "adapter beside the model": beside,
        "adapter, all forged": both(beside, forged),
        "code in the configuration": both(edited("config.json", lambda it: it.update(CODE)), forged),
        "code deep in it": both(edited("config.json", lambda it: it.update(x=[{"y": CODE}])), forged),
        "another index": put("model.safetensors.index.json", '{"weight_map": {"weight": "trained/x"}}'),
        "lineage.json": put("lineage.json", "{}"),
    },
    "trained": {
        "adapter": lambda folder: flip(folder / ADAPTER),
        "no adapter": lambda folder: shutil.rmtree(folder / "trained"),
    },
    "pytorch_model.bin": {
        "pickle": put("pytorch_model.bin"),
        "pickle, all forged": both(put("pytorch_model.bin"), forged),
    },
    "modeling_x.py": {"code": put("modeling_x.py"), "code, all forged": both(put("modeling_x.py"), forged)},
    "original/consolidated.safetensors": {"a folder": put("original/consolidated.safetensors")},
    "trained/adapter/x.py": {"code beside the adapter": put("trained/adapter/x.py")},
    "examples": {"an example": put("examples/x.png")},
    "evidence/x.json": {"more evidence": put("evidence/x.json")},
    PLAN: {"plan": replaced(PLAN, "seed: 42", "seed: 43")},
    METRICS: {"metrics": edited(METRICS, lambda it: it.update(mean_iou=1.0))},
    STATEMENT_FILE: {
        "another output": both(other_weights, MERGED_ELSEWHERE),
        "outputs of another content": both(other_weights, MERGED_OTHERWISE),
        "seed": in_record("train", "seed", to=1),
        "seed of the plan": OTHER_SEED,
        "attempt": in_record("train", "attempt", to=1),
        "attempt below 0": in_record("train", "attempt", to=-1),
        "no plan": in_record("train", "plan", to=None),
        "base": in_record("train", "inputs", "data/bases/vlm", to="0" * 64),
        "evaluated": in_record("evaluate", "inputs", f"{RUN_DIR}/merged", to="0" * 64),
        "a record less": edited(STATEMENT_FILE, lambda it: records_in(it).pop(0)),
        "a record more": edited(STATEMENT_FILE, one_record_more),
        "two records of a stage": OTHER_COMMIT,
        "order of the records": edited(STATEMENT_FILE, lambda it: records_in(it).reverse()),
        "lineage of another base": in_lineage(lambda it: it["parents"]["base"].update(lineage=ANOTHER)),
    },
    CARD_FILE: {
        "a higher figure": HIGHER,
        "a figure of another kind": both(edited(METRICS, lambda it: it.update(detection_rate=1.0)), all_detected),
        "a base": replaced(CARD_FILE, "library_name", "base_model: evil/x\nlibrary_name"),
        "nothing": put(CARD_FILE, "---\nlicense: mit\n---\n"),
        "a second entry": SECOND_ENTRY,
        "no results": in_card(lambda it: it["model-index"][0].update(results=[])),
        "a figure less": in_result(lambda it: it["metrics"].pop()),
        "no figures": in_result(lambda it: it.update(metrics=[])),
        "other data": in_result(lambda it: it["dataset"].update(name="x")),
        "another split": in_result(lambda it: it["dataset"].update(split="test")),
        "another heading": in_result(lambda it: it["metrics"][0].update(name="Accuracy")),
        "another key": in_card(lambda it: it.update(widget=["x"])),
    },
    CERTIFICATE: {
        "no probes": both(edited(CERTIFICATE, lambda it: it.update(probes=0)), forged),
        "deviation below 0": both(edited(CERTIFICATE, lambda it: it.update(logit_deviation=-1.0)), forged),
        "tolerance": both(edited(CERTIFICATE, lambda it: it.update(tolerance=9.0, logit_deviation=8.0)), forged),
        "not quantized": both(edited(CERTIFICATE, lambda it: it.update(NOT_QUANTIZED)), forged),
        "another processor": replaced(CERTIFICATE, '"processor_parity": true', '"processor_parity": false'),
    },
    LINEAGE: {
        "of a base": in_lineage(lambda it: it.update(kind="base", parents={})),
        "without the training": in_lineage(lambda it: it["parents"].pop("trained")),
        "with an expert": in_lineage(lambda it: it["parents"].update({"expert/x": it["parents"]["base"]})),
        "with the training as base": in_lineage(lambda it: it["parents"].update(base=it["parents"]["trained"])),
        "of two bases": in_lineage(lambda it: it["parents"]["trained"]["lineage"].update(parents={"base": OF_ANOTHER})),
        "with another name of the base": in_lineage(lambda it: it["parents"]["base"]["lineage"].update(name="x")),
    },
}


@pytest.mark.parametrize(("file", "what"), [(file, what) for file, changes in CHANGES.items() for what in changes])
def test_a_change_that_somebody_else_signs_contradicts_the_rest(copy: Path, file: str, what: str) -> None:
    CHANGES[file][what](copy)
    sign_again(copy)
    problems = check_published(copy).problems
    assert any(problem.startswith(f"{file}: ") for problem in problems), problems
    assert not any(problem.startswith(f"{SIGNATURE_FILE}: ") for problem in problems)


def test_the_plan_of_a_training_that_ran_out_of_memory_may_be_the_lowered_one(copy: Path) -> None:
    lower = lowered(parse(Plan, parse_yaml((copy / PLAN).read_text())), 1)
    assert lower is not None
    plan = json.loads(json.dumps(asdict(lower)))
    both(in_record("train", "attempt", to=1), in_record("train", "plan", to=plan), sign_again)(copy)
    assert not check_published(copy).problems
    both(in_record("train", "attempt", to=2), sign_again)(copy)
    assert check_published(copy).problems


def test_a_vast_micro_batch_is_refused_before_its_ladder_is_computed(copy: Path) -> None:
    vast = in_record("merge", "plan", "schedule", "micro_batch", to=2**20 + 1)
    both(in_record("train", "attempt", to=1), vast, sign_again)(copy)
    assert any("1048576" in problem for problem in check_published(copy).problems)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(subject=[]),
        lambda content: content["subject"][5].update(name="x"),
        lambda content: content["subject"][5]["digest"].update(sha256="0" * 64),
        lambda content: content["subject"].append(content["subject"][0]),
        lambda content: content["subject"][0].update(annotations=[]),
        lambda content: content.update(predicateType="https://slsa.dev/provenance/v2"),
        lambda content: content["predicate"]["runDetails"]["metadata"].update(startedOn="2020-01-01T00:00:00+00:00"),
        lambda content: content["predicate"]["buildDefinition"]["resolvedDependencies"].pop(),
        lambda content: records_in(content)[0].update(command="rm -rf /"),
    ],
)
def test_a_statement_that_says_another_thing_than_its_files_and_records_is_refused(
    copy: Path, change: Callable[[Any], None]
) -> None:
    edited(STATEMENT_FILE, change)(copy)
    sign_again(copy, statement_follows=False)
    assert check_published(copy).problems


def test_a_folder_of_another_version_is_not_called_damaged(copy: Path) -> None:
    before = {"buildType": "urn:bakeoff:stages:v1"}
    edited(STATEMENT_FILE, lambda it: it["predicate"]["buildDefinition"].update(before))(copy)
    result = verify(copy)
    assert (result.exit_code, "DAMAGED" in result.output) == (1, False)
    assert f"has the form urn:bakeoff:stages:v1, and this version of Bakeoff checks {BUILD_TYPE}" in result.output


def test_the_form_has_another_number_when_its_fields_change() -> None:
    kinds = (Provenance, Machine, Lineage, Parent, MergeCertificate, QuantizationCost, Plan)
    names = ",".join(field.name for kind in kinds for field in fields(kind))
    digest = hashlib.sha256(names.encode()).hexdigest()[:8]
    assert (BUILD_TYPE, digest) == ("urn:bakeoff:stages:v2", "be6838f0"), "raise the number in BUILD_TYPE"


def test_names_cannot_look_like_a_verdict(copy: Path) -> None:
    edited(STATEMENT_FILE, lambda it: records_in(it)[0].update(commit="x\nOK: the files are good"))(copy)
    put("x\nOK: the files are good")(copy)
    sign_again(copy)
    assert not any(line.startswith("OK") for line in verify(copy).output.splitlines())
    (copy / "x\nOK: the files are good").unlink()
    sign_again(copy)
    assert verify(copy).exit_code == UNKNOWN_KEY
    assert not any(line.startswith("OK") for line in verify(copy).output.splitlines())


def test_a_folder_deeper_than_python_recurses_gives_a_verdict(copy: Path) -> None:
    deep = copy
    for _ in range(1200):
        deep = deep / "d"
        deep.mkdir()
    result = verify(copy)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.exc_info
    subprocess.run(["rm", "-rf", str(copy / "d")], check=True)  # pytest's own way of removing it recurses


def test_a_file_of_the_proof_too_large_and_a_link_beside_it_are_refused(published: Path, copy: Path) -> None:
    names = (SIGNATURE_FILE, STATEMENT_FILE, KEY_FILE, CARD_FILE, LINEAGE, CERTIFICATE, METRICS, PLAN)
    for name in names:
        (copy / name).write_bytes(bytes(2**23))
    (copy / ".cache").symlink_to("/etc")
    found = {*check_published(copy).problems}
    assert found == {*(f"{name}: is larger than 4.00 MiB" for name in names), ".cache: is no plain file"}


def test_a_wholly_forged_folder_is_only_as_good_as_its_key(copy: Path, tmp_path: Path) -> None:
    key = Path(shutil.copy(copy / KEY_FILE, tmp_path / "publisher.pem"))
    both(other_weights, forged, sign_again)(copy)
    assert verify(copy).exit_code == UNKNOWN_KEY
    assert verify(copy, key).exit_code == 1


# Strange files, and a verdict for each.

STRANGE: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a folder": lambda path: path.symlink_to("/etc"),
    "link to what never ends": lambda path: path.symlink_to("/proc/self/pagemap"),
    "nothing": lambda path: None,
    "empty": lambda path: path.touch(),
    "deep": lambda path: path.write_text(json.dumps(nested(900)) * 20),
    "deeper": lambda path: path.write_text("[" * 100_000),
    "deep mappings": lambda path: path.write_text('{"a":' * 150 + "1" + "}" * 150),
    "not a number": lambda path: path.write_text("NaN"),
    "circle": lambda path: path.write_text("---\na: &a [*a]\n---\n"),
    "deep card": lambda path: path.write_text(f"---\na: {'[' * 5000}\n---\n"),
    "list": lambda path: path.write_text("[]"),
    "another kind of key": lambda path: path.write_bytes(
        ed25519.Ed25519PrivateKey.generate()
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    ),
}


@pytest.mark.parametrize(
    "name", [SIGNATURE_FILE, STATEMENT_FILE, KEY_FILE, CARD_FILE, LINEAGE, METRICS, PLAN, "config.json"]
)
def test_a_strange_file_gives_a_verdict(published: Path, tmp_path: Path, name: str) -> None:
    for what, make in STRANGE.items():
        copy = Path(shutil.copytree(published, tmp_path / what))
        (copy / name).unlink()
        make(copy / name)
        result = verify(copy)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), (what, result.exc_info)
        assert "DAMAGED: " in result.output, what


NAMES = [
    *("x", ".x", ".git/x", "adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin", "model.gguf"),
    *("tf_model.h5", "modeling_x.py", "generation_config.json", "tokenizer_config.json", "lineage.json", "evidence/x"),
    *("model.safetensors.index.json", "trained/x.safetensors", "trained/adapter/README.md", "custom_generate/x.py"),
]
"""Files that may come into a folder."""


def loaded(folder: Path) -> dict[str, bytes]:
    """Files that somebody may load: all but those that describe the model, and those of git and of the hub's client."""
    described = (CARD_FILE, STATEMENT_FILE, KEY_FILE, SIGNATURE_FILE, "evidence", "examples", ".git", ".cache")
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name.partition("/")[0] not in described}


@given(data=st.data())
@quick(60)
def test_whatever_is_damaged_and_signed_again_nothing_else_is_loaded(
    published: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed/copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(published, folder)
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in data.draw(st.lists(st.sampled_from([*there, *NAMES]), min_size=1, max_size=3, unique=True)):
        path = folder / name
        content = path.read_bytes() if path.is_file() else b"{}"
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        kinds = ["bytes", "tree" if name.endswith(".json") else "bytes", "other", *STRANGE]
        kinds.remove("link to what never ends")  # signing again would read it
        how = data.draw(st.sampled_from(kinds))
        if how == "tree":
            path.write_text(json.dumps(data.draw(damaged_tree(json.loads(content)))), errors="surrogatepass")
        elif how == "bytes":
            path.write_bytes(data.draw(damaged_bytes(content)))
        elif how == "other":
            shutil.copy(published / data.draw(st.sampled_from(there)), path)
        else:
            STRANGE[how](path)
    signed = data.draw(st.sampled_from(["not", "again", "with a statement that follows"]))
    if signed != "not" and not any(path.is_fifo() for path in folder.rglob("*")):  # which would be waited for
        with suppress(Exception):  # without a statement, or with a folder in its place
            sign_again(folder, statement_follows=signed != "again")
    result = verify(folder)
    assert isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in (1, UNKNOWN_KEY)
    if result.exit_code == UNKNOWN_KEY:
        assert loaded(folder) == loaded(published)
