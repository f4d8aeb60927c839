"""Each kind of damage is found, with the command that fixes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stages.core.lineage import read_lineage, write_lineage
from stages.launcher.pipeline import declared_stages
from tests.damage import flip
from tests.launcher.small_checkout import CALLER
from tests.tools.verify.made_up import make_workspace, run
from tools.verify.__main__ import main

BASE = "data/bases/vlm"
TRAINED, MERGED, CERTIFICATE = (f"data/runs/r1/{name}" for name in ("trained", "merged", "merge.json"))
ADAPTER = f"{TRAINED}/adapter/adapter_model.safetensors"


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


def test_a_flipped_bit_in_any_output_is_found_and_fixed_from_the_cache(workspace: Path) -> None:
    """In each file of each output: weights, lineages, an adapter, a certificate, figures, records."""
    outs = [out for stage in declared_stages(workspace) for out in stage.outs]
    files = [path for out in outs for path in (Path(out), *sorted(Path(out).rglob("*"))) if path.is_file()]
    assert len(files) > len(outs) == 8
    for file in files:
        before = file.read_bytes()
        flip(file)
        ((output, (problems, command)),) = findings().items()
        assert file.is_relative_to(output)
        assert "differs from dvc.lock" in problems
        assert command.startswith(f"rm -rf {output} && dvc checkout {output} || dvc repro -f -s ")
        file.chmod(0o644)
        file.write_bytes(before)
    for file in files:
        flip(file)
    found = findings()
    assert list(found) == outs, "in the order of the pipeline"
    for _, command in found.values():
        run(workspace, command)
    assert findings() == {}


def test_a_damaged_file_that_is_one_with_its_object_of_the_cache_is_made_again(workspace: Path) -> None:
    run(workspace, "dvc config cache.type hardlink && dvc checkout --relink")
    assert Path(ADAPTER).stat().st_nlink == 2
    before = Path(ADAPTER).read_bytes()
    flip(ADAPTER)
    command = findings()[TRAINED][1]
    assert command.startswith(f"rm -rf {TRAINED} .dvc/cache/files/md5/")
    run(workspace, command)
    assert Path(ADAPTER).read_bytes() == before
    assert findings() == {}


def test_another_branchs_result_is_no_damage_and_keeps_its_objects(workspace: Path) -> None:
    run(workspace, "dvc config cache.type hardlink && dvc checkout --relink")
    own, before = {name: Path(name).read_bytes() for name in ("params.yaml", "dvc.lock")}, Path(ADAPTER).read_bytes()
    Path("params.yaml").write_text("recipes: {r1: {seed: 2}}\n")
    run(workspace, "dvc repro --quiet")
    for name, content in own.items():  # as `git checkout` alone does
        Path(name).write_bytes(content)
    other, objects = Path(ADAPTER).read_bytes(), sorted(Path(".dvc/cache").rglob("*"))
    found = findings()
    assert found[TRAINED][0].endswith("is another result that DVC has, such as another branch's")
    assert all(command.startswith(f"rm -rf {out} && dvc checkout {out} || ") for out, (_, command) in found.items())
    for _, command in found.values():
        run(workspace, command)
    assert findings() == {}
    assert Path(ADAPTER).read_bytes() == before != other
    assert sorted(Path(".dvc/cache").rglob("*")) == objects
    Path(ADAPTER).chmod(0o644)
    Path(ADAPTER).write_bytes(other)  # into the object of its own branch
    assert findings()[TRAINED][1].startswith(f"rm -rf {TRAINED} .dvc/cache/files/md5/")


def test_a_missing_file_is_found(workspace: Path) -> None:
    Path(ADAPTER).unlink()
    assert "adapter/adapter_model.safetensors" in findings()[TRAINED][0]


def test_a_parent_that_is_missing_is_found(workspace: Path) -> None:
    shutil.rmtree(BASE)
    ((output, (problem, command)),) = findings().items()
    assert (output, command) == (BASE, f"rm -rf {BASE} && dvc checkout {BASE} || dvc repro -f -s base@vlm")
    assert problem.startswith("is missing, although it is the base of ")


def test_lineages_are_checked_without_dvc(unknown_to_dvc: Path) -> None:
    assert findings() == {}
    flip(ADAPTER)
    problem, command = findings()[TRAINED]
    assert problem.startswith(f"{TRAINED} was recorded with content ")
    assert command.endswith("|| dvc repro -f -s train@r1")
    # Written so that its own digest is right.
    other = replace(read_lineage(Path(TRAINED)).parents["base"].lineage, digest="1" * 64)
    write_lineage(Path(TRAINED), kind="trained", name="r1", parents={"base": (Path(BASE), other)})
    assert findings()[TRAINED][0].startswith(f"its base {BASE} had content 111111111111, and now has content ")


def test_only_what_is_there_is_checked(workspace: Path) -> None:
    shutil.rmtree(MERGED)
    Path(CERTIFICATE).unlink()
    shutil.rmtree(".dvc/cache")
    partial = Path("data/runs/r1/.trained.partial")  # left by a killed stage
    partial.mkdir()
    (partial / "lineage.json").write_text("{")
    assert "2 outputs of dvc.lock" in verify().stdout
    assert findings() == {}


def test_another_folder_and_a_damaged_lock_file_are_refused(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("dvc.lock").write_text("stages: [1")
    assert "git checkout HEAD -- dvc.lock" in verify().output
    Path("params.yaml").write_text("recipes: 3")
    assert "cannot be filled in" in verify().output
    monkeypatch.chdir(tmp_path)
    assert "run from the top of the repository" in verify().output


def test_while_dvc_runs_stages_nothing_is_checked(workspace: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)", "dvc", "repro"]
    with subprocess.Popen(command) as process:
        try:
            assert f"dvc is running here (pid {process.pid})" in verify().output
        finally:
            process.kill()
