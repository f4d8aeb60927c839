from pathlib import Path

from stages.core.given_files import cache_dir


def test_the_cache_is_where_dvc_is_told_to_have_it(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    assert cache_dir(tmp_path) == tmp_path / ".dvc/cache/files/md5"
    (tmp_path / ".dvc/config").write_text(
        '[cache]\n    # why\n    dir = ../common\n    type = "a,b"\n[\'remote "x"\']\n  url = y\n'
    )
    assert cache_dir(tmp_path) == tmp_path / ".dvc/../common/files/md5"
    (tmp_path / ".dvc/config.local").write_text("[cache]\n    dir = /elsewhere\n")
    assert cache_dir(tmp_path) == Path("/elsewhere/files/md5")
