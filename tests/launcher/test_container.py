"""A stage in a container: the part of the machine that it sees, and where it writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import UserError
from stages.launcher.container import Mount, StageFolder, mounts
from stages.launcher.pipeline import DeclaredStage, declared_stages
from tests import ROOT
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


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def mounts_of(workspace: Path, stage: DeclaredStage = MERGE, **changes: Any) -> list[Mount]:
    request = request_of(workspace, *stage.command.split()[1:], stages=[stage], **changes)
    folder = StageFolder(request)
    with folder.new_run():
        return mounts(request, None, folder)


def is_writable(path: Path, mounted: list[Mount]) -> bool | None:
    """Whether a stage may write there, by the innermost mount; None if it does not see the path."""
    around = [mount.writable for mount in mounted if mount.target in (path, *path.parents)]
    return around[-1] if around else None


def test_stage_sees_declared_inputs_and_code_read_only_and_the_parents_of_its_outputs(workspace: Path) -> None:
    mounted = mounts_of(workspace)
    inputs = ("params.yaml", "stages", "data/bases/vlm", "data/runs/r1/trained")
    readable = {str(mount.target) for mount in mounted if not mount.writable}
    assert readable == {*(str(workspace / path) for path in inputs), "/run/bakeoff/launcher"}
    writable = {str(mount.target) for mount in mounted if mount.writable}
    assert writable == {str(workspace / "data/runs/r1"), "/run/bakeoff/ready"}


STAGES = {stage.name.partition("@")[0]: stage for stage in declared_stages(ROOT)}


@pytest.mark.parametrize("kind", STAGES)
def test_no_stage_may_write_to_an_input_or_outside_the_parents_of_its_outputs(workspace: Path, kind: str) -> None:
    stage = STAGES[kind]
    inputs, outputs = ([workspace / path for path in paths] for paths in (stage.inputs("data"), stage.written))
    for path in inputs:
        path.mkdir(parents=True, exist_ok=True)
    mounted = mounts_of(workspace, stage, kept_dirs=())
    assert {is_writable(path / "new", mounted) for path in inputs} <= {False}
    assert {is_writable(path, mounted) for path in outputs} == {True}
    assert stage.provenance is not None
    for other in (".dvc/cache", ".dvc/tmp", ".git", "data/new", "new", stage.provenance):
        assert not is_writable(workspace / other, mounted)
    for mount in mounted:
        # An engine makes the place of a mount in the container's root, and none inside another mount.
        around = [each for each in mounted if each.target in mount.target.parents]
        assert all(mounted.index(each) < mounted.index(mount) for each in around)
        assert not around or mount.source == mount.target
        # A stage could not rename a folder that is a mount, as it does to write one whole.
        assert not (around and mount.writable)


def test_input_in_which_an_output_would_lie_stays_read_only(workspace: Path) -> None:
    mounted = mounts_of(workspace, replace(MERGE, outs=("data/bases/vlm/new",)))
    assert is_writable(workspace / "data/bases/vlm", mounted) is False


def test_source_and_kept_folders_keep_their_paths(workspace: Path, tmp_path: Path) -> None:
    source, kept = tmp_path / "photos", tuple(workspace / ".bakeoff" / name for name in ("hub", "triton/0123"))
    source.mkdir()
    mounted = mounts_of(workspace, source_dir=source, kept_dirs=kept)
    assert Mount(source, source) in mounted
    for folder in kept:
        assert folder.is_dir()
        assert Mount(folder, folder, writable=True) in mounted
    assert not any(mount.writable for mount in mounted if mount.target.name in (".bakeoff", "triton"))
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


def test_callers_certificates_come_with_the_network(workspace: Path, tmp_path: Path) -> None:
    bundle = write(tmp_path / "ca.crt")
    hub, nowhere = tmp_path / "hub", tmp_path / "nowhere.crt"
    caller = {"SSL_CERT_FILE": str(bundle), "REQUESTS_CA_BUNDLE": str(nowhere), "HF_HOME": str(hub)}
    for network in (True, False):
        targets = {mount.target for mount in mounts_of(workspace, network=network, caller=caller)}
        assert targets & {bundle, hub, nowhere} == ({bundle, hub} if network else set())


def test_path_with_a_comma_or_a_quote_stays_one_path() -> None:
    mount = Mount(source=Path('/a,b "c"'), target=Path("/x"))
    assert mount.option() == 'type=bind,"source=/a,b ""c""",target=/x,readonly'


def test_a_run_starts_without_files_of_a_killed_one_and_leaves_none(workspace: Path) -> None:
    folder = StageFolder(request_of(workspace, "merge", "r1", stages=[MERGE]))
    write(folder.ready_path, "left by a killed launcher")
    write(folder.scratch_dir / "left")
    with folder.new_run():
        assert folder.ready_path.read_text() == ""
        assert list(folder.scratch_dir.iterdir()) == []
        write(folder.scratch_dir / "left")
    assert files_of(workspace / ".bakeoff") == {"stages/merge@r1/lock"}


def test_one_launcher_runs_a_stage_at_a_time_and_others_run_beside_it(workspace: Path) -> None:
    merge, train = (request_of(workspace, kind, "r1", stages=[MERGE, TRAIN]) for kind in ("merge", "train"))
    with (
        StageFolder(merge).alone(),
        StageFolder(train).alone(),
        pytest.raises(UserError, match="merge@r1 is already running in this workspace"),
    ):
        StageFolder(merge).alone().__enter__()
