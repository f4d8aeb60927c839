import json
import os
import shutil
from hashlib import md5
from pathlib import Path

import pytest
from dvc.repo import Repo
from dvc_objects.fs.system import reflink

from stages.core.dvc_cache import cache_dir
from stages.kit.launcher import cache
from stages.kit.launcher.cache import MIN_BYTES, share_with_cache
from stages.kit.launcher.launch import kept_inputs
from stages.kit.launcher.pipeline import DeclaredStage
from tests import ROOT

CONTENT = os.urandom(MIN_BYTES)


def keep(workspace: Path, content: bytes, *, suffix: str = "") -> tuple[Path, str]:
    """As DVC does: an object, and its name."""
    digest = md5(content, usedforsecurity=False).hexdigest() + suffix
    path = workspace / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o444)
    return path, digest


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The object of a file in the output data/out, of which the workspace has a second copy."""
    (tmp_path / "data/out/sub").mkdir(parents=True)
    (tmp_path / "data/out/sub/weights").write_bytes(CONTENT)
    cached, digest = keep(tmp_path, CONTENT)
    listing = json.dumps([{"md5": digest, "relpath": "sub/weights"}]).encode()
    _, folder = keep(tmp_path, listing, suffix=".dir")
    (tmp_path / "dvc.lock").write_text(
        f"schema: '2.0'\nstages:\n  a:\n    cmd: a\n    outs:\n    - path: data/out\n      hash: md5\n"
        f"      md5: {folder}\n      size: 3\n    - path: data/out/sub/weights\n      hash: md5\n      md5: {digest}\n"
    )
    return cached


def share(workspace: Path, path: str = "data/out") -> int:
    return share_with_cache(workspace, [path], aside=workspace / "link")


@pytest.mark.parametrize("path", ["data/out", "data/out/sub/weights"])
def test_a_second_copy_becomes_a_read_only_link_to_dvcs_object(kept: Path, tmp_path: Path, path: str) -> None:
    file = tmp_path / "data/out/sub/weights"
    assert share(tmp_path, path) == 1
    assert file.samefile(kept)
    assert file.stat().st_mode & 0o777 == 0o444
    assert not (tmp_path / "link").exists()
    assert share(tmp_path, path) == 0, "nothing is left to do"


@pytest.mark.parametrize("damaged", ["data/out/sub/weights", "the object"])
def test_what_is_damaged_stays_as_it_is_for_verify_to_find(kept: Path, tmp_path: Path, damaged: str) -> None:
    path = kept if damaged == "the object" else tmp_path / damaged
    stat = path.stat()
    path.chmod(0o644)
    path.write_bytes(content := bytes([CONTENT[0] ^ 1]) + CONTENT[1:])
    path.chmod(stat.st_mode & 0o777)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert share(tmp_path) == 0
    assert path.read_bytes() == content
    assert path.stat().st_nlink == 1


def test_an_object_that_dvc_has_not_finished_small_files_and_a_broken_lock_are_left_alone(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.chmod(0o644)
    assert share(tmp_path) == 0
    kept.chmod(0o444)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "MIN_BYTES", MIN_BYTES + 1)
        assert share(tmp_path) == 0
    lock = (tmp_path / "dvc.lock").read_text()
    (tmp_path / "dvc.lock").write_text(lock[:60])
    assert share(tmp_path) == 0
    (tmp_path / "dvc.lock").unlink()
    assert share(tmp_path) == 0


def test_where_links_cannot_be_made_the_copy_stays_and_what_a_killed_launcher_left_is_no_obstacle(
    kept: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").mkdir()
    assert share(tmp_path) == 0
    assert (tmp_path / "data/out/sub/weights").read_bytes() == CONTENT
    (tmp_path / "link").rmdir()
    (tmp_path / "link").write_text("left over")
    assert share(tmp_path) == 1


def test_only_outputs_are_shared_and_never_what_git_keeps() -> None:
    def stage(name: str, deps: tuple[str, ...], outs: tuple[str, ...]) -> DeclaredStage:
        return DeclaredStage(name=name, command=name, params=(), deps=deps, outs=outs)

    reader = stage("b", ("data/tiny", "data/tiny/x.txt", "data/out/train.parquet", "data/out", "stages/b.py"), ())
    stages = [stage("a", (), ("data/out",)), reader]
    assert kept_inputs(reader, stages) == ["data/out/train.parquet", "data/out"]


PIPELINE = """
stages:
  a:
    cmd: mkdir -p data/out && head -c 100000 /dev/zero > data/out/weights && echo 1 > data/metrics.json
    outs: [data/out]
    metrics: [data/metrics.json]
"""


def test_dvc_links_what_it_keeps_and_the_launcher_what_was_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By DVC itself, with the configuration of this repository."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "dvc.yaml").write_text(PIPELINE)
    repo = Repo.init(str(tmp_path), no_scm=True)
    shutil.copy(ROOT / ".dvc/config", tmp_path / ".dvc/config")
    (tmp_path / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")
    try:
        reflink(tmp_path / "dvc.yaml", tmp_path / "clone")
    except OSError:
        pass
    else:
        pytest.skip("this file system has reflinks, whose link count stays 1")
    repo = Repo(str(tmp_path))
    weights, metrics = tmp_path / "data/out/weights", tmp_path / "data/metrics.json"
    repo.reproduce()
    assert [path.stat().st_nlink for path in (weights, metrics)] == [2, 2]
    assert weights.stat().st_mode & 0o777 == 0o444
    repo.reproduce(force=True)
    assert weights.stat().st_nlink == 1, "DVC itself links it: share_with_cache is no longer needed"
    assert share(tmp_path) == 1
    assert weights.samefile(next(path for path in cache_dir(tmp_path).glob("??/*") if path.stat().st_size == 100_000))
    assert Repo(str(tmp_path)).status() == {}
