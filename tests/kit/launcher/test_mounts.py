"""What a stage in a container sees of the machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stages.core.errors import UserError
from stages.kit.launcher.mounts import Mount, make_places, mounts
from stages.kit.launcher.outputs import Outputs
from stages.kit.launcher.pipeline import DeclaredStage
from stages.kit.launcher.stage_run import StageRun

MERGE = DeclaredStage(
    name="merge@r1",
    command="docker/run merge r1",
    params=(),
    deps=("data/bases/vlm", "data/runs/r1/trained", "data/runs/r1/absent", "docker", "stages/merge.py"),
    outs=("data/runs/r1/merged",),
)


OBJECT = "files/md5/ab/" + "c" * 30


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "a workspace"
    files = ("params.yaml", "stages/merge.py", "data/bases/vlm/config.json", "data/runs/r1/trained/x", ".git/config")
    for path in files:
        write(workspace / path)
    (workspace / ".dvc/cache/files/md5/ab").mkdir(parents=True)
    return workspace


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def mounts_of(workspace: Path, **changes: Any) -> list[Mount]:
    settings = {"caller": {}, "workspace_dir": workspace, **changes}
    stage_run = StageRun(stage="merge", args=("r1",), declared=MERGE, **settings)
    outputs = Outputs(MERGE, workspace)
    with outputs.aside():
        found = mounts(stage_run, MERGE, outputs)
        make_places(found, outputs)
        # What an engine relies on: inside another mount it can make nothing.
        for index, mount in enumerate(found):
            for around in reversed(found[:index]):
                if around.target in mount.target.parents:
                    place = around.source / mount.target.relative_to(around.target)
                    assert place.is_dir() if mount.source.is_dir() else place.is_file(), mount
                    break
        return found


def test_declared_data_and_code_can_be_read_the_outputs_written_and_nothing_else_is_seen(workspace: Path) -> None:
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


@pytest.mark.parametrize("inside", [True, False])
def test_the_folder_that_data_comes_from_is_seen_wherever_it_lies(
    workspace: Path, tmp_path: Path, inside: bool
) -> None:
    photos = (workspace if inside else tmp_path) / "photos"
    photos.mkdir()
    found = mounts_of(workspace, source_dir=photos)
    assert [mount for mount in found if mount.target == photos] == [Mount(photos, photos)]


def test_a_source_that_is_missing_is_left_to_the_stage_to_name(workspace: Path, tmp_path: Path) -> None:
    assert mounts_of(workspace, source_dir=tmp_path / "nowhere") == mounts_of(workspace)


@pytest.mark.parametrize("where", ["a workspace/.dvc/cache", "cache", "linked"])
def test_links_into_dvcs_cache_lead_there_wherever_it_lies_and_under_the_name_that_they_use(
    workspace: Path, tmp_path: Path, where: str
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    cache = tmp_path / where
    write(workspace / ".dvc/config", f"[cache]\n    dir = {cache}\n")
    (workspace / "data/bases/vlm/weights").symlink_to(write(cache / OBJECT))
    assert Mount(source=cache.resolve() / "files/md5", target=cache / "files/md5") in mounts_of(workspace)


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "/", "../../../params.yaml", "/nowhere/" + OBJECT, "../../../../../other/cache/" + OBJECT]
)
def test_a_link_to_anything_else_is_refused(workspace: Path, tmp_path: Path, target: str) -> None:
    """A stage cannot leave one, and a person's would open the machine to the stages."""
    write(tmp_path / "other/cache" / OBJECT)
    (workspace / "data/runs/r1/trained/link").symlink_to(target)
    with pytest.raises(UserError, match="trained/link is a link to"):
        mounts_of(workspace)


def test_links_of_the_folder_that_data_comes_from_lead_to_just_those_files_and_never_out(
    workspace: Path, tmp_path: Path
) -> None:
    """The hub's cache keeps a snapshot as links to blobs."""
    repository = tmp_path / "datasets--openfoodfacts--tables"
    blob = write(repository / "blobs/1234")
    snapshot = write(repository / "snapshots/main/plain").parent
    (snapshot / "weights").symlink_to("../../blobs/1234")
    (snapshot / "train.txt").symlink_to("/etc/passwd")
    sources = {mount.source for mount in mounts_of(workspace, source_dir=snapshot)}
    assert blob in sources
    assert not sources & {blob.parent, Path("/etc/passwd")}
    for index in range(300):
        (snapshot / str(index)).symlink_to("plain")
    with pytest.raises(UserError, match="has 301 links"):
        mounts_of(workspace, source_dir=snapshot)


def test_an_input_with_a_mount_inside_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = workspace / "data/bases/vlm/sub"
    mounted = [SimpleNamespace(mountpoint=path) for path in ("/", str(inside))]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounted)
    with pytest.raises(UserError, match=f"{inside} is mounted inside {workspace / 'data/bases/vlm'}"):
        mounts_of(workspace)


@pytest.mark.parametrize("inside", [True, False])
def test_kept_folders_are_made_and_writable_wherever_they_lie(workspace: Path, tmp_path: Path, inside: bool) -> None:
    names = ("hub", "triton/0123", "checkpoints/r1")
    kept = tuple((workspace if inside else tmp_path) / ".bakeoff" / name for name in names)
    found = mounts_of(workspace, kept_dirs=kept)
    for folder in kept:
        assert folder.is_dir()
        assert Mount(folder, folder, writable=True) in found
    assert not any(mount.writable for mount in found if mount.target.name in (".bakeoff", "checkpoints", "triton"))


def test_certificates_of_the_caller_go_only_where_the_network_is(workspace: Path, tmp_path: Path) -> None:
    bundle = write(tmp_path / "ca.crt")
    caller = {"SSL_CERT_FILE": str(bundle), "REQUESTS_CA_BUNDLE": str(tmp_path / "nowhere.crt")}
    for network in (True, False):
        found = {mount.target for mount in mounts_of(workspace, network=network, caller=caller)}
        assert (bundle in found) == network
        assert tmp_path / "nowhere.crt" not in found


def test_a_path_with_a_comma_or_a_quote_stays_one_path() -> None:
    mount = Mount(source=Path('/a,b "c"'), target=Path("/x"))
    assert mount.option() == 'type=bind,"source=/a,b ""c""",target=/x,readonly'
