"""Each kind of damage is named, with the command that fixes it; and the command does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zc.lockfile import LockFile

from stages.core.errors import UserError
from stages.core.lineage import read_lineage, write_lineage
from stages.kit.mixture.certificate import BuildCertificate, Change, Domain, RoutingByLayer, write_build_certificate
from stages.kit.models.certificate import read_certificate, write_certificate
from tests.tools.verify.made_up import ENVIRONMENT, make_workspace, run
from tools.verify import hashing
from tools.verify.__main__ import main
from tools.verify.findings import RESTORE
from tools.verify.verify import restore, verify

TRAINED, MERGED, CERTIFICATE = (f"data/runs/r1/{name}" for name in ("trained", "merged", "merge.json"))
ADAPTER = f"{TRAINED}/adapter/adapter_model.safetensors"
RECORD = "data/provenance/detection/train@r1.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("made") / "a workspace")


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Path:
    """A moved copy to damage, in which nothing is linked."""
    return Path(shutil.copytree(made, tmp_path / "moved workspace"))


@pytest.fixture
def linked(workspace: Path) -> Path:
    """Workspace and cache are the same files: a bit that flips in one flips in the other."""
    for path in (workspace / "data").rglob("*"):
        if path.is_file() and "source" not in path.parts:
            same = cached(workspace, path)
            path.unlink()
            os.link(same, path)
    return workspace


@pytest.fixture
def unknown_to_dvc(workspace: Path) -> Path:
    shutil.rmtree(workspace / ".dvc")
    (workspace / "dvc.lock").unlink()
    return workspace


def cached(workspace: Path, path: Path | str) -> Path:
    digest = hashlib.md5((workspace / path).read_bytes(), usedforsecurity=False).hexdigest()
    return workspace / ".dvc/cache/files/md5" / digest[:2] / digest[2:]


def flip(path: Path, position: int = -1) -> None:
    """As an ageing disk does: size and time stay the same."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def only_finding(workspace: Path) -> tuple[str, str, str]:
    """(path, problems, the command)."""
    (finding,) = verify(workspace).findings
    return finding.path, "; ".join(finding.problems), finding.fix


def fix(workspace: Path, command: str) -> None:
    """Follow the command to the letter, and look again."""
    run(workspace, command.replace(RESTORE, f"{sys.executable} -m tools.verify --restore"))
    assert verify(workspace).findings == ()


def while_reading(patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Have something happen between the listing of files and their reading."""

    def hash_files(wanted: Mapping[Path, Iterable[hashing.Algorithm]]) -> tuple[dict[Path, hashing.FileDigests], int]:
        action()
        return hashing.hash_files(wanted)

    patch.setattr("tools.verify.snapshot.hash_files", hash_files)


def command_line(workspace: Path, *args: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        patch.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards
        return CliRunner().invoke(main, args)


def test_a_healthy_workspace_is_healthy_wherever_it_lies(workspace: Path, linked: Path) -> None:
    found = verify(workspace)
    assert (found.findings, found.absent, found.has_cache) == ((), 0, True)
    assert list(found.checked.items()) == [
        ("file", 13 + 15),
        ("output", 7),
        ("cached object", 15),
        ("model folder", 3),
        ("root model", 1),
        ("certificate", 1),
        ("record", 2),
    ]
    assert verify(linked).findings == ()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found(made: Path, data: st.DataObject) -> None:
    kept = [path for folder in ("data", ".dvc/cache/files") for path in (made / folder).rglob("*") if path.is_file()]
    path = data.draw(st.sampled_from(sorted(path for path in kept if path.stat().st_size)))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(path, position)
    try:
        shown = str(path.relative_to(made))
        findings = verify(made).findings
        assert any(
            shown.startswith(each.path) or any(shown in problem for problem in each.problems) for each in findings
        )
    finally:
        flip(path, position)


# In the workspace alone.


@pytest.mark.parametrize(
    ("damage", "file", "output", "problem"),
    [
        (flip, "data/bases/vlm/model.safetensors", "data/bases/vlm", "holds other bytes than dvc.lock has: model.safe"),
        (flip, ADAPTER, TRAINED, "its lineage has content"),
        (
            lambda path: os.truncate(path, path.stat().st_size - 4),
            ADAPTER,
            TRAINED,
            "adapter_model.safetensors (not a whole safetensors file: ",
        ),
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
    assert path == output
    assert problem in problems
    assert command == f"rm -rf {output} && dvc checkout {output}"


@pytest.mark.parametrize("path", ["data/bases", CERTIFICATE])
def test_what_another_output_refers_to_is_missing(workspace: Path, path: str) -> None:
    shutil.move(workspace / path, workspace / "elsewhere")
    output, problem, command = only_finding(workspace)
    assert command == f"dvc checkout {output}"
    role, referrer = ("base", TRAINED) if path == "data/bases" else ("certificate", MERGED)
    assert problem.startswith(f"is not here, though it is the {role} of {referrer}")


def test_a_base_that_no_stage_makes_is_missing(workspace: Path) -> None:
    """Its recipe was renamed, or only a part of data/ was copied."""
    run(workspace, "mv data/runs/r1 data/runs/r2 && rm -rf data/bases && sed -i s/r1:/r2:/ params.yaml")
    run(workspace, "rm dvc.lock && sed -i '/data.bases.vlm]/s/data.bases.vlm/data\\/elsewhere/' dvc.yaml")
    found = {finding.path: finding for finding in verify(workspace).findings}
    assert found.keys() == {"data/runs/r2/trained", "data/runs/r2/merged"}
    trained = found["data/runs/r2/trained"]
    problem = "its base data/bases/vlm is not here, and no stage makes that; where you have it, put it there"
    assert (trained.problems, trained.fix) == ((problem,), "dvc repro -f -s train@r2")
    (workspace / "dvc.yaml").unlink()
    for _ in range(2):
        first, *_ = verify(workspace).findings
        assert first.fix == f"rm -rf {first.path}  # no stage of dvc.yaml makes it"
        run(workspace, first.fix)
    assert verify(workspace).findings == ()


# In DVC's cache.


def test_a_damaged_object_is_restored_from_the_workspace(workspace: Path) -> None:
    damaged = cached(workspace, ADAPTER)
    flip(damaged)
    assert only_finding(workspace) == (
        TRAINED,
        f"damaged in DVC's cache: {damaged.relative_to(workspace)}",
        RESTORE,
    )
    fix(workspace, RESTORE)
    assert damaged.stat().st_mode & 0o777 == 0o444


def test_missing_objects_and_listings_of_folders_are_restored(workspace: Path) -> None:
    missing = cached(workspace, ADAPTER)
    missing.unlink()
    for listing in (workspace / ".dvc/cache/files/md5").rglob("*.dir"):
        flip(listing, 5)
    found = verify(workspace)
    assert [finding.path for finding in found.findings] == ["data/bases/vlm", TRAINED, MERGED]
    assert {finding.fix for finding in found.findings} == {RESTORE}
    assert f"missing in DVC's cache: {missing.relative_to(workspace)}" in found.findings[1].problems
    restore(found.restorable)
    assert verify(workspace).findings == ()


def test_damage_in_cache_and_workspace_is_made_again_without_the_damaged_object(linked: Path) -> None:
    """Were it still there, DVC would take it for what the stage has made again."""
    damaged = cached(linked, ADAPTER)
    flip(damaged)
    path, problem, command = only_finding(linked)
    assert path == TRAINED
    assert "holds other bytes than dvc.lock has: adapter/adapter_model.safetensors" in problem
    assert command == f"rm -f {damaged.relative_to(linked)} && dvc repro -f -s train@r1"
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
    assert verify(workspace).findings == ()
    lost.unlink()
    path, problem, command = only_finding(workspace)
    assert (path, command) == (TRAINED, "dvc repro -f -s train@r1")
    assert "adapter_model.safetensors (cannot be read: No such file or directory)" in problem


def test_an_object_whose_output_is_not_checked_out_is_read_too(workspace: Path) -> None:
    damaged = cached(workspace, f"{MERGED}/model.safetensors")
    shutil.rmtree(workspace / MERGED)
    (workspace / CERTIFICATE).unlink()
    assert verify(workspace).findings == ()
    flip(damaged)
    path, problem, command = only_finding(workspace)
    assert (path, problem) == (MERGED, f"damaged in DVC's cache: {damaged.relative_to(workspace)}")
    assert command == f"rm -f {damaged.relative_to(workspace)} && dvc repro -f -s merge@r1"


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
    run(workspace, f"{command} && dvc repro")
    assert verify(workspace).findings == ()


def test_a_cache_that_cannot_be_written_to_is_refused(workspace: Path) -> None:
    missing = cached(workspace, ADAPTER)
    missing.unlink()
    found = verify(workspace)
    shutil.rmtree(missing.parent)
    missing.parent.touch()  # root may write where permissions forbid it
    with pytest.raises(UserError, match=r"cannot be put back: File exists; where the disk is full or the cache"):
        restore(found.restorable)


# Sources, which no stage makes.

GIT = "git -c user.name=me -c user.email=me@here"


@pytest.fixture
def in_git(workspace: Path) -> Path:
    run(workspace, f"git init -q && git add data/source && {GIT} commit -q -m first")
    return workspace


def test_a_changed_source_is_named_with_its_readers(workspace: Path) -> None:
    """Without git nobody has what it was."""
    flip(workspace / "data/source/config.json")
    path, problem, command = only_finding(workspace)
    assert (path, problem) == ("data/source", "is not what base@vlm read")
    assert command.startswith("dvc repro base@vlm  # or put back what it was")
    (workspace / "data/source/config.json").unlink()
    assert only_finding(workspace)[0] == "data/source"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("echo >> data/source/config.json && git add data/source", "holds other bytes than git has: config.json"),
        ("rm data/source/config.json", "lacks config.json"),
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
    _, problem, command = next(
        (each.path, each.problems, each.fix) for each in verify(in_git).findings if each.path == "data/source"
    )
    assert problem == ("is not what base@vlm read",)
    assert "git" not in command


# Records, lineages and certificates.


def test_a_wrong_certificate_is_found(unknown_to_dvc: Path) -> None:
    path = unknown_to_dvc / CERTIFICATE
    good = read_certificate(path, "r1")
    for bad, said in (
        (replace(good, merged_digest="0" * 64), f"certifies content 000000000000, but {MERGED} holds "),
        (replace(good, logit_deviation=float("nan")), "certifies a failure: logits deviate"),
    ):
        write_certificate(bad, path)
        _, problem, command = only_finding(unknown_to_dvc)
        assert said in problem
        assert command == "dvc repro -f -s merge@r1"


def test_a_build_is_compared_with_its_certificate(tmp_path: Path) -> None:
    base_dir, built = tmp_path / "data/bases/vlm", tmp_path / "data/builds/moe"
    for folder in (base_dir, built):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    base = write_lineage(base_dir, kind="base", name="vlm", source={"random": "tiny"})
    lineage = write_lineage(built, kind="built", name="moe", parents={"base": (base_dir, base)})
    routing = RoutingByLayer(tokens=1, weight_by_layer=[], entropy_by_layer=[], weight=[], entropy=0.0)
    domain = Domain(probes=1, deviation={}, forced_deviation=0.0, routing=routing)
    good = BuildCertificate(
        build="moe",
        built_digest=lineage.digest,
        precision="fp32",
        top_k=2,
        router_init="uniform",
        non_mlp="base",
        changes={"a": Change(mlp=1.0, outside=0.0)},
        tolerance=1e-5,
        domains={"a": domain},
    )
    path = tmp_path / "data/builds/moe.json"
    (tmp_path / "dvc.yaml").write_text("stages: {build: {cmd: none, outs: [data/builds/moe, data/builds/moe.json]}}")
    (tmp_path / "params.yaml").write_text("{}")
    assert only_finding(tmp_path)[0] == "data/builds/moe.json"
    write_build_certificate(good, path)
    assert verify(tmp_path).findings == ()
    for certificate, said in (
        (replace(good, built_digest="0" * 64), "certifies content 000000000000"),
        (replace(good, domains={"a": replace(domain, forced_deviation=1.0)}), "certifies a failure: expert a alone"),
    ):
        write_build_certificate(certificate, path)
        where, problem, _ = only_finding(tmp_path)
        assert where == "data/builds/moe.json"
        assert problem.startswith(said)


def test_lineages_are_checked_down_to_their_root_without_dvc(unknown_to_dvc: Path) -> None:
    trained = unknown_to_dvc / TRAINED
    assert verify(unknown_to_dvc).findings == ()
    flip(unknown_to_dvc / ADAPTER)
    path, problem, command = only_finding(unknown_to_dvc)
    assert (path, command) == (TRAINED, "dvc repro -f -s train@r1")
    assert problem.startswith("its lineage has content")
    # Written so that its own digest is right.
    other = replace(read_lineage(trained).parents["base"].lineage, digest="1" * 64)
    write_lineage(trained, kind="trained", name="r1", parents={"base": (unknown_to_dvc / "data/bases/vlm", other)})
    findings = {finding.path: finding for finding in verify(unknown_to_dvc).findings}
    (problem,) = findings[TRAINED].problems
    assert problem.startswith("its base was data/bases/vlm with content 111111111111, which now holds ")
    write_lineage(trained, kind="trained", name="r1")
    findings = {finding.path: finding for finding in verify(unknown_to_dvc).findings}
    assert "ends without saying where it comes from" in findings[TRAINED].problems[0]


def test_a_record_of_other_outputs_is_found(unknown_to_dvc: Path) -> None:
    record = unknown_to_dvc / RECORD
    edit(record, outputs={**json.loads(record.read_text())["outputs"], TRAINED: "2" * 64})
    path, problem, command = only_finding(unknown_to_dvc)
    assert (path, command) == (RECORD, "dvc repro -f -s train@r1")
    assert f"records {TRAINED} with content 222222222222, which now holds" in problem
    record.write_text("{")
    assert "is damaged" in only_finding(unknown_to_dvc)[1]


def test_a_stage_that_read_a_damaged_input_is_found_although_the_input_was_fixed_since(workspace: Path) -> None:
    edit(workspace / RECORD, inputs={"data/bases/vlm": "3" * 64})
    run(workspace, "dvc commit -q -f train@r1")
    path, problem, command = only_finding(workspace)
    assert (path, command) == (RECORD, "dvc repro -f -s train@r1")
    assert problem.startswith(
        "records that data/bases/vlm had content 333333333333 when it was read, and base@vlm left "
    )


def test_the_record_of_a_stage_that_is_out_of_date_is_no_damage(workspace: Path) -> None:
    """An interrupted `dvc repro`: its input was made again, and DVC itself knows that the stage is out of date."""
    (workspace / "data/source/config.json").write_text("[]")
    run(workspace, "dvc repro base@vlm")
    found = {finding.path: finding for finding in verify(workspace).findings}
    assert not any(path.startswith("data/provenance") for path in found)
    assert found[TRAINED].fix == "dvc repro -f -s train@r1"


def train_again(workspace: Path) -> None:
    """With another seed, by a DVC that is killed before it records the result."""
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("seed: 1", "seed: 2"))
    run(workspace, "python -m tests.tools.verify.made_up train r1")


def test_a_result_that_a_killed_dvc_did_not_record_is_kept(workspace: Path) -> None:
    train_again(workspace)
    found = [finding for finding in verify(workspace).findings if finding.path != MERGED]
    assert [finding.path for finding in found] == [RECORD, TRAINED, "data/runs/r1/training/training.json"]
    assert {finding.problems for finding in found} == {
        ("is newer than dvc.lock, and what the record of train@r1 describes: dvc was ended too early",)
    }
    command, _, comment = found[0].fix.partition("  # ")
    assert command == "dvc repro train@r1"
    commit = comment.rpartition(": ")[2]
    adapter = (workspace / ADAPTER).read_bytes()
    run(workspace, commit)
    assert (workspace / ADAPTER).read_bytes() == adapter
    fix(workspace, only_finding(workspace)[2])


def test_a_damaged_newer_result_is_not_taken_for_intact(workspace: Path) -> None:
    train_again(workspace)
    flip(workspace / ADAPTER)
    trained = next(finding for finding in verify(workspace).findings if finding.path == TRAINED)
    assert "holds other bytes than dvc.lock has: adapter/adapter_model.safetensors" in trained.problems[0]
    assert "newer" not in " ".join(trained.problems)


# No damage.


def test_only_what_is_there_is_checked(workspace: Path) -> None:
    shutil.rmtree(workspace / MERGED)
    (workspace / CERTIFICATE).unlink()
    shutil.rmtree(workspace / ".dvc/cache")
    found = verify(workspace)
    assert (found.findings, found.absent, found.has_cache) == ((), 2, False)
    flip(workspace / ADAPTER)
    assert only_finding(workspace)[2] == "dvc repro -f -s train@r1"


def test_what_stages_write_meanwhile_is_no_damage(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = workspace / "data/runs/r1/.trained.partial"  # left by a killed stage
    partial.mkdir()
    (partial / "lineage.json").write_text("{")
    while_reading(monkeypatch, (workspace / TRAINED / "late").touch)
    assert verify(workspace).findings == ()


def test_a_folder_that_no_stage_makes_any_more_is_checked_by_its_lineage(workspace: Path) -> None:
    stray = workspace / "data/runs/r0/trained"
    shutil.copytree(workspace / TRAINED, stray)
    assert verify(workspace).findings == ()
    flip(stray / "thử nghiệm.txt")
    path, _, command = only_finding(workspace)
    assert (path, command) == ("data/runs/r0/trained", "rm -rf data/runs/r0/trained  # no stage of dvc.yaml makes it")


def test_an_empty_workspace_is_healthy_and_another_folder_is_refused(tmp_path: Path) -> None:
    found = verify(tmp_path)
    assert (found.findings, sum(found.checked.values())) == ((), 0)
    refused = command_line(tmp_path)
    assert refused.exit_code == 1
    assert "run from the top of the repository" in refused.output


# dvc.lock.


@pytest.mark.parametrize(
    "text",
    ["", "stages: [1", "\x00", "schema: '2.0'\nstages: {base@vlm: {cmd: x, outs: [{md5: 'a'}]}}\n"],
)
def test_a_damaged_lock_file_is_refused(workspace: Path, text: str) -> None:
    (workspace / "dvc.lock").write_text(text)
    with pytest.raises(UserError, match=r"(?s)dvc\.lock is damaged.*\n  fix it with: git checkout HEAD -- dvc\.lock "):
        verify(workspace)


def test_a_lock_file_that_was_cut_off_comes_back_from_the_run_cache(workspace: Path) -> None:
    lock = workspace / "dvc.lock"
    whole = lock.read_bytes()
    lock.write_bytes(whole[: whole.index(b"hash: ") + 6])
    with pytest.raises(UserError, match="is damaged") as error:
        verify(workspace)
    command = error.value.message.partition("fix it with: ")[2].partition("  #")[0]
    run(workspace, f"{command} && dvc repro")
    assert lock.read_bytes() == whole


def test_an_output_that_the_lock_file_lost_is_named(workspace: Path) -> None:
    lock = workspace / "dvc.lock"
    before, _, after = lock.read_text().partition("    outs:\n    - path: data/bases/vlm\n")
    lock.write_text(f"{before}    outs:\n    - path: data/bases/vln\n{after}")
    path, problem, command = only_finding(workspace)
    assert (path, command) == ("dvc.lock", "dvc repro base@vlm")
    assert problem == (
        "has base@vlm without data/bases/vlm, but data/bases/vln, which dvc.yaml does not declare; "
        "it is older than dvc.yaml, or damaged"
    )
    fix(workspace, command)


def test_outputs_that_were_declared_or_removed_since_are_no_damage(workspace: Path) -> None:
    pipeline = workspace / "dvc.yaml"
    before, _, _ = pipeline.read_text().partition("  merge:")
    before = before.partition("      metrics:")[0]
    pipeline.write_text(before.replace("outs: [", "outs: [data/bases/new, "))
    (workspace / "data/runs/r1/training/training.json").write_text("another stage's by now")
    assert [finding.path for finding in verify(workspace).findings] == [RECORD]
    (workspace / "data/bases/new").touch()
    lock = next(finding for finding in verify(workspace).findings if finding.path == "dvc.lock")
    assert lock.problems == ("has base@vlm without data/bases/new", "it is older than dvc.yaml, or damaged")
    assert lock.fix == "dvc repro base@vlm"


# While DVC runs.


def test_while_dvc_runs_a_stage_verify_is_refused(workspace: Path) -> None:
    with (workspace / "dvc.yaml").open("a") as file:
        file.write("  long:\n    cmd: touch asleep && exec sleep 100\n    outs: [data/long]\n")
    command = [sys.executable, "-m", "dvc", "repro", "long"]
    dvc = subprocess.Popen(command, cwd=workspace, env=ENVIRONMENT, start_new_session=True)
    try:
        while not (workspace / "asleep").exists():
            assert dvc.poll() is None
            time.sleep(0.05)
        with pytest.raises(UserError, match=rf"dvc is running in .* \(pid {dvc.pid}\)"):
            verify(workspace)
    finally:
        os.killpg(dvc.pid, signal.SIGKILL)
        dvc.wait()
    users = (workspace / ".dvc/tmp/rwlock").read_text()
    assert str(dvc.pid) in users
    assert verify(workspace).findings == ()
    # Another process has the number by now.
    (workspace / ".dvc/tmp/rwlock").write_text(users.replace(str(dvc.pid), str(os.getppid())))
    assert verify(workspace).findings == ()


def test_between_its_stages_dvc_is_running_too(workspace: Path) -> None:
    lock = LockFile(str(workspace / ".dvc/tmp/lock"))
    with pytest.raises(UserError, match=rf"dvc is running in .* \(pid {os.getpid()}\)"):
        verify(workspace)
    lock.close()
    assert verify(workspace).findings == ()


def test_damage_that_was_found_while_dvc_started_is_not_reported(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(workspace / ADAPTER)
    locks: list[LockFile] = []
    while_reading(monkeypatch, lambda: locks.append(LockFile(str(workspace / ".dvc/tmp/lock"))))
    with pytest.raises(UserError, match="dvc is running"):
        verify(workspace)
    locks[0].close()


# The command.


def test_the_command_ends_with_0_and_a_tally_or_with_1_and_a_list(workspace: Path) -> None:
    healthy = command_line(workspace)
    assert (healthy.exit_code, healthy.stderr) == (0, "")
    (line,) = healthy.stdout.splitlines()
    assert line.startswith("all is as recorded. ")
    assert "7 outputs, 15 cached objects, 3 model folders, 1 root model, 1 certificate, 2 records" in line
    for file in (f"{MERGED}/model.safetensors", "data/bases/vlm/model.safetensors"):
        flip(workspace / file)
    damaged = command_line(workspace)
    assert damaged.exit_code == 1
    first, *_, last = damaged.stdout.splitlines()
    assert first == "data/bases/vlm"  # the order of the pipeline
    assert f"\n{MERGED}\n  holds other bytes" in damaged.stdout
    assert f"\n  fix it with: rm -rf {MERGED} && dvc checkout {MERGED}\n" in damaged.stdout
    assert last.startswith("DAMAGED: 2 things, to be fixed from the top. ")
