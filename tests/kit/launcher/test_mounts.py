"""What a stage in a container sees of the machine."""

from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.kit.launcher.mounts import Mount, make_places, mounts
from stages.kit.launcher.outputs import outputs_aside
from stages.kit.launcher.pipeline import DeclaredStage, Pipeline
from stages.kit.launcher.stage_run import StageRun

MERGE = DeclaredStage(
    name="merge@r1",
    command="docker/run merge r1",
    params=(),
    deps=("data/bases/vlm", "data/runs/r1/trained", "data/runs/r1/absent", "docker", "stages/merge.py"),
    outs=("data/runs/r1/merged",),
)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "a workspace"
    for path in (
        "params.yaml",
        "stages/merge.py",
        "data/bases/vlm/config.json",
        "data/runs/r1/trained/x",
        ".git/config",
    ):
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text("x")
    return workspace


def run_of(workspace: Path, **changes: Any) -> StageRun:
    plain: dict[str, Any] = {"source_dir": None, "hub_dir": None, "kept_dirs": (), "gpus": (), "caller": {}}
    return StageRun(
        pipeline=Pipeline.of(workspace),
        stage="merge",
        args=("r1",),
        workspace_dir=workspace,
        terminal=False,
        **(plain | changes),
    )


def mounts_of(stage_run: StageRun) -> list[Mount]:
    with outputs_aside(MERGE, stage_run.workspace_dir) as outputs:
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


def readable(found: list[Mount], workspace: Path) -> set[str]:
    targets = {mount.target for mount in found if not mount.writable}
    return {
        str(target.relative_to(workspace)) if target.is_relative_to(workspace) else str(target) for target in targets
    }


def test_the_code_and_the_declared_data_are_seen_and_nothing_else_of_the_workspace(workspace: Path) -> None:
    found = mounts_of(run_of(workspace))
    inputs = {"params.yaml", "stages", "data/bases/vlm", "data/runs/r1/trained"}
    assert readable(found, workspace) == {".", *inputs, "/run/bakeoff/launcher"}
    (view,) = (mount for mount in found if mount.target == workspace)
    assert view.source.name == "view"


def test_only_the_outputs_can_be_written_and_the_sign_of_being_ready(workspace: Path) -> None:
    writable = {str(mount.target) for mount in mounts_of(run_of(workspace)) if mount.writable}
    assert writable == {str(workspace / "data/runs/r1"), "/run/bakeoff/ready"}


def test_a_folder_is_mounted_before_what_lies_in_it(workspace: Path) -> None:
    targets = [mount.target for mount in mounts_of(run_of(workspace))]
    for index, target in enumerate(targets):
        assert not any(later in target.parents for later in targets[index:])


def test_everything_keeps_its_path(workspace: Path) -> None:
    found = mounts_of(run_of(workspace))
    special = {workspace, Path("/run/bakeoff/launcher")}
    assert all(mount.source == mount.target for mount in found if not mount.writable and mount.target not in special)


@pytest.mark.parametrize("inside", [True, False])
def test_the_folder_that_data_comes_from_is_seen_wherever_it_lies(
    workspace: Path, tmp_path: Path, inside: bool
) -> None:
    photos = (workspace if inside else tmp_path) / "photos"
    photos.mkdir()
    found = mounts_of(run_of(workspace, source_dir=photos))
    assert [mount for mount in found if mount.target == photos] == [Mount(source=photos, target=photos)]


def test_a_source_that_is_missing_is_left_to_the_stage_to_name(workspace: Path, tmp_path: Path) -> None:
    assert mounts_of(run_of(workspace, source_dir=tmp_path / "nowhere")) == mounts_of(run_of(workspace))


OBJECT = "files/md5/ab/" + "c" * 30


@pytest.mark.parametrize("inside", [True, False])
def test_links_into_dvcs_cache_lead_there_wherever_it_lies(workspace: Path, tmp_path: Path, inside: bool) -> None:
    cache = (workspace / ".dvc/cache") if inside else tmp_path / "cache"
    tell_dvc(workspace, cache)
    link_to(cache / OBJECT, workspace / "data/bases/vlm/weights")
    cached = Mount(source=cache / "files/md5", target=cache / "files/md5")
    assert cached in mounts_of(run_of(workspace))


def test_a_cache_behind_a_linked_folder_is_found_under_the_name_that_links_use(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    tell_dvc(workspace, tmp_path / "scratch")
    link_to(tmp_path / "scratch" / OBJECT, workspace / "data/bases/vlm/weights")
    cached = Mount(source=tmp_path / "real/files/md5", target=tmp_path / "scratch/files/md5")
    assert cached in mounts_of(run_of(workspace))


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "/", "../../../params.yaml", "/nowhere/" + OBJECT, "../../../../../other/cache/" + OBJECT]
)
def test_a_link_to_anything_else_is_refused(workspace: Path, tmp_path: Path, target: str) -> None:
    """A stage cannot leave one, and a person's would open the machine to the stages."""
    (tmp_path / "other/cache" / OBJECT).parent.mkdir(parents=True)
    (tmp_path / "other/cache" / OBJECT).touch()
    (workspace / "data/runs/r1/trained/link").symlink_to(target)
    with pytest.raises(UserError, match="trained/link is a link to"):
        mounts_of(run_of(workspace))


def test_the_links_of_a_folder_that_data_comes_from_lead_to_just_those_files(workspace: Path, tmp_path: Path) -> None:
    """The hub's cache keeps a snapshot as links to blobs."""
    repository = tmp_path / "datasets--openfoodfacts--tables"
    blob, link = repository / "blobs/1234", repository / "snapshots/main/weights"
    link.parent.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_text("x")
    (blob.parent / "other").write_text("x")
    link.symlink_to("../../blobs/1234")
    found = mounts_of(run_of(workspace, source_dir=link.parent))
    assert Mount(source=blob, target=blob) in found
    assert not any(mount.target == blob.parent for mount in found)


def test_a_link_out_of_the_folder_that_data_comes_from_leads_nowhere(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/train.txt").symlink_to("/etc/passwd")
    assert Path("/etc/passwd") not in {
        mount.source for mount in mounts_of(run_of(workspace, source_dir=tmp_path / "photos"))
    }


def test_more_links_than_an_engine_should_mount_are_refused(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/photo").touch()
    for index in range(300):
        (tmp_path / f"photos/{index}").symlink_to("photo")
    with pytest.raises(UserError, match="has 300 links"):
        mounts_of(run_of(workspace, source_dir=tmp_path / "photos"))


def test_an_input_with_a_mount_inside_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = workspace / "data/bases/vlm/sub"
    mountinfo = f"1 2 0:1 / / rw - ext4 x rw\n3 1 0:2 / {str(inside).replace(' ', chr(92) + '040')} rw - tmpfs x rw\n"
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: mountinfo if path == Path("/proc/self/mountinfo") else read_text(path)
    )
    with pytest.raises(UserError, match=f"{inside} is mounted inside {workspace / 'data/bases/vlm'}"):
        mounts_of(run_of(workspace))


def tell_dvc(workspace: Path, cache: Path) -> None:
    (workspace / ".dvc").mkdir()
    (workspace / ".dvc/config").write_text(f"[cache]\n    dir = {cache}\n")


def link_to(target: Path, link: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_text("x")
    link.symlink_to(target)


def test_without_links_no_cache_is_seen(workspace: Path) -> None:
    (workspace / ".dvc/cache/files/md5/ab").mkdir(parents=True)
    assert not any(".dvc" in str(mount.source) for mount in mounts_of(run_of(workspace)))


@pytest.mark.parametrize("inside", [True, False])
def test_kept_folders_are_made_and_writable_wherever_they_lie(workspace: Path, tmp_path: Path, inside: bool) -> None:
    names = ("hub", "triton/0123", "checkpoints/r1", "runs")
    hub, triton, *kept = ((workspace if inside else tmp_path) / ".bakeoff" / name for name in names)
    found = mounts_of(run_of(workspace, hub_dir=hub, triton_dir=triton, kept_dirs=tuple(kept)))
    for folder in (hub, triton, *kept):
        assert folder.is_dir()
        assert Mount(source=folder, target=folder, writable=True) in found
    assert not any(mount.writable for mount in found if mount.target.name in (".bakeoff", "checkpoints", "triton"))


def test_certificates_of_the_caller_go_only_where_the_network_is(workspace: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("x")
    caller = {"SSL_CERT_FILE": str(bundle), "REQUESTS_CA_BUNDLE": str(tmp_path / "nowhere.crt")}
    for hub_dir in (tmp_path / "hub", None):
        found = {mount.target for mount in mounts_of(run_of(workspace, hub_dir=hub_dir, caller=caller))}
        assert (bundle in found) == (hub_dir is not None)
        assert tmp_path / "nowhere.crt" not in found


def test_a_path_with_a_comma_or_a_quote_stays_one_path() -> None:
    mount = Mount(source=Path('/a,b "c"'), target=Path("/x"))
    assert mount.option() == 'type=bind,"source=/a,b ""c""",target=/x,readonly'
