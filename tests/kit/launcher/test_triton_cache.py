from pathlib import Path

import pytest

from stages.kit.launcher import triton_cache
from stages.kit.launcher.triton_cache import triton_dir

REPOSITORY = Path("/repository")


def test_each_image_and_each_set_of_packages_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [None, None, ("bakeoff:cuda-0", "sha256:0123456789abcdef"), ("bakeoff:cuda-0", "sha256:fedcba9876543210")]
    folders = [triton_dir(image, REPOSITORY) for image in images]
    assert folders[0] == folders[1]
    assert folders[2] == REPOSITORY / ".bakeoff/triton/0123456789ab"
    monkeypatch.setattr(triton_cache, "installed_packages", lambda _: {"triton": "0.0.1"})
    folders.append(triton_dir(None, REPOSITORY))
    assert {folder.parent for folder in folders} == {REPOSITORY / ".bakeoff/triton"}
    assert len(set(folders)) == 4
