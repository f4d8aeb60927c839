"""What a stage in a container sees of the machine."""

from pathlib import Path

import pytest

from stages.kit.containers.mounts import Mount, input_paths, mounts
from stages.kit.containers.outputs import claimed_outputs
from stages.kit.containers.pipeline import DeclaredStage
from stages.kit.containers.stage_run import StageRun

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


def run_of(
    workspace: Path,
    *,
    network: bool = False,
    source_dir: Path | None = None,
    kept_dirs: tuple[Path, ...] = (),
    caller: dict[str, str] | None = None,
) -> StageRun:
    return StageRun(
        stage="merge",
        args=("r1",),
        workspace_dir=workspace,
        network=network,
        source_dir=source_dir,
        kept_dirs=kept_dirs,
        gpus=(),
        caller=caller or {},
        terminal=False,
    )


def mounts_of(stage_run: StageRun) -> list[Mount]:
    with claimed_outputs(stage_run.workspace_dir, MERGE, input_paths(stage_run, MERGE)) as outputs:
        return mounts(stage_run, outputs)


def readable(found: list[Mount], workspace: Path) -> set[str]:
    targets = {mount.target for mount in found if not mount.writable}
    return {
        str(target.relative_to(workspace)) if target.is_relative_to(workspace) else str(target) for target in targets
    }


def test_the_code_and_the_declared_data_are_seen_and_nothing_else_of_the_workspace(workspace: Path) -> None:
    found = mounts_of(run_of(workspace))
    assert readable(found, workspace) == {".", "params.yaml", "stages", "data/bases/vlm", "data/runs/r1/trained"}
    (view,) = (mount for mount in found if mount.target == workspace)
    assert view.source.name == "view"


def test_only_the_outputs_and_the_launchers_lock_can_be_written(workspace: Path) -> None:
    writable = {str(mount.target) for mount in mounts_of(run_of(workspace)) if mount.writable}
    assert writable == {str(workspace / "data/runs/r1"), "/run/bakeoff/launcher"}


def test_a_folder_is_mounted_before_what_lies_in_it(workspace: Path) -> None:
    targets = [mount.target for mount in mounts_of(run_of(workspace))]
    for index, target in enumerate(targets):
        assert not any(later in target.parents for later in targets[index:])


def test_everything_keeps_its_path(workspace: Path) -> None:
    found = mounts_of(run_of(workspace))
    assert all(m.source == m.target for m in found if not m.writable and m.target != workspace)


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


def test_links_into_dvcs_cache_and_the_hubs_lead_somewhere(workspace: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cache/files/md5/ab/cdef"
    blob = tmp_path / "hub/blobs/1234"
    for index, target in enumerate((cached, blob)):
        target.parent.mkdir(parents=True)
        target.write_text("x")
        (workspace / f"data/bases/vlm/link{index}").symlink_to(target)
    found = mounts_of(run_of(workspace))
    for folder in (tmp_path / "cache/files/md5", tmp_path / "hub/blobs"):
        assert Mount(source=folder, target=folder) in found


def test_without_links_no_cache_is_seen(workspace: Path) -> None:
    (workspace / ".dvc/cache/files/md5/ab").mkdir(parents=True)
    assert not any(".dvc" in str(mount.source) for mount in mounts_of(run_of(workspace)))


def test_kept_folders_are_made_and_writable(workspace: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    found = mounts_of(run_of(workspace, kept_dirs=(cache,)))
    assert cache.is_dir()
    assert Mount(source=cache, target=cache, writable=True) in found


def test_certificates_of_the_caller_go_only_where_the_network_is(workspace: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("x")
    caller = {"SSL_CERT_FILE": str(bundle), "REQUESTS_CA_BUNDLE": str(tmp_path / "nowhere.crt")}
    for network in (True, False):
        found = {mount.target for mount in mounts_of(run_of(workspace, network=network, caller=caller))}
        assert (bundle in found) == network
        assert tmp_path / "nowhere.crt" not in found


def test_a_path_with_a_comma_or_a_quote_stays_one_path() -> None:
    mount = Mount(source=Path('/a,b "c"'), target=Path("/x"))
    assert mount.option() == 'type=bind,"source=/a,b ""c""",target=/x,readonly'
