"""Lineages, certificates and records that do not fit, a damaged dvc.lock, DVC at work, and what is no damage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from zc.lockfile import LockFile

from stages.core.errors import UserError
from stages.core.lineage import read_lineage, write_lineage
from stages.core.publish import publish_json
from stages.kit.models.certificate import read_certificate
from tests.made_up_records import BUILD_CERTIFICATE
from tests.tools.verify.damaged import (
    ADAPTER,
    CERTIFICATE,
    MERGED,
    RECORD,
    SOURCE,
    TRAIN_AGAIN,
    TRAINED,
    command_line,
    edit,
    fix,
    flip,
    found,
    only_finding,
)
from tests.tools.verify.made_up import ENVIRONMENT, run
from tools.faults.judge import DVC_FAILS
from tools.verify import hashing
from tools.verify.verify import verify


def test_a_wrong_certificate_of_a_merge_is_found(unknown_to_dvc: Path) -> None:
    path = unknown_to_dvc / CERTIFICATE
    good = read_certificate(path, "r1")
    for bad, said in (
        (replace(good, merged_digest="0" * 64), f"certifies content 000000000000, but {MERGED} holds "),
        (replace(good, logit_deviation=float("nan")), "certifies a failure: logits deviate"),
    ):
        publish_json(bad, path)
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
    good = replace(BUILD_CERTIFICATE, built_digest=lineage.digest)
    failed = {"a": replace(good.domains["a"], forced_deviation=1.0)}
    path = tmp_path / "data/builds/moe.json"
    (tmp_path / "dvc.yaml").write_text("stages: {build: {cmd: none, outs: [data/builds/moe, data/builds/moe.json]}}")
    (tmp_path / "params.yaml").write_text("{}")
    assert list(found(tmp_path)) == ["data/builds/moe.json"]
    publish_json(good, path)
    assert found(tmp_path) == {}
    for certificate, said in (
        (replace(good, built_digest="0" * 64), "certifies content 000000000000"),
        (replace(good, domains=failed), "certifies a failure: expert a alone"),
    ):
        publish_json(certificate, path)
        where, problem, _ = only_finding(tmp_path)
        assert where == "data/builds/moe.json"
        assert problem.startswith(said)


def test_lineages_are_checked_down_to_their_root_without_dvc(unknown_to_dvc: Path) -> None:
    trained = unknown_to_dvc / TRAINED
    assert found(unknown_to_dvc) == {}
    flip(unknown_to_dvc / ADAPTER)
    path, problem, command = only_finding(unknown_to_dvc)
    assert (path, command) == (TRAINED, TRAIN_AGAIN)
    assert problem.startswith("its lineage has content")
    # Written so that its own digest is right.
    other = replace(read_lineage(trained).parents["base"].lineage, digest="1" * 64)
    write_lineage(trained, kind="trained", name="r1", parents={"base": (unknown_to_dvc / "data/bases/vlm", other)})
    (problem,) = found(unknown_to_dvc)[TRAINED].problems
    assert problem.startswith("its base was data/bases/vlm with content 111111111111, which now holds ")
    write_lineage(trained, kind="trained", name="r1")
    assert "ends without saying where it comes from" in found(unknown_to_dvc)[TRAINED].problems[0]


def test_a_record_of_other_outputs_is_found(unknown_to_dvc: Path) -> None:
    record = unknown_to_dvc / RECORD
    edit(record, outputs={**json.loads(record.read_text())["outputs"], TRAINED: "2" * 64})
    path, problem, command = only_finding(unknown_to_dvc)
    assert (path, command) == (RECORD, TRAIN_AGAIN)
    assert f"records {TRAINED} with content 222222222222, which now holds" in problem
    record.write_text("{")
    assert "is damaged" in only_finding(unknown_to_dvc)[1]


def test_a_stage_that_read_a_damaged_input_is_found_although_the_input_was_fixed_since(workspace: Path) -> None:
    edit(workspace / RECORD, inputs={"data/bases/vlm": "3" * 64})
    run(workspace, "dvc commit -q -f train@r1")
    path, problem, command = only_finding(workspace)
    assert (path, command) == (RECORD, TRAIN_AGAIN)
    assert problem.startswith(
        "records that data/bases/vlm had content 333333333333 when it was read, and base@vlm left "
    )


def test_the_record_of_a_stage_that_is_out_of_date_is_no_damage(workspace: Path) -> None:
    """An interrupted `dvc repro`: its input was made again, and DVC itself knows that the stage is out of date."""
    (workspace / SOURCE).write_text("[]")
    run(workspace, "dvc repro base@vlm")
    findings = found(workspace)
    assert not any(path.startswith("data/provenance") for path in findings)
    assert findings[TRAINED].fix == TRAIN_AGAIN


def test_a_result_that_a_killed_dvc_did_not_record_is_kept_unless_it_is_damaged(workspace: Path) -> None:
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("seed: 1", "seed: 2"))
    run(workspace, "python -m tests.tools.verify.made_up train r1")
    findings = [finding for finding in verify(workspace).in_order() if finding.path != MERGED]
    assert [finding.path for finding in findings] == [RECORD, TRAINED, "data/runs/r1/training/training.json"]
    assert {finding.problems for finding in findings} == {
        ("is newer than dvc.lock, and what the record of train@r1 describes: dvc was ended too early",)
    }
    command, _, comment = findings[0].fix.partition("  # ")
    assert command == "dvc repro train@r1"

    flip(workspace / ADAPTER)
    (problem, *more) = found(workspace)[TRAINED].problems
    assert "holds other bytes than dvc.lock has: adapter/adapter_model.safetensors" in problem
    assert "newer" not in " ".join((problem, *more))
    flip(workspace / ADAPTER)

    adapter = (workspace / ADAPTER).read_bytes()
    run(workspace, comment.rpartition(": ")[2])
    assert (workspace / ADAPTER).read_bytes() == adapter
    fix(workspace, only_finding(workspace)[2])


def test_only_what_is_there_is_checked(workspace: Path) -> None:
    shutil.rmtree(workspace / MERGED)
    (workspace / CERTIFICATE).unlink()
    shutil.rmtree(workspace / ".dvc/cache")
    said = command_line(workspace)
    assert said.exit_code == 0
    assert said.stdout.startswith("2 outputs of dvc.lock neither here nor in the cache, so not checked")
    assert "DVC has no cache here: only the workspace was checked" in said.stdout
    flip(workspace / ADAPTER)
    assert only_finding(workspace)[2] == TRAIN_AGAIN


def while_reading(patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Have something happen between the listing of files and their reading."""

    def hash_files(paths: Iterable[Path]) -> tuple[dict[Path, hashing.FileDigests], int]:
        action()
        return hashing.hash_files(paths)

    patch.setattr("tools.verify.snapshot.hash_files", hash_files)


def test_what_stages_write_meanwhile_is_no_damage(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = workspace / "data/runs/r1/.trained.partial"  # left by a killed stage
    partial.mkdir()
    (partial / "lineage.json").write_text("{")
    while_reading(monkeypatch, (workspace / TRAINED / "late").touch)
    assert found(workspace) == {}


def test_a_folder_that_no_stage_makes_any_more_is_checked_by_its_lineage(workspace: Path) -> None:
    stray = workspace / "data/runs/r0/trained"
    shutil.copytree(workspace / TRAINED, stray)
    assert found(workspace) == {}
    flip(stray / "thử nghiệm.txt")
    path, _, command = only_finding(workspace)
    assert (path, command) == ("data/runs/r0/trained", "rm -rf data/runs/r0/trained  # no stage of dvc.yaml makes it")


def test_an_empty_workspace_is_healthy_and_another_folder_is_refused(tmp_path: Path) -> None:
    assert "run from the top of the repository" in command_line(tmp_path).output
    (tmp_path / "data").mkdir()
    assert command_line(tmp_path).output.endswith("s: nothing yet\n")


@pytest.mark.parametrize(
    "text",
    ["", "stages: [1", "\x00", "schema: '2.0'\nstages: {base@vlm: {cmd: x, outs: [{md5: 'a'}]}}\n", "cut off"],
)
def test_a_damaged_lock_file_is_refused_and_comes_back_from_the_run_cache(workspace: Path, text: str) -> None:
    lock = workspace / "dvc.lock"
    whole = lock.read_text()
    lock.write_text(whole[: whole.index("hash: ") + 6] if text == "cut off" else text)
    with pytest.raises(
        UserError, match=r"(?s)dvc\.lock is damaged.*\n  fix it with: git checkout HEAD -- dvc\.lock "
    ) as error:
        verify(workspace)
    if text == "cut off":
        command = error.value.message.partition("fix it with: ")[2].partition("  #")[0]
        run(workspace, f"{command} && dvc repro")
        assert lock.read_text() == whole


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
    pipeline.write_text(before.replace("outs: [", "outs: [data/bases/new, ", 1))
    (workspace / "data/runs/r1/training/training.json").write_text("another stage's by now")
    assert list(found(workspace)) == [RECORD]
    (workspace / "data/bases/new").touch()
    lock = found(workspace)["dvc.lock"]
    assert lock.problems == ("has base@vlm without data/bases/new", "it is older than dvc.yaml, or damaged")
    assert lock.fix == "dvc repro base@vlm"


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
    assert found(workspace) == {}
    # Another process has the number by now.
    (workspace / ".dvc/tmp/rwlock").write_text(users.replace(str(dvc.pid), str(os.getppid())))
    assert found(workspace) == {}


def test_where_dvc_was_killed_while_it_noted_what_it_uses_the_fix_is_named(workspace: Path) -> None:
    (workspace / ".dvc/tmp/rwlock").write_text("")
    repro = [sys.executable, "-m", "dvc", "repro"]
    ended = subprocess.run(repro, cwd=workspace, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert DVC_FAILS.search(ended.stderr)
    with pytest.raises(UserError, match=r"rwlock is damaged.*\n  fix it with: rm \.dvc/tmp/rwlock"):
        verify(workspace)


def test_between_its_stages_dvc_is_running_too_also_if_it_starts_meanwhile(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_path = str(workspace / ".dvc/tmp/lock")
    lock = LockFile(lock_path)
    with pytest.raises(UserError, match=rf"dvc is running in .* \(pid {os.getpid()}\)"):
        verify(workspace)
    lock.close()
    assert found(workspace) == {}
    flip(workspace / ADAPTER)
    locks: list[LockFile] = []
    while_reading(monkeypatch, lambda: locks.append(LockFile(lock_path)))
    with pytest.raises(UserError, match="dvc is running"):
        verify(workspace)
    locks[0].close()


def test_the_command_ends_with_0_and_a_tally_or_with_1_and_a_list(workspace: Path) -> None:
    healthy = command_line(workspace)
    assert (healthy.exit_code, healthy.stderr) == (0, "")
    (line,) = healthy.stdout.splitlines()
    assert line.startswith("all is as recorded. ")
    tally = "28 files, 7 outputs, 15 cached objects, 3 model folders, 1 root model, 1 certificate, 2 records"
    assert line.endswith(tally)
    for file in (f"{MERGED}/model.safetensors", "data/bases/vlm/model.safetensors"):
        flip(workspace / file)
    damaged = command_line(workspace)
    assert damaged.exit_code == 1
    first, *_, last = damaged.stdout.splitlines()
    assert first == "data/bases/vlm"  # the order of the pipeline
    assert f"\n{MERGED}\n  holds other bytes" in damaged.stdout
    assert f"\n  fix it with: rm -rf {MERGED} && dvc checkout {MERGED}\n" in damaged.stdout
    assert last.startswith("DAMAGED: 2 things, to be fixed from the top. ")
