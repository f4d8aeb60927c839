"""Each kind of damage is found, with the command that fixes it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stages.core.lineage import read_lineage, write_lineage
from stages.models.certificate import MergeCertificate
from tests.damage import flip
from tests.launcher.small_checkout import CALLER
from tests.made_up_records import BUILD_CERTIFICATE
from tests.tools.verify.made_up import make_workspace, run
from tools.verify.__main__ import main

BASE = "data/bases/vlm"
TRAINED, MERGED, CERTIFICATE = (f"data/runs/r1/{name}" for name in ("trained", "merged", "merge.json"))
ADAPTER = f"{TRAINED}/adapter/adapter_model.safetensors"
RECORD = "data/provenance/detection/train@r1.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("made") / "a workspace")


@pytest.fixture
def workspace(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A moved copy to damage, in which nothing is linked."""
    copy = shutil.copytree(made, tmp_path / "moved workspace")
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PATH", CALLER["PATH"])
    return Path(copy)


@pytest.fixture
def unknown_to_dvc(workspace: Path) -> Path:
    shutil.rmtree(workspace / ".dvc")
    (workspace / "dvc.lock").unlink()
    return workspace


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def findings() -> dict[str, tuple[str, str]]:
    """(problems, command) by path, in the order of the report."""
    result = verify()
    paragraphs = [each for each in result.stdout.split("\n\n") if "  fix it with: " in each]
    found = {}
    for paragraph in paragraphs:
        path, *problems, fix = paragraph.splitlines()
        found[path] = ("; ".join(map(str.strip, problems)), fix.partition(": ")[2].partition("  #")[0])
    assert result.exit_code == bool(found), result.output
    return found


def cached(path: str) -> Path:
    """The object of DVC's cache that holds the same."""
    digest = hashlib.md5(Path(path).read_bytes(), usedforsecurity=False).hexdigest()
    return Path(".dvc/cache/files/md5", digest[:2], digest[2:])


FLIPPED = {
    BASE: f"{BASE}/lineage.json",
    TRAINED: ADAPTER,
    "data/runs/r1/training/training.json": "data/runs/r1/training/training.json",
    MERGED: f"{MERGED}/model.safetensors",
    CERTIFICATE: CERTIFICATE,
}
"""A file of each output."""


def test_a_flipped_bit_in_any_output_is_found_and_fixed_from_the_cache(workspace: Path) -> None:
    before = {file: Path(file).read_bytes() for file in FLIPPED.values()}
    for file in FLIPPED.values():
        flip(file)
    found = findings()
    assert list(found) == list(FLIPPED)
    for output, (problems, command) in found.items():
        assert "differs from dvc.lock" in problems
        assert command.startswith(f"rm -rf {output} && dvc checkout {output} || dvc repro -f -s ")
        run(workspace, command)
    assert {file: Path(file).read_bytes() for file in FLIPPED.values()} == before
    assert findings() == {}


def test_a_missing_file_is_found(workspace: Path) -> None:
    Path(ADAPTER).unlink()
    assert "adapter/adapter_model.safetensors" in findings()[TRAINED][0]


def test_a_damaged_object_of_the_cache_is_found_and_made_again_from_the_workspace(workspace: Path) -> None:
    path = cached(ADAPTER)
    flip(path)
    ((found, (_, command)),) = findings().items()
    assert found == str(path)
    run(workspace, command)
    (problem, command) = findings()[TRAINED]
    assert problem == "is not complete in DVC's cache"
    run(workspace, command)
    assert findings() == {}
    assert path.read_bytes() == Path(ADAPTER).read_bytes()


def test_an_object_that_is_one_file_with_an_intact_output_is_read_once(workspace: Path) -> None:
    """A bit that flips in both is found in both, of a model and of another file."""
    run(workspace, "dvc config cache.type hardlink && dvc checkout --relink")
    assert Path(ADAPTER).stat().st_nlink == 2
    assert findings() == {}
    for file in (ADAPTER, CERTIFICATE):
        object_path = str(cached(file))
        flip(file)
        assert {object_path, file if file == CERTIFICATE else TRAINED} <= findings().keys()


def test_a_result_that_dvc_was_killed_before_recording_is_recorded(workspace: Path) -> None:
    params = Path("params.yaml")
    params.write_text("recipes: {r1: {seed: 2}}\n")
    run(workspace, "python -m tests.tools.verify.made_up train r1")
    found = findings()
    assert {found[path][1] for path in (TRAINED, RECORD)} == {"dvc commit -f train@r1"}
    run(workspace, found[TRAINED][1])
    assert not {TRAINED, RECORD} & findings().keys(), "what was merged from the earlier one is still to be made again"
    flip(ADAPTER)
    assert findings()[TRAINED][1].startswith("rm -rf ")


def test_a_changed_source_is_found(workspace: Path) -> None:
    flip("data/source/config.json")
    assert findings() == {"data/source": ("is not what base@vlm read", "dvc repro base@vlm")}


def test_a_parent_that_is_missing_is_found(workspace: Path) -> None:
    shutil.rmtree(BASE)
    ((output, (problem, command)),) = findings().items()
    assert (output, command) == (BASE, f"dvc checkout {BASE} || dvc repro base@vlm")
    assert problem.startswith("is missing, although it is the base of ")


def test_lineages_are_checked_without_dvc(unknown_to_dvc: Path) -> None:
    assert findings() == {}
    flip(ADAPTER)
    problem, command = findings()[TRAINED]
    assert problem.startswith(f"{TRAINED} was recorded with content ")
    assert command == "dvc repro -f -s train@r1"
    # Written so that its own digest is right.
    other = replace(read_lineage(Path(TRAINED)).parents["base"].lineage, digest="1" * 64)
    write_lineage(Path(TRAINED), kind="trained", name="r1", parents={"base": (Path(BASE), other)})
    assert findings()[TRAINED][0].startswith(f"its base {BASE} had content 111111111111, and now has content ")


def test_a_wrong_certificate_of_a_merge_is_found(unknown_to_dvc: Path) -> None:
    good = MergeCertificate.read(Path(CERTIFICATE), fix="")
    wrong, failed = replace(good, merged_digest="0" * 64), replace(good, logit_deviation=float("nan"))
    for bad, problem in ((wrong, "certifies content 000000000000, "), (failed, "certifies a failure: logits deviate")):
        bad.write(Path(CERTIFICATE))
        found, command = findings()[CERTIFICATE]
        assert found.startswith(problem)
        assert command == "dvc repro -f -s merge@r1"
    Path(CERTIFICATE).unlink()
    assert list(findings()) == [CERTIFICATE]


def test_a_build_is_compared_with_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base_dir, built, path = Path(BASE), Path("data/builds/moe"), Path("data/builds/moe.json")
    for folder in (base_dir, built):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    base = write_lineage(base_dir, kind="base", name="vlm", source={"folder": "tiny"})
    lineage = write_lineage(built, kind="built", name="moe", parents={"base": (base_dir, base)})
    Path("dvc.yaml").write_text("stages: {build: {cmd: none, outs: [data/builds/moe, data/builds/moe.json]}}")
    Path("params.yaml").write_text("{}")
    good = replace(BUILD_CERTIFICATE, built_digest=lineage.digest)
    good.write(path)
    assert findings() == {}
    replace(good, domains={"a": replace(good.domains["a"], forced_deviation=1.0)}).write(path)
    assert findings()[str(path)][0].startswith("certifies a failure: expert a alone")


def test_a_record_of_other_outputs_is_found(unknown_to_dvc: Path) -> None:
    record = json.loads(Path(RECORD).read_text())
    record["outputs"][TRAINED] = "2" * 64
    Path(RECORD).write_text(json.dumps(record))
    problem, command = findings()[RECORD]
    assert command == "dvc repro -f -s train@r1"
    assert problem.startswith(f"records {TRAINED} with content 222222222222, which now has ")


def test_files_outside_the_workspace_that_a_record_names_are_not_read(unknown_to_dvc: Path) -> None:
    outside = unknown_to_dvc.parent / "outside"
    outside.write_text("x")
    record = json.loads(Path(RECORD).read_text())
    record["inputs"] |= {str(outside): "2" * 64, "../outside": "2" * 64}
    Path(RECORD).write_text(json.dumps(record))
    assert findings() == {}


def test_only_what_is_there_is_checked(workspace: Path) -> None:
    shutil.rmtree(MERGED)
    Path(CERTIFICATE).unlink()
    shutil.rmtree(".dvc/cache")
    partial = Path("data/runs/r1/.trained.partial")  # left by a killed stage
    partial.mkdir()
    (partial / "lineage.json").write_text("{")
    assert "2 outputs of dvc.lock" in verify().stdout
    assert findings() == {}
    flip(ADAPTER)
    run(workspace, findings()[TRAINED][1])
    assert TRAINED not in findings()


def test_another_folder_and_a_damaged_lock_file_are_refused(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("dvc.lock").write_text("stages: [1")
    assert "git checkout HEAD -- dvc.lock" in verify().output
    for params, problem in (("a: " + "[" * 100_000, "nested too deep"), ("recipes: 3", "cannot be filled in")):
        Path("params.yaml").write_text(params)
        assert problem in verify().output
    monkeypatch.chdir(tmp_path)
    assert "run from the top of the repository" in verify().output


def test_while_dvc_runs_stages_nothing_is_checked(workspace: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)", "dvc", "repro"]
    with subprocess.Popen(command) as process:
        try:
            assert f"dvc is running here (pid {process.pid})" in verify().output
        finally:
            process.kill()
