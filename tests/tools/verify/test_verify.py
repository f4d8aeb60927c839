"""Each kind of damage to the files of outputs, sources and the cache is named, with the command that fixes it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.core.errors import UserError
from tests.tools.verify.damaged import (
    ADAPTER,
    CERTIFICATE,
    MERGED,
    RECORD,
    SOURCE,
    TRAIN_AGAIN,
    TRAINED,
    cached,
    command_line,
    edit,
    fix,
    flip,
    found,
    only_finding,
)
from tests.tools.verify.made_up import run
from tools.verify.findings import RESTORE, Finding
from tools.verify.verify import restore, verify


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found(made: Path, data: st.DataObject) -> None:
    kept = [path for folder in ("data", ".dvc/cache/files") for path in (made / folder).rglob("*") if path.is_file()]
    path = data.draw(st.sampled_from(sorted(path for path in kept if path.stat().st_size)))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(path, position)
    try:
        shown = str(path.relative_to(made))
        findings = found(made).values()
        assert any(
            shown.startswith(each.path) or any(shown in problem for problem in each.problems) for each in findings
        )
    finally:
        flip(path, position)


@pytest.mark.parametrize(
    ("damage", "file", "output", "problem"),
    [
        (flip, "data/bases/vlm/model.safetensors", "data/bases/vlm", "holds other bytes than dvc.lock has: model.safe"),
        (flip, ADAPTER, TRAINED, "its lineage has content"),
        (lambda path: os.truncate(path, path.stat().st_size - 4), ADAPTER, TRAINED, " (not a whole safetensors file: "),
        (Path.unlink, ADAPTER, TRAINED, "lacks adapter/adapter_model.safetensors"),
        (flip, f"{TRAINED}/thử nghiệm.txt", TRAINED, "thử nghiệm.txt"),
        (lambda path: edit(path, digest="0" * 64), f"{MERGED}/lineage.json", MERGED, "seal: "),
        (lambda path: path.write_text("{"), f"{MERGED}/lineage.json", MERGED, "is damaged: "),
        (lambda path: edit(path, tolerance=9), CERTIFICATE, CERTIFICATE, "other bytes"),
        (lambda path: path.write_text(""), CERTIFICATE, CERTIFICATE, "merge.json is damaged"),
        (lambda path: (path / "stray").touch(), MERGED, MERGED, "has stray besides"),
        # No newer result: the outputs that it describes are intact.
        (lambda path: edit(path, seconds=2.5), RECORD, RECORD, "other bytes"),
    ],
)
def test_damage_in_the_workspace_is_named_and_fixed_from_the_cache(
    workspace: Path, damage: Callable[[Path], object], file: str, output: str, problem: str
) -> None:
    damage(workspace / file)
    path, problems, command = only_finding(workspace)
    assert (path, command) == (output, f"rm -rf {output} && dvc checkout {output}")
    assert problem in problems


@pytest.mark.parametrize(
    ("moved", "problem"),
    [("data/bases", f"the base of {TRAINED}"), (CERTIFICATE, f"the certificate of {MERGED}")],
)
def test_what_another_output_refers_to_is_missing(workspace: Path, moved: str, problem: str) -> None:
    shutil.move(workspace / moved, workspace / "elsewhere")
    output, problems, command = only_finding(workspace)
    assert problems.startswith(f"is not here, though it is {problem}")
    assert command == f"dvc checkout {output}"


def test_a_base_that_no_stage_makes_is_missing(workspace: Path) -> None:
    """Its recipe was renamed, or only a part of data/ was copied."""
    run(workspace, "mv data/runs/r1 data/runs/r2 && rm -rf data/bases && sed -i s/r1:/r2:/ params.yaml")
    run(workspace, "rm dvc.lock && sed -i '/data.bases.vlm]/s/data.bases.vlm/data\\/elsewhere/' dvc.yaml")
    findings = found(workspace)
    assert findings.keys() == {"data/runs/r2/trained", "data/runs/r2/merged"}
    problem = "its base data/bases/vlm is not here, and no stage makes that; where you have it, put it there"
    trained = Finding(path="data/runs/r2/trained", problems=(problem,), fix="dvc repro -f -s train@r2")
    assert findings["data/runs/r2/trained"] == trained
    (workspace / "dvc.yaml").unlink()
    for _ in range(2):
        first, *_ = found(workspace).values()
        assert first.fix == f"rm -rf {first.path}  # no stage of dvc.yaml makes it"
        run(workspace, first.fix)
    assert found(workspace) == {}


def test_missing_and_damaged_objects_and_listings_are_restored_from_the_workspace(workspace: Path) -> None:
    missing, damaged = cached(workspace, ADAPTER), cached(workspace, f"{MERGED}/model.safetensors")
    missing.unlink()
    flip(damaged)
    for listing in (workspace / ".dvc/cache/files/md5").rglob("*.dir"):
        flip(listing, 5)
    findings = found(workspace)
    assert list(findings) == ["data/bases/vlm", TRAINED, MERGED]
    assert {finding.fix for finding in findings.values()} == {RESTORE}
    assert f"missing in DVC's cache: {missing.relative_to(workspace)}" in findings[TRAINED].problems
    assert str(damaged.relative_to(workspace)) in findings[MERGED].problems[0]
    fix(workspace, RESTORE)
    assert damaged.stat().st_mode & 0o777 == 0o444


def test_damage_in_cache_and_workspace_is_made_again_without_the_damaged_object(linked: Path) -> None:
    """Were it still there, DVC would take it for what the stage has made again."""
    assert found(linked) == {}
    damaged = cached(linked, ADAPTER)
    flip(damaged)
    path, problem, command = only_finding(linked)
    assert path == TRAINED
    assert "holds other bytes than dvc.lock has: adapter/adapter_model.safetensors" in problem
    assert command == f"rm -f {damaged.relative_to(linked)} && {TRAIN_AGAIN}"
    fix(linked, command)


def test_damage_here_and_other_damage_there_are_both_fixed(workspace: Path) -> None:
    flip(workspace / ADAPTER)
    flip(cached(workspace, f"{TRAINED}/lineage.json"))
    assert only_finding(workspace)[2] == RESTORE
    restored = command_line(workspace, "--restore")
    assert restored.exit_code == 1
    path, _, command = only_finding(workspace)
    assert f"fix it with: {command}" in restored.stdout
    assert command == f"rm -rf {path} && dvc checkout {path}"
    fix(workspace, command)


def test_a_link_into_a_cache_that_lost_the_object_cannot_be_read(workspace: Path) -> None:
    """With cache.type symlink. Nothing intact is left: the stage is run again."""
    lost = cached(workspace, ADAPTER)
    (workspace / ADAPTER).unlink()
    (workspace / ADAPTER).symlink_to(lost)
    assert found(workspace) == {}
    lost.unlink()
    path, problem, command = only_finding(workspace)
    assert (path, command) == (TRAINED, TRAIN_AGAIN)
    assert "adapter_model.safetensors (cannot be read: No such file or directory)" in problem


def test_an_object_whose_output_is_not_checked_out_is_read_too(workspace: Path) -> None:
    damaged = cached(workspace, f"{MERGED}/model.safetensors")
    shutil.rmtree(workspace / MERGED)
    (workspace / CERTIFICATE).unlink()
    assert found(workspace) == {}
    flip(damaged)
    shown = damaged.relative_to(workspace)
    again = f"rm -f {shown} && dvc repro -f -s merge@r1"
    assert only_finding(workspace) == (MERGED, f"damaged in DVC's cache: {shown}", again)


def test_a_damaged_object_of_another_experiment_is_removed(workspace: Path) -> None:
    stray = workspace / ".dvc/cache/files/md5/ab" / ("0" * 30)
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("not of that name")
    path, problem, command = only_finding(workspace)
    assert path == str(stray.relative_to(workspace))
    assert "no output of dvc.lock needs it" in problem
    fix(workspace, command)


def test_a_damaged_entry_of_the_run_cache_is_removed_and_dvc_goes_on(workspace: Path) -> None:
    entry = min((workspace / ".dvc/cache/runs").glob("*/*/*"))
    for text in (entry.read_text().replace("md5: ", "md5: 0", 1), "", "{"):
        entry.write_text(text)
        path, problem, _ = only_finding(workspace)
        assert path == str(entry.parent.relative_to(workspace))
        assert entry.name in problem
    entry.unlink()  # as a killed DVC leaves it
    path, problem, command = only_finding(workspace)
    assert path == str(entry.parent.relative_to(workspace))
    assert problem.startswith("is empty, where DVC was killed; it then ends with: join() argument must be str")
    (workspace / "dvc.lock").unlink()
    with pytest.raises(AssertionError, match=r"join\(\) argument must be str"):  # until DVC fixes that
        run(workspace, "dvc repro")
    fix(workspace, f"{command} && dvc repro")


def test_a_cache_that_cannot_be_written_to_is_refused(workspace: Path) -> None:
    missing = cached(workspace, ADAPTER)
    missing.unlink()
    findings = verify(workspace)
    shutil.rmtree(missing.parent)
    missing.parent.touch()  # root may write where permissions forbid it
    with pytest.raises(UserError, match=r"cannot be put back: File exists; where the disk is full or the cache"):
        restore(findings)


def test_a_changed_source_is_named_with_its_readers(workspace: Path) -> None:
    """Without git nobody has what it was."""
    flip(workspace / SOURCE)
    path, problem, command = only_finding(workspace)
    assert (path, problem) == ("data/source", "is not what base@vlm read")
    assert command.startswith("dvc repro base@vlm  # or put back what it was")
    (workspace / SOURCE).unlink()
    assert only_finding(workspace)[0] == "data/source"


@pytest.fixture
def in_git(workspace: Path) -> Path:
    run(workspace, "git init -q && git add data/source && git -c user.name=me -c user.email=me@here commit -q -m first")
    return workspace


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (f"echo >> {SOURCE} && git add data/source", "holds other bytes than git has: config.json"),
        (f"rm {SOURCE}", "lacks config.json"),
        ("touch data/source/notes~ && git add data/source", "has notes~ besides"),
        ("touch data/source/notes~ && echo '*~' > .gitignore", "has notes~ besides"),
    ],
)
def test_a_changed_source_is_restored_where_git_has_what_was_read(in_git: Path, damage: str, problem: str) -> None:
    run(in_git, damage)
    path, problems, command = only_finding(in_git)
    assert (path, problems) == ("data/source", f"is not what base@vlm read; {problem}")
    assert command.endswith("# or, where it was changed on purpose: dvc repro base@vlm")
    fix(in_git, command)


def test_files_that_git_never_had_are_not_removed(in_git: Path) -> None:
    """Photographs beside committed files: one of them is damaged, and git would call all of them strays."""
    run(in_git, "touch data/source/photo data/source/other && dvc repro -q base@vlm")
    (in_git / "data/source/photo").write_text("damaged")
    finding = found(in_git)["data/source"]
    assert finding.problems == ("is not what base@vlm read",)
    assert "git" not in finding.fix
