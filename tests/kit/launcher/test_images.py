"""The images' pins and tags, and rules of the Dockerfile."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.kit.launcher.images import BELOW_VLLM, PINS_VARIABLE, TARGETS, image_inputs, image_reference, read_pins
from tests import ROOT


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def change_pins(workspace: Path, keys: str, to: Any) -> None:
    yaml = YAML(typ="safe", pure=True)
    images = entry = yaml.load(workspace / "docker/images.yaml")
    *above, last = keys.split()
    for key in above:
        entry = entry[key]
    entry[last] = to
    YAML().dump(images, workspace / "docker/images.yaml")


@pytest.mark.parametrize(
    ("changed", "to", "targets"),
    [
        *((f"docker/{name}", None, TARGETS) for name in ("Dockerfile", "install", "installer.lock")),
        ("docker/cpu.lock", None, ("cpu", "vllm-cpu")),
        ("docker/cuda.lock", None, ("cuda", "vllm")),
        ("docker/flash-attn.lock", None, ("cuda", "vllm")),
        ("docker/vllm.lock", None, ("vllm",)),
        ("docker/vllm-cpu.lock", None, ("vllm-cpu",)),
        ("docker/torchvision_on_cpu.py", None, ("vllm-cpu",)),
        ("docker/dev.lock", None, ()),
        ("docker/images.yaml", None, ()),  # its values count, not its text
        ("bases python digest", "sha256:" + 64 * "1", TARGETS),
        ("bases cuda-devel digest", "sha256:" + 64 * "1", ("cuda", "vllm")),
        ("flash_attn", False, ("cuda", "vllm")),
        ("pyproject.toml", "torch==1.2.3", ("cpu", "vllm-cpu")),  # torch's CPU build, which no lock has
    ],
)
def test_tag_changes_with_what_an_image_is_built_from(
    workspace: Path, changed: str, to: Any, targets: tuple[str, ...]
) -> None:
    change_pins(workspace, "flash_attn", True)
    before = {target: image_reference(workspace, target) for target in TARGETS}
    assert all(re.fullmatch(rf"bakeoff:{target}-[0-9a-f]{{12}}", name) for target, name in before.items())
    if changed.startswith(("bases", "flash_attn")):
        change_pins(workspace, changed, to)
    else:
        text = (workspace / changed).read_text()
        (workspace / changed).write_text(re.sub(r"torch==[\d.]+", to, text) if to else f"{text}\n# changed\n")
    assert {target for target in TARGETS if image_reference(workspace, target) != before[target]} == set(targets)


def test_flash_attn_is_compiled_for_those_who_ask_for_it_alone(workspace: Path) -> None:
    assert not {"docker/flash-attn.lock", "cuda-devel"} & image_inputs(workspace, "cuda").keys()


def test_other_pins_are_another_image(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = image_reference(workspace, "cpu")
    monkeypatch.setenv(PINS_VARIABLE, str(ROOT / ".ci/images.yaml"))
    assert read_pins(workspace).bases.python.reference == "bakeoff-base:bookworm"
    assert image_reference(workspace, "cpu") != before


def test_wrong_pins_are_refused_by_their_dotted_path(workspace: Path) -> None:
    change_pins(workspace, "bases python digest", "latest")
    with pytest.raises(UserError, match=r"bases\.python\.digest"):
        read_pins(workspace)


def test_every_image_ends_as_a_user_without_rights() -> None:
    parts = re.split(r"^FROM ", (ROOT / "docker/Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    stages = {part.split(maxsplit=3)[2]: part for part in parts}
    for target in TARGETS:
        below = BELOW_VLLM.get(target, "runtime")
        assert stages[target].startswith(f"{below} ")
        users = re.findall(r"^USER (.*)", stages["runtime"] + stages[target], re.MULTILINE)
        assert users[-1] == "1000:1000"
