"""A stage in a container: the part of the machine that it sees, and what becomes of the files that it writes."""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stages.core.errors import UserError
from stages.launcher.container import Mount, Outputs, make_places, mounts
from stages.launcher.pipeline import DeclaredStage
from tests.launcher.small_checkout import request_of

MERGE = DeclaredStage(
    name="merge@r1",
    command="docker/run merge r1",
    params=(),
    deps=("data/bases/vlm", "data/runs/r1/trained", "data/runs/r1/absent", "docker", "stages/merge.py"),
    outs=("data/runs/r1/merged",),
)
TRAIN = DeclaredStage(
    name="train@r1",
    command="docker/run train r1",
    params=(),
    deps=("data/bases/vlm", "data/runs/r1/plan.yaml"),
    outs=("data/runs/r1/trained", "data/runs/r1/training/training.json", "data/runs/r1/training/plots"),
)
OBJECT = "files/md5/ab/" + "c" * 30
RECORD = "data/provenance/detection/train@r1.json"


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "a workspace"
    files = ("params.yaml", "stages/merge.py", "data/bases/vlm/config.json", "data/runs/r1/plan.yaml", ".git/config")
    for path in (*files, "data/runs/r1/trained/old"):
        write(workspace / path)
    (workspace / ".dvc/cache/files/md5/ab").mkdir(parents=True)
    return workspace


def mounts_of(workspace: Path, **changes: Any) -> list[Mount]:
    outputs = Outputs(MERGE, workspace)
    with outputs.aside():
        found = mounts(request_of(workspace, "merge", "r1", stages=[MERGE], **changes), None, outputs)
        make_places(found, outputs)
        # Inside another mount an engine can make no place.
        for index, mount in enumerate(found):
            for around in reversed(found[:index]):
                if around.target in mount.target.parents:
                    place = around.source / mount.target.relative_to(around.target)
                    assert place.is_dir() if mount.source.is_dir() else place.is_file(), mount
                    break
        return found


def test_stage_sees_declared_inputs_and_code_and_writes_outputs_alone(workspace: Path) -> None:
    found = mounts_of(workspace)
    inputs = ("params.yaml", "stages", "data/bases/vlm", "data/runs/r1/trained")
    readable = {str(mount.target) for mount in found if not mount.writable}
    assert readable == {*(str(workspace / path) for path in inputs), str(workspace), "/run/bakeoff/launcher"}
    writable = {str(mount.target) for mount in found if mount.writable}
    assert writable == {str(workspace / "data/runs/r1"), "/run/bakeoff/ready"}
    (view,) = (mount for mount in found if mount.target == workspace)
    assert view.source.name == "view"
    for index, mount in enumerate(found):  # a folder before what lies in it
        assert not any(later.target in mount.target.parents for later in found[index:])
    special = {workspace, Path("/run/bakeoff/launcher")}
    assert all(mount.source == mount.target for mount in found if not mount.writable and mount.target not in special)


def test_source_and_kept_folders_keep_their_paths(workspace: Path, tmp_path: Path) -> None:
    source, kept = tmp_path / "photos", tuple(workspace / ".bakeoff" / name for name in ("hub", "triton/0123"))
    source.mkdir()
    found = mounts_of(workspace, source_dir=source, kept_dirs=kept)
    assert Mount(source, source) in found
    for folder in kept:
        assert folder.is_dir()
        assert Mount(folder, folder, writable=True) in found
    assert not any(mount.writable for mount in found if mount.target.name in (".bakeoff", "triton"))
    assert mounts_of(workspace, source_dir=tmp_path / "nowhere") == mounts_of(workspace), "the stage reports it"


@pytest.mark.parametrize("where", ["a workspace/.dvc/cache", "cache", "linked"])
def test_links_into_dvcs_cache_work_at_any_place(workspace: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    cache = tmp_path / where
    write(workspace / ".dvc/config", f"[cache]\n    dir = {cache}\n")
    (workspace / "data/bases/vlm/weights").symlink_to(write(cache / OBJECT))
    assert Mount(source=cache.resolve() / "files/md5", target=cache / "files/md5") in mounts_of(workspace)


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "/", "../../../params.yaml", "/nowhere/" + OBJECT, "../../../../../other/cache/" + OBJECT]
)
def test_other_links_are_refused(workspace: Path, tmp_path: Path, target: str) -> None:
    """A stage cannot leave one, and a person's would open the machine to the stages."""
    write(tmp_path / "other/cache" / OBJECT)
    (workspace / "data/runs/r1/trained/link").symlink_to(target)
    with pytest.raises(UserError, match="trained/link is a link to"):
        mounts_of(workspace)


def test_links_of_a_source_lead_to_their_files_and_never_out(workspace: Path, tmp_path: Path) -> None:
    """The hub's cache keeps a snapshot as links to blobs."""
    repository = tmp_path / "datasets--openfoodfacts--tables"
    blob = write(repository / "blobs/1234")
    snapshot = write(repository / "snapshots/main/plain").parent
    (snapshot / "weights").symlink_to("../../blobs/1234")
    (snapshot / "train.txt").symlink_to("/etc/passwd")
    sources = {mount.source for mount in mounts_of(workspace, source_dir=snapshot)}
    assert blob in sources
    assert not sources & {blob.parent, Path("/etc/passwd")}


def test_input_with_a_mount_inside_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = workspace / "data/bases/vlm/sub"
    mounted = [SimpleNamespace(mountpoint=path) for path in ("/", str(inside))]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounted)
    with pytest.raises(UserError, match=f"{inside} is mounted inside {workspace / 'data/bases/vlm'}"):
        mounts_of(workspace)


def test_callers_certificates_come_with_the_network(workspace: Path, tmp_path: Path) -> None:
    bundle = write(tmp_path / "ca.crt")
    hub, nowhere = tmp_path / "hub", tmp_path / "nowhere.crt"
    caller = {"SSL_CERT_FILE": str(bundle), "REQUESTS_CA_BUNDLE": str(nowhere), "HF_HOME": str(hub)}
    for network in (True, False):
        found = {mount.target for mount in mounts_of(workspace, network=network, caller=caller)}
        assert found & {bundle, hub, nowhere} == ({bundle, hub} if network else set())


def test_path_with_a_comma_or_a_quote_stays_one_path() -> None:
    mount = Mount(source=Path('/a,b "c"'), target=Path("/x"))
    assert mount.option() == 'type=bind,"source=/a,b ""c""",target=/x,readonly'


@pytest.fixture
def outputs(workspace: Path) -> Outputs:
    return Outputs(TRAIN, workspace)


def write_outputs(outputs: Outputs) -> None:
    write(outputs.written_dir / "data/runs/r1/trained/new", "new")
    write(outputs.written_dir / "data/runs/r1/training/training.json", "{}")


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_declared_outputs_replace_the_old_ones(workspace: Path, outputs: Outputs) -> None:
    write(workspace / "data/.outputs/train@r1/run/written/data/runs/r1/trained/half", "left by a killed launcher")
    with outputs.aside():
        write_outputs(outputs)
        outputs.take([])
    taken = {"plan.yaml": "x", "trained/new": "new", "training/training.json": "{}"}
    assert files_of(workspace / "data/runs/r1") == taken


def test_outputs_that_are_not_taken_leave_no_trace(workspace: Path, outputs: Outputs) -> None:
    before = files_of(workspace)
    with outputs.aside():
        write_outputs(outputs)
    assert files_of(workspace) == {**before, "data/.outputs/train@r1/lock": ""}
    with outputs.aside():
        outputs.take([])  # DVC reports a missing output
    assert (workspace / "data/runs/r1/trained/old").is_file()


@pytest.mark.parametrize(
    "stray",
    ["data/runs/r1/notes", "data/runs/r1/training/metrics.json", "data/runs/r1/plan.yaml2", "data/runs/r1/x/", RECORD],
)
def test_undeclared_files_are_refused_and_nothing_is_taken(workspace: Path, stray: str) -> None:
    """The record, which the launcher writes, and an empty folder are among them."""
    before = files_of(workspace)
    outputs = Outputs(replace(TRAIN, outs=(RECORD, *TRAIN.outs)), workspace)
    with outputs.aside(), pytest.raises(UserError, match=r"the stage wrote data/.*which dvc\.yaml does not declare"):
        write_outputs(outputs)
        place = outputs.written_dir / stray
        (place if stray.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not stray.endswith("/"):
            place.touch()
        outputs.take([])
    assert files_of(workspace).items() >= before.items()
    assert not (workspace / "data/runs/r1/trained/new").exists()


@pytest.mark.parametrize(
    "leave", [lambda place, victim: place.symlink_to(victim), lambda place, _: os.mkfifo(place)], ids=["link", "pipe"]
)
@pytest.mark.parametrize("where", ["data/runs/r1/trained/x", "data/runs/r1/training", "data/runs/r1/stray"])
def test_links_and_special_files_are_refused_everywhere(
    workspace: Path, tmp_path: Path, outputs: Outputs, leave: Callable[[Path, Path], None], where: str
) -> None:
    victim = write(tmp_path / "victim/training.json", "not the stage's")
    with outputs.aside(), pytest.raises(UserError, match=f"{where} .a link or a special"):
        (outputs.written_dir / "data/runs/r1/trained").mkdir()
        leave(outputs.written_dir / where, victim)
        outputs.take([])
    assert victim.read_text() == "not the stage's"
    assert (workspace / "data/runs/r1/trained/old").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_place_of_an_input_does_not_pass_for_an_output(workspace: Path, outputs: Outputs, moved: bool) -> None:
    with outputs.aside():
        place = write(outputs.written_dir / "data/runs/r1/inputs/plan.yaml", "")
        if moved:
            place.parent.rename(outputs.written_dir / "data/runs/r1/trained")
            with pytest.raises(UserError, match=r"moved its input data/runs/r1/inputs/plan\.yaml"):
                outputs.take([place])
        else:
            write_outputs(outputs)
            outputs.take([place])
    assert not (workspace / "data/runs/r1/inputs").exists()
    assert (workspace / "data/runs/r1/trained/new").exists() != moved


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o711, 0o700)), (0o077, (0o700, 0o700))])
def test_outputs_have_plain_modes_within_the_callers_umask(
    workspace: Path, outputs: Outputs, umask: int, modes: tuple[int, int]
) -> None:
    left = workspace / "data/.outputs/train@r1/run/written/data/locked"
    write(left / "file", "left by a killed launcher")
    left.chmod(0o500)
    before, trained = os.umask(umask), workspace / "data/runs/r1/trained"
    try:
        for _ in range(2):  # the second time it replaces what the first one left
            with outputs.aside():
                write_outputs(outputs)
                program = outputs.written_dir / "data/runs/r1/trained/new"
                program.chmod(0o4711)
                program.parent.chmod(0o500)
                outputs.take([])
    finally:
        os.umask(before)
    assert tuple(stat.S_IMODE(path.stat().st_mode) for path in (trained / "new", trained)) == modes


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_output_that_is_a_link_into_the_cache_leaves_the_cache_alone(
    workspace: Path, outputs: Outputs, link: Callable[[Path, Path], None]
) -> None:
    cached, output = write(workspace / "cached", "cached"), workspace / "data/runs/r1/training/training.json"
    output.parent.mkdir()
    link(cached, output)
    with outputs.aside():
        write_outputs(outputs)
        outputs.take([])
    assert (cached.read_text(), output.read_text()) == ("cached", "{}")
    assert not output.is_symlink()
