"""The images' pins and tags, and rules of the Dockerfile."""

import re
import shutil
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.launcher.images import BELOW_VLLM, PINS_VARIABLE, TARGETS, image_reference, read_base
from tests import ROOT


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def change_pin(workspace: Path, name: str, value: str) -> None:
    path = workspace / "docker/images.yaml"
    path.write_text(re.sub(f"^{name}: .*", f"{name}: {value}", path.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("changed", "to", "targets"),
    [
        *((f"docker/{name}", None, TARGETS) for name in ("Dockerfile", "install", "installer.lock")),
        ("docker/cpu.lock", None, ("cpu", "vllm-cpu")),
        ("docker/cuda.lock", None, ("cuda", "vllm")),
        ("docker/vllm.lock", None, ("vllm",)),
        ("docker/vllm-cpu.lock", None, ("vllm-cpu",)),
        ("docker/torchvision_on_cpu.py", None, ("vllm-cpu",)),
        ("docker/dev.lock", None, ()),
        ("docker/images.yaml", None, ()),  # its values count, not its text
        ("docker/flash-attn.lock", None, ()),  # compiled for those who ask for it alone
        ("digest", "sha256:" + 64 * "1", TARGETS),
        ("cuda_devel", "nvidia/cuda:other", ()),
        ("flash_attn", "true", ("cuda", "vllm")),
        ("pyproject.toml", "torch==1.2.3", ("cpu", "vllm-cpu")),  # torch's CPU build, which no lock has
    ],
)
def test_tag_changes_with_what_an_image_is_built_from(
    workspace: Path, changed: str, to: str | None, targets: tuple[str, ...]
) -> None:
    before = {target: image_reference(workspace, target) for target in TARGETS}
    assert all(re.fullmatch(rf"bakeoff:{target}-[0-9a-f]{{12}}", name) for target, name in before.items())
    if to and changed in ("digest", "flash_attn", "cuda_devel"):
        change_pin(workspace, changed, to)
    else:
        text = (workspace / changed).read_text()
        (workspace / changed).write_text(re.sub(r"torch==[\d.]+", to, text) if to else f"{text}\n# changed\n")
    assert {target for target in TARGETS if image_reference(workspace, target) != before[target]} == set(targets)


def test_other_pins_are_another_image(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = image_reference(workspace, "cpu")
    monkeypatch.setenv(PINS_VARIABLE, str(ROOT / ".ci/images.yaml"))
    assert read_base(workspace).reference == "bakeoff-base:bookworm"
    assert image_reference(workspace, "cpu") != before


def test_base_without_a_digest_is_refused(workspace: Path) -> None:
    change_pin(workspace, "digest", "latest")
    with pytest.raises(UserError, match="digest"):
        read_base(workspace)


def test_every_image_ends_as_a_user_without_rights() -> None:
    parts = re.split(r"^FROM ", (ROOT / "docker/Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    stages = {part.split(maxsplit=3)[2]: part for part in parts}
    for target in TARGETS:
        below = BELOW_VLLM.get(target, "runtime")
        assert stages[target].startswith(f"{below} ")
        users = re.findall(r"^USER (.*)", stages["runtime"] + stages[target], re.MULTILINE)
        assert users[-1] == "1000:1000"
