"""Each kind of damage is named, with the command that mends it; and the command does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zc.lockfile import LockFile

from stages.core.errors import UserError
from stages.core.lineage import read_lineage, write_lineage
from stages.kit.mixture.certificate import BuildCertificate, Change, Domain, RoutingByLayer, write_build_certificate
from stages.kit.models.certificate import read_certificate, write_certificate
from tests import ROOT
from tests.tools.verify.made_up import ENVIRONMENT, make_workspace, run
from tools.verify.damage import RESTORE
from tools.verify.verify import restore, verify

ADAPTER = "data/runs/r1/trained/adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("made") / "a workspace")


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Path:
    """A moved copy, in which nothing is linked, to damage."""
    return Path(shutil.copytree(made, tmp_path / "moved workspace"))


@pytest.fixture
def linked(workspace: Path) -> Path:
    """One in which a model lies once on the disk: what flips in the cache, flips in the workspace."""
    for path in (workspace / "data").rglob("*"):
        same = cached(workspace, path) if path.is_file() and "source" not in path.parts else None
        if same is not None:
            path.unlink()
            os.link(same, path)
    return workspace


@pytest.fixture
def unknown_to_dvc(workspace: Path) -> Path:
    shutil.rmtree(workspace / ".dvc")
    (workspace / "dvc.lock").unlink()
    return workspace


def cached(workspace: Path, path: Path) -> Path:
    digest = hashlib.md5((workspace / path).read_bytes(), usedforsecurity=False).hexdigest()
    return workspace / ".dvc/cache/files/md5" / digest[:2] / digest[2:]


def flip(path: Path, position: int = -1) -> None:
    """As an ageing disk does: neither size nor time tell."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def only_damage(workspace: Path) -> tuple[str, str, str]:
    """(path, what was found, the command)."""
    (damage,) = verify(workspace).damages
    return damage.path, "; ".join(damage.found), damage.mend


def mend(workspace: Path, command: str) -> None:
    """Follow the command to the letter, and look again."""
    run(workspace, command.replace(RESTORE, f"{sys.executable} -m tools.verify --restore"))
    assert verify(workspace).damages == ()


def test_a_healthy_workspace_is_healthy_wherever_it_lies(workspace: Path, linked: Path) -> None:
    found = verify(workspace)
    assert found.damages == ()
    assert (found.absent, found.has_cache) == (0, True)
    assert found.checked == {
        "file": 13 + 15,
        "output": 7,
        "cached object": 15,
        "model folder": 3,
        "root model": 1,
        "certificate": 1,
        "record": 2,
    }
    assert verify(linked).damages == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found(made: Path, data: st.DataObject) -> None:
    kept = [path for folder in ("data", ".dvc/cache/files") for path in (made / folder).rglob("*") if path.is_file()]
    path = data.draw(st.sampled_from(sorted(path for path in kept if path.stat().st_size)))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(path, position)
    try:
        damages = verify(made).damages
        assert any(str(path.relative_to(made)).startswith(damage.path) for damage in damages) or any(
            str(path.relative_to(made)) in found for damage in damages for found in damage.found
        )
    finally:
        flip(path, position)


def test_a_flipped_byte_in_the_cache_is_put_right_from_the_workspace(workspace: Path) -> None:
    damaged = cached(workspace, Path(ADAPTER))
    flip(damaged)
    path, found, command = only_damage(workspace)
    assert (path, command) == ("data/runs/r1/trained", RESTORE)
    assert found == f"damaged in DVC's cache: {damaged.relative_to(workspace)}"
    mend(workspace, command)
    assert damaged.stat().st_mode & 0o777 == 0o444


def test_a_flipped_byte_in_cache_and_workspace_is_made_anew_after_the_object_has_gone(linked: Path) -> None:
    """Were it still there, DVC would take it for what the stage has made again."""
    damaged = cached(linked, Path(ADAPTER))
    flip(damaged)
    path, found, command = only_damage(linked)
    assert path == "data/runs/r1/trained"
    assert "holds other bytes than dvc.lock has: adapter/adapter_model.safetensors" in found
    assert "its lineage has content" in found
    assert command == f"rm -f {damaged.relative_to(linked)} && dvc repro -f -s train@r1"
    mend(linked, command)


@pytest.mark.parametrize(
    ("damage", "file", "output", "said"),
    [
        (flip, "data/bases/vlm/model.safetensors", "data/bases/vlm", "holds other bytes than dvc.lock has: model.safe"),
        (flip, ADAPTER, "data/runs/r1/trained", "its lineage has content"),
        (truncate, ADAPTER, "data/runs/r1/trained", "adapter_model.safetensors (not a whole safetensors file: "),
        (Path.unlink, ADAPTER, "data/runs/r1/trained", "lacks adapter/adapter_model.safetensors"),
        (flip, "data/runs/r1/trained/thử nghiệm.txt", "data/runs/r1/trained", "thử nghiệm.txt"),
        (flip, "data/runs/r1/training/training.json", "data/runs/r1/training/training.json", "other bytes"),
        (lambda path: edit(path, digest="0" * 64), "data/runs/r1/merged/lineage.json", "data/runs/r1/merged", "seal: "),
        (lambda path: path.write_text("{"), "data/runs/r1/merged/lineage.json", "data/runs/r1/merged", "is damaged: "),
        (lambda path: edit(path, tolerance=9), "data/runs/r1/merge.json", "data/runs/r1/merge.json", "other bytes"),
        (
            lambda path: path.write_text(""),
            "data/runs/r1/merge.json",
            "data/runs/r1/merge.json",
            "merge.json is damaged",
        ),
        (
            lambda path: (path / "stray").touch(),
            "data/runs/r1/merged",
            "data/runs/r1/merged",
            "has stray besides",
        ),
    ],
)
def test_damage_in_the_workspace_is_named_and_brought_back_from_the_cache(
    workspace: Path, damage: Callable[[Path], object], file: str, output: str, said: str
) -> None:
    damage(workspace / file)
    path, found, command = only_damage(workspace)
    assert path == output
    assert said in found
    assert command == f"rm -rf {output} && dvc checkout {output}"


def test_what_is_damaged_in_the_workspace_alone_comes_back(workspace: Path) -> None:
    """DVC itself sees nothing: time and size are as it knows them."""
    flip(workspace / ADAPTER)
    mend(workspace, only_damage(workspace)[2])


def test_a_link_into_a_cache_that_lost_the_object_leads_nowhere(workspace: Path) -> None:
    """With cache.type symlink."""
    lost = cached(workspace, Path(ADAPTER))
    (workspace / ADAPTER).unlink()
    (workspace / ADAPTER).symlink_to(lost)
    assert verify(workspace).damages == ()
    lost.unlink()
    path, found, command = only_damage(workspace)
    assert (path, command) == ("data/runs/r1/trained", "dvc repro -f -s train@r1")
    assert "adapter_model.safetensors (cannot be read: No such file or directory)" in found


def test_a_missing_object_is_named_and_put_back(workspace: Path) -> None:
    missing = cached(workspace, Path(ADAPTER))
    missing.unlink()
    found = verify(workspace)
    (damage,) = found.damages
    assert damage.found == (f"missing in DVC's cache: {missing.relative_to(workspace)}",)
    assert (damage.path, damage.mend) == ("data/runs/r1/trained", RESTORE)
    restore(found.restorable)
    assert verify(workspace).damages == ()


def test_the_object_that_lists_a_folder_is_put_back_too(workspace: Path) -> None:
    for listing in (workspace / ".dvc/cache/files/md5").rglob("*.dir"):
        flip(listing, 5)
    found = verify(workspace)
    assert [damage.path for damage in found.damages] == [
        "data/bases/vlm",
        "data/runs/r1/trained",
        "data/runs/r1/merged",
    ]
    assert {damage.mend for damage in found.damages} == {RESTORE}
    restore(found.restorable)
    assert verify(workspace).damages == ()


def test_damage_here_and_other_damage_there_are_both_mended(workspace: Path) -> None:
    flip(workspace / ADAPTER)
    flip(cached(workspace, Path("data/runs/r1/trained/lineage.json")))
    assert only_damage(workspace)[2] == RESTORE
    said = command_line(workspace, "--restore")
    assert said.returncode == 1
    path, _, command = only_damage(workspace)
    assert f"mend it with: {command}" in said.stdout
    assert command == f"rm -rf {path} && dvc checkout {path}"


def test_what_is_missing_in_the_cache_and_damaged_here_is_made_anew(workspace: Path) -> None:
    cached(workspace, Path(ADAPTER)).unlink()
    flip(workspace / ADAPTER)
    _, _, command = only_damage(workspace)
    assert command == "dvc repro -f -s train@r1"
    mend(workspace, command)


def test_what_lies_in_the_cache_alone_is_looked_at_too(workspace: Path) -> None:
    damaged = cached(workspace, Path("data/runs/r1/merged/model.safetensors"))
    shutil.rmtree(workspace / "data/runs/r1/merged")
    (workspace / "data/runs/r1/merge.json").unlink()
    flip(damaged)
    path, found, command = only_damage(workspace)
    assert (path, found) == ("data/runs/r1/merged", f"damaged in DVC's cache: {damaged.relative_to(workspace)}")
    assert command == f"rm -f {damaged.relative_to(workspace)} && dvc repro -f -s merge@r1"


def test_an_object_of_another_experiment_is_simply_removed(workspace: Path) -> None:
    stray = workspace / ".dvc/cache/files/md5/ab" / ("0" * 30)
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("not of that name")
    path, found, command = only_damage(workspace)
    assert path == str(stray.relative_to(workspace))
    assert "no output of dvc.lock needs it" in found
    mend(workspace, command)


def test_a_changed_note_of_the_run_cache_is_removed_with_its_folder_and_dvc_goes_on(workspace: Path) -> None:
    note = min((workspace / ".dvc/cache/runs").glob("*/*/*"))
    for text in (note.read_text().replace("md5: ", "md5: 0", 1), "", "{"):
        note.write_text(text)
        path, found, command = only_damage(workspace)
        assert path == str(note.parent.relative_to(workspace))
        assert note.name in found
    mend(workspace, command)
    run(workspace, "rm dvc.lock && dvc repro")


def test_a_folder_that_a_killed_dvc_left_empty_in_its_run_cache_is_named_and_dvc_goes_on(workspace: Path) -> None:
    note = min((workspace / ".dvc/cache/runs").glob("*/*/*"))
    note.unlink()
    path, found, command = only_damage(workspace)
    assert path == str(note.parent.relative_to(workspace))
    assert found.startswith("is empty, where DVC was killed; it then ends with: join() argument must be str")
    (workspace / "dvc.lock").unlink()
    with pytest.raises(AssertionError, match=r"join\(\) argument must be str"):  # until DVC mends that
        run(workspace, "dvc repro")
    run(workspace, f"{command} && dvc repro")
    assert verify(workspace).damages == ()


def test_changed_sources_are_named_with_who_read_them(workspace: Path) -> None:
    """Without git nobody has what they were."""
    flip(workspace / "data/source/config.json")
    path, found, command = only_damage(workspace)
    assert (path, found) == ("data/source", "is not what base@vlm read")
    assert command.startswith("dvc repro base@vlm  # or put back what it was")
    (workspace / "data/source/config.json").unlink()
    assert only_damage(workspace)[0] == "data/source"


GIT = "git -c user.name=me -c user.email=me@here"


@pytest.fixture
def in_git(workspace: Path) -> Path:
    run(workspace, f"git init -q && git add data/source && {GIT} commit -q -m first")
    return workspace


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("echo >> data/source/config.json", "holds other bytes than git has: config.json"),
        ("echo >> data/source/config.json && git add data/source", "holds other bytes than git has: config.json"),
        ("rm data/source/config.json", "lacks config.json"),
        ("touch data/source/notes~", "has notes~ besides"),
        ("touch data/source/notes~ && git add data/source", "has notes~ besides"),
        ("touch data/source/notes~ && echo '*~' > .gitignore", "has notes~ besides"),
    ],
)
def test_files_of_a_changed_source_are_named_and_brought_back_where_git_has_what_was_read(
    in_git: Path, damage: str, said: str
) -> None:
    run(in_git, damage)
    path, found, command = only_damage(in_git)
    assert (path, found) == ("data/source", f"is not what base@vlm read; {said}")
    assert command.endswith("# or, where it was changed on purpose: dvc repro base@vlm")
    mend(in_git, command)


def test_what_git_never_had_is_not_removed_because_of_what_lies_beside_it(in_git: Path) -> None:
    """Photographs, put there by hand: one of them is damaged, and git would call all of them strays."""
    run(in_git, "touch data/source/photo data/source/other && dvc repro -q")
    assert verify(in_git).damages == ()
    (in_git / "data/source/photo").write_text("damaged")
    _, found, command = only_damage(in_git)
    assert found == "is not what base@vlm read"
    assert "git" not in command


def test_a_source_that_was_committed_anew_is_read_anew(in_git: Path) -> None:
    run(in_git, f"echo >> data/source/config.json && {GIT} commit -qam second")
    assert only_damage(in_git)[2].startswith("dvc repro base@vlm")
    run(in_git, "dvc repro")
    assert verify(in_git).damages == ()


def test_a_certificate_of_other_content_is_worth_nothing(unknown_to_dvc: Path) -> None:
    workspace = unknown_to_dvc
    path = workspace / "data/runs/r1/merge.json"
    good = read_certificate(path, "r1")
    for bad, said in (
        (replace(good, merged_digest="0" * 64), "certifies content 000000000000, but data/runs/r1/merged holds "),
        (replace(good, logit_deviation=float("nan")), "certifies a failure: logits deviate"),
    ):
        write_certificate(bad, path)
        _, found, command = only_damage(workspace)
        assert said in found
        assert command == "dvc repro -f -s merge@r1"


def test_what_dvc_has_just_as_it_is_is_left_to_its_stage_to_mend(workspace: Path) -> None:
    path = workspace / "data/runs/r1/merge.json"
    edit(path, merged_digest="0" * 64)
    run(workspace, "dvc commit -q -f merge@r1")
    _, found, command = only_damage(workspace)
    assert found.startswith("certifies content 000000000000")
    mend(workspace, command)


def test_a_build_is_held_to_its_certificate(tmp_path: Path) -> None:
    base_dir, built = tmp_path / "data/bases/vlm", tmp_path / "data/builds/moe"
    for folder in (base_dir, built):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    base = write_lineage(base_dir, kind="base", name="vlm", source={"random": "tiny"})
    lineage = write_lineage(built, kind="built", name="moe", parents={"base": (base_dir, base)})
    routing = RoutingByLayer(
        tokens=1, first_by_layer=[], weight_by_layer=[], entropy_by_layer=[], first=[], weight=[], entropy=0.0
    )
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
    assert only_damage(tmp_path)[0] == "data/builds/moe.json"
    write_build_certificate(good, path)
    assert verify(tmp_path).damages == ()
    for certificate, said in (
        (replace(good, built_digest="0" * 64), "certifies content 000000000000"),
        (replace(good, domains={"a": replace(domain, forced_deviation=1.0)}), "certifies a failure: expert a alone"),
    ):
        write_build_certificate(certificate, path)
        where, found, _ = only_damage(tmp_path)
        assert where == "data/builds/moe.json"
        assert found.startswith(said)


def test_a_lineage_is_walked_to_its_root(unknown_to_dvc: Path) -> None:
    """Each edited so that its own digest is right."""
    workspace = unknown_to_dvc
    trained = workspace / "data/runs/r1/trained"
    lineage = read_lineage(trained)
    other = replace(lineage.parents["base"].lineage, digest="1" * 64)
    write_lineage(trained, kind="trained", name="r1", parents={"base": (workspace / "data/bases/vlm", other)})
    path, found, command = only_damage(workspace)
    assert (path, command) == ("data/runs/r1/trained", "dvc repro -f -s train@r1")
    assert found.startswith("its base was data/bases/vlm with content 111111111111, which now holds ")
    write_lineage(trained, kind="trained", name="r1")
    assert "ends without saying where it comes from" in only_damage(workspace)[1]


def test_a_base_that_is_gone_is_missed_by_what_was_made_of_it(workspace: Path) -> None:
    shutil.rmtree(workspace / "data/bases")
    path, found, command = only_damage(workspace)
    assert (path, command) == ("data/bases/vlm", "dvc checkout data/bases/vlm")
    assert "though it is the base of data/runs/r1/trained" in found


def test_what_lost_a_base_that_no_stage_makes_can_be_ended(workspace: Path) -> None:
    """Its recipe was renamed, or only a part of data/ was copied."""
    run(workspace, "mv data/runs/r1 data/runs/r2 && rm -rf data/bases && sed -i s/r1:/r2:/ params.yaml")
    run(workspace, "rm dvc.lock && sed -i '/data.bases.vlm]/s/data.bases.vlm/data\\/elsewhere/' dvc.yaml")
    found = {damage.path: damage for damage in verify(workspace).damages}
    assert found.keys() == {"data/runs/r2/trained", "data/runs/r2/merged"}
    trained = found["data/runs/r2/trained"]
    assert trained.found == (
        "its base data/bases/vlm is not here, and no stage makes that; where you have it, put it there",
    )
    assert trained.mend == "dvc repro -f -s train@r2"
    (workspace / "dvc.yaml").unlink()
    for _ in range(2):
        first, *_ = verify(workspace).damages
        assert first.mend == f"rm -rf {first.path}  # no stage of dvc.yaml makes it"
        run(workspace, first.mend)
    # The certificate of what was there.
    assert [damage.path for damage in verify(workspace).damages] == []


def test_a_merged_model_without_its_certificate_is_missed(workspace: Path) -> None:
    (workspace / "data/runs/r1/merge.json").unlink()
    path, found, command = only_damage(workspace)
    assert (path, command) == ("data/runs/r1/merge.json", "dvc checkout data/runs/r1/merge.json")
    assert found == "is not here, though it is the certificate of data/runs/r1/merged"


def test_a_record_of_other_outputs_is_found_out(unknown_to_dvc: Path) -> None:
    workspace = unknown_to_dvc
    record = workspace / "data/provenance/detection/train@r1.json"
    content = json.loads(record.read_text())
    edit(record, outputs={**content["outputs"], "data/runs/r1/trained": "2" * 64})
    path, found, command = only_damage(workspace)
    assert (path, command) == ("data/provenance/detection/train@r1.json", "dvc repro -f -s train@r1")
    assert "tells of data/runs/r1/trained with content 222222222222, which now holds" in found
    record.write_text("{")
    assert "is damaged" in only_damage(workspace)[1]


def test_a_record_of_another_input_than_its_stage_left_is_found_out(workspace: Path) -> None:
    """Made of something that was damaged when it was read, and was mended since."""
    record = workspace / "data/provenance/detection/train@r1.json"
    edit(record, inputs={"data/bases/vlm": "3" * 64})
    run(workspace, "dvc commit -q -f train@r1")
    path, found, command = only_damage(workspace)
    assert (path, command) == ("data/provenance/detection/train@r1.json", "dvc repro -f -s train@r1")
    assert found.startswith("tells that data/bases/vlm had content 333333333333 when it was read, and base@vlm left ")
    mend(workspace, command)


def test_what_was_not_made_again_after_its_input_was_has_a_record_like_any_other(workspace: Path) -> None:
    """An interrupted `dvc repro`: DVC itself knows that the stage is out of date."""
    (workspace / "data/source/config.json").write_text("[]")
    run(workspace, "dvc repro base@vlm")
    found = {damage.path: damage for damage in verify(workspace).damages}
    assert not any(path.startswith("data/provenance") for path in found)
    assert found["data/runs/r1/trained"].mend == "dvc repro -f -s train@r1"
    run(workspace, "dvc repro")
    assert verify(workspace).damages == ()


def test_a_result_that_dvc_had_no_time_to_keep_is_no_damage(workspace: Path) -> None:
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("seed: 1", "seed: 2"))
    run(workspace, "python -m tests.tools.verify.made_up train r1")
    found = [damage for damage in verify(workspace).damages if damage.path != "data/runs/r1/merged"]
    assert [damage.path for damage in found] == [
        "data/provenance/detection/train@r1.json",
        "data/runs/r1/trained",
        "data/runs/r1/training/training.json",
    ]
    assert {damage.found for damage in found} == {
        ("is newer than dvc.lock, and what the record of train@r1 tells of: dvc was ended too early",)
    }
    assert {damage.mend.partition("  # ")[0] for damage in found} == {"dvc repro train@r1"}
    kept = Path(shutil.copytree(workspace, workspace.with_name("kept")))
    for folder, command in ((workspace, found[0].mend), (kept, found[0].mend.rpartition(": ")[2])):
        adapter = (folder / ADAPTER).read_bytes()
        run(folder, command)
        assert (folder / ADAPTER).read_bytes() == adapter
        mend(folder, only_damage(folder)[2])


def test_a_damaged_record_beside_intact_outputs_is_brought_back(workspace: Path) -> None:
    """It is no newer result."""
    record = workspace / "data/provenance/detection/train@r1.json"
    edit(record, seconds=2.5)
    path, _, command = only_damage(workspace)
    assert command == f"rm -rf {path} && dvc checkout {path}"
    mend(workspace, command)


def test_a_damaged_newer_result_is_not_taken_for_whole(workspace: Path) -> None:
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("seed: 1", "seed: 2"))
    run(workspace, "python -m tests.tools.verify.made_up train r1")
    flip(workspace / ADAPTER)
    trained = next(damage for damage in verify(workspace).damages if damage.path == "data/runs/r1/trained")
    assert "holds other bytes than dvc.lock has: adapter/adapter_model.safetensors" in trained.found[0]
    assert "newer" not in " ".join(trained.found)


def test_what_appears_while_everything_is_read_is_nobodys_damage(workspace: Path) -> None:
    def appear(_: int) -> None:
        (workspace / "data/runs/r1/trained/late").touch()

    assert verify(workspace, begin=appear).damages == ()


def test_only_what_is_there_is_looked_at(workspace: Path) -> None:
    shutil.rmtree(workspace / "data/runs/r1/merged")
    (workspace / "data/runs/r1/merge.json").unlink()
    assert verify(workspace).damages == ()  # it is in the cache
    shutil.rmtree(workspace / ".dvc/cache")
    found = verify(workspace)
    assert found.damages == ()
    assert (found.absent, found.has_cache) == (2, False)
    flip(workspace / ADAPTER)
    assert only_damage(workspace)[2] == "dvc repro -f -s train@r1"


def test_what_dvc_never_saw_is_held_to_its_own_lineage(unknown_to_dvc: Path) -> None:
    workspace = unknown_to_dvc
    assert verify(workspace).damages == ()
    flip(workspace / ADAPTER)
    path, found, command = only_damage(workspace)
    assert (path, command) == ("data/runs/r1/trained", "dvc repro -f -s train@r1")
    assert "its lineage has content" in found


def test_a_folder_that_no_stage_makes_any_more_is_named_as_such(workspace: Path) -> None:
    stray = workspace / "data/runs/r0/trained"
    shutil.copytree(workspace / "data/runs/r1/trained", stray)
    assert verify(workspace).damages == ()
    flip(stray / "thử nghiệm.txt")
    path, _, command = only_damage(workspace)
    assert path == "data/runs/r0/trained"
    assert command.startswith("rm -rf data/runs/r0/trained  # no stage")


def test_what_a_killed_stage_was_writing_is_nobodys_damage(workspace: Path) -> None:
    partial = workspace / "data/runs/r1/.trained.partial"
    partial.mkdir()
    (partial / "lineage.json").write_text("{")
    assert verify(workspace).damages == ()


def test_an_empty_workspace_has_nothing_to_verify_and_another_folder_is_none(tmp_path: Path) -> None:
    found = verify(tmp_path)
    assert found.damages == ()
    assert found.tally() == ""
    refused = command_line(tmp_path)
    assert refused.returncode == 1
    assert "run from the top of the repository" in refused.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "stages: [1",
        "schema: '2.0'\n",
        "\x00",
        "schema: '2.0'\nstages: 5\n",
        "schema: '2.0'\nstages: {base@vlm: }\n",
        "schema: '2.0'\nstages: {base@vlm: {cmd: x, outr: []}}\n",
        "schema: '2.0'\nstages: {base@vlm: {cmd: x, outs: [{md5: 'a'}]}}\n",
    ],
)
def test_a_damaged_lock_file_is_refused_with_what_brings_it_back(workspace: Path, text: str) -> None:
    (workspace / "dvc.lock").write_text(text)
    with pytest.raises(UserError, match=r"(?s)dvc\.lock is damaged.*\n  mend it with: git checkout HEAD -- dvc\.lock "):
        verify(workspace)


def test_a_lock_file_that_was_cut_off_and_removed_as_it_is_said_comes_back_from_the_run_cache(workspace: Path) -> None:
    lock = workspace / "dvc.lock"
    whole = lock.read_bytes()
    lock.write_bytes(whole[: whole.index(b"hash: ") + 6])
    with pytest.raises(UserError, match="is damaged") as error:
        verify(workspace)
    command = error.value.message.partition("mend it with: ")[2].partition("  #")[0]
    run(workspace, f"{command} && dvc repro")
    assert lock.read_bytes() == whole
    assert verify(workspace).damages == ()


def test_an_output_that_the_lock_file_lost_is_named(workspace: Path) -> None:
    lock = workspace / "dvc.lock"
    before, _, after = lock.read_text().partition("    outs:\n    - path: data/bases/vlm\n")
    lock.write_text(f"{before}    outs:\n    - path: data/bases/vln\n{after}")
    path, found, command = only_damage(workspace)
    assert (path, command) == ("dvc.lock", "dvc repro base@vlm")
    assert found == (
        "has base@vlm without data/bases/vlm, but data/bases/vln, which dvc.yaml does not declare; "
        "it is older than dvc.yaml, or damaged"
    )
    mend(workspace, command)


def test_an_output_that_was_declared_since_is_looked_for_only_once_it_is_there(workspace: Path) -> None:
    pipeline = workspace / "dvc.yaml"
    pipeline.write_text(pipeline.read_text().replace("outs: [", "outs: [data/bases/new, "))
    assert verify(workspace).damages == ()
    (workspace / "data/bases/new").touch()
    assert only_damage(workspace)[1] == "has base@vlm without data/bases/new; it is older than dvc.yaml, or damaged"
    assert only_damage(workspace)[2] == "dvc repro base@vlm"


def test_stages_and_outputs_that_are_no_longer_declared_harm_nobody(workspace: Path) -> None:
    pipeline = workspace / "dvc.yaml"
    before, _, _ = pipeline.read_text().partition("  merge:")
    pipeline.write_text(before.partition("      metrics:")[0])
    (workspace / "data/runs/r1/training/training.json").write_text("another stage's by now")
    assert [damage.path for damage in verify(workspace).damages] == ["data/provenance/detection/train@r1.json"]


def test_while_dvc_is_at_work_nothing_is_called_damaged(workspace: Path) -> None:
    with (workspace / "dvc.yaml").open("a") as file:
        file.write("  long:\n    cmd: touch asleep && exec sleep 100\n    outs: [data/long]\n")
    command = [sys.executable, "-m", "dvc", "repro", "long"]
    dvc = subprocess.Popen(command, cwd=workspace, env=ENVIRONMENT, start_new_session=True)
    try:
        while not (workspace / "asleep").exists():
            assert dvc.poll() is None
            time.sleep(0.05)
        refused = command_line(workspace)
        assert refused.returncode == 1
        assert f"dvc is at work in {workspace} (pid {dvc.pid})" in " ".join(refused.stderr.split())
    finally:
        os.killpg(dvc.pid, signal.SIGKILL)
        dvc.wait()
    assert str(dvc.pid) in (workspace / ".dvc/tmp/rwlock").read_text()
    assert verify(workspace).damages == ()


def test_between_its_stages_dvc_is_at_work_too(workspace: Path) -> None:
    lock = LockFile(str(workspace / ".dvc/tmp/lock"))
    with pytest.raises(UserError, match=rf"dvc is at work in .* \(pid {os.getpid()}\)"):
        verify(workspace)
    lock.close()
    assert verify(workspace).damages == ()


def test_damage_that_was_found_while_dvc_began_to_work_is_not_told(workspace: Path) -> None:
    flip(workspace / ADAPTER)
    locks = []
    with pytest.raises(UserError, match="dvc is at work"):
        verify(workspace, begin=lambda _: locks.append(LockFile(str(workspace / ".dvc/tmp/lock"))))
    locks[0].close()


def test_a_number_that_a_killed_dvc_left_and_another_process_has_by_now_is_not_dvc(workspace: Path) -> None:
    users = {str(workspace / "data/bases/vlm"): {"pid": os.getppid(), "cmd": "dvc repro"}}
    (workspace / ".dvc/tmp/rwlock").write_text(json.dumps({"write": users}))
    assert verify(workspace).damages == ()
    (workspace / ".dvc/tmp/rwlock").write_text('{"wri')
    assert verify(workspace).damages == ()


def test_a_cache_that_cannot_be_written_to_is_refused_in_words(workspace: Path) -> None:
    missing = cached(workspace, Path(ADAPTER))
    missing.unlink()
    found = verify(workspace)
    shutil.rmtree(missing.parent)
    missing.parent.touch()  # as root, permissions would not do
    with pytest.raises(UserError, match=r"cannot be put back: File exists; where the disk is full or the cache"):
        restore(found.restorable)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_disk_that_is_full_is_told_in_words(workspace: Path) -> None:
    with Path("/dev/full").open("w") as full:
        said = subprocess.run(
            [sys.executable, "-m", "tools.verify"],
            cwd=workspace,
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert said.returncode == 1
    assert said.stderr.startswith("Error: the disk is full: ")
    assert "Traceback" not in said.stderr


def command_line(workspace: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.verify", *args]
    return subprocess.run(
        command, cwd=workspace, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )


def test_the_command_ends_with_0_and_a_tally_or_with_1_and_a_list(workspace: Path) -> None:
    healthy = command_line(workspace)
    assert (healthy.returncode, healthy.stderr) == (0, "")
    (line,) = healthy.stdout.splitlines()
    assert line.startswith("all is as recorded. ")
    assert "7 outputs, 15 cached objects, 3 model folders, 1 root model, 1 certificate, 2 records" in line
    flip(workspace / ADAPTER)
    damaged = command_line(workspace)
    assert damaged.returncode == 1
    first, *_, last = damaged.stdout.splitlines()
    assert first == "data/runs/r1/trained"
    assert "  mend it with: rm -rf data/runs/r1/trained && dvc checkout data/runs/r1/trained" in damaged.stdout
    assert last.startswith("DAMAGED: 1 thing, ")


def test_what_was_found_is_told_in_the_order_in_which_it_is_mended(workspace: Path) -> None:
    for file in ("data/runs/r1/merged/model.safetensors", "data/bases/vlm/model.safetensors"):
        flip(workspace / file)
    found = verify(workspace)
    assert [damage.path for damage in found.damages] == ["data/bases/vlm", "data/runs/r1/merged"]
