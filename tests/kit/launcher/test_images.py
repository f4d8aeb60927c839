"""The images' pins and tags, and what the Dockerfile may not do."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.kit.launcher.images import BELOW_VLLM, image_references, read_pins
from tests import ROOT

IMAGES = YAML(typ="safe", pure=True).load((ROOT / "docker/images.yaml").read_text())


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def change_pins(workspace: Path, *keys: str, to: Any) -> None:
    images = YAML(typ="safe", pure=True).load((workspace / "docker/images.yaml").read_text())
    entry = images
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = to
    YAML().dump(images, workspace / "docker/images.yaml")


BOTH, PINNED, STAND_IN, NEITHER = [True, True], [True, False], [False, True], [False, False]


@pytest.mark.parametrize(
    ("changed", "to", "cpu", "cuda"),
    [
        ("docker/Dockerfile", None, BOTH, BOTH),
        ("docker/install", None, BOTH, BOTH),
        ("docker/installer.lock", None, BOTH, BOTH),
        ("docker/cpu.lock", None, BOTH, NEITHER),
        ("docker/cuda.lock", None, NEITHER, BOTH),
        ("docker/check_triton.py", None, NEITHER, BOTH),
        ("docker/flash-attn.lock", None, NEITHER, PINNED),
        ("docker/dev.lock", None, NEITHER, NEITHER),
        ("docker/vllm.lock", None, NEITHER, NEITHER),
        ("docker/vllm-cpu.lock", None, NEITHER, NEITHER),
        ("docker/torchvision_on_cpu.py", None, NEITHER, NEITHER),
        ("docker/images.yaml", None, NEITHER, NEITHER),  # its values count, not how they are written
        ("bases python digest", "sha256:" + 64 * "1", PINNED, PINNED),
        ("bases cuda-devel digest", "sha256:" + 64 * "1", NEITHER, PINNED),
        ("bases stand-in packages", ["python3"], STAND_IN, STAND_IN),
        ("bases stand-in image", "bakeoff-base:trixie", STAND_IN, STAND_IN),
        ("flash_attn", not IMAGES["flash_attn"], NEITHER, PINNED),
        # torch's CPU build, which no lock has.
        ("pyproject.toml", "torch==1.2.3", BOTH, NEITHER),
    ],
)
def test_a_file_or_a_pin_changes_the_tags_of_the_images_that_are_built_from_it(
    workspace: Path, changed: str, to: Any, cpu: list[bool], cuda: list[bool]
) -> None:
    """cpu, cuda: which of its tags are new, that on the pinned base and that on the stand-in."""
    before = {target: image_references(workspace, target) for target in ("cpu", "cuda")}
    if changed.startswith(("bases", "flash_attn")):
        change_pins(workspace, *changed.split(), to=to)
    else:
        text = (workspace / changed).read_text()
        (workspace / changed).write_text(re.sub(r"torch==[\d.]+", to, text) if to else f"{text}\n# changed\n")
    for target, expected in (("cpu", cpu), ("cuda", cuda)):
        after = image_references(workspace, target)
        assert [new != old for new, old in zip(after, before[target], strict=True)] == expected


@pytest.mark.parametrize(
    ("changed", "of_gpu", "of_cpu"),
    [
        ("vllm.lock", True, False),
        ("check_triton.py", True, False),
        ("vllm-cpu.lock", False, True),
        ("torchvision_on_cpu.py", False, True),
        ("install", True, True),
        ("cpu.lock", False, True),
        ("cuda.lock", True, False),
    ],
)
def test_the_images_of_vllm_are_made_of_those_of_stages(
    workspace: Path, changed: str, *, of_gpu: bool, of_cpu: bool
) -> None:
    before = [image_references(workspace, target) for target in ("vllm", "vllm-cpu")]
    path = workspace / "docker" / changed
    path.write_text(f"{path.read_text()}\n# changed\n")
    after = [image_references(workspace, target) for target in ("vllm", "vllm-cpu")]
    assert [old != new for old, new in zip(before, after, strict=True)] == [of_gpu, of_cpu]


def test_the_pinned_image_comes_first_and_the_stand_ins_is_named_so(workspace: Path) -> None:
    pinned, stand_in = image_references(workspace, "cpu")
    assert re.fullmatch(r"bakeoff:cpu-[0-9a-f]{12}", pinned)
    assert re.fullmatch(r"bakeoff:cpu-[0-9a-f]{12}-debian", stand_in)
    assert pinned not in stand_in


def test_a_base_without_a_digest_and_a_glibc_that_is_a_number_are_refused(workspace: Path) -> None:
    change_pins(workspace, "bases", "python", "digest", to="latest")
    change_pins(workspace, "bases", "cuda-devel", "digest", to=None)
    change_pins(workspace, "bases", "stand-in", "glibc", to=2.40)
    with pytest.raises(UserError) as refused:
        read_pins(workspace)
    problems = refused.value.message.splitlines()[1:]
    assert [problem.split(":")[0].strip() for problem in problems] == [
        "bases.python.digest",
        "bases.stand-in.glibc",
        "bases.cuda-devel",
    ]
    assert "needs a digest, as `docker pull` prints it" in problems[2]


def test_the_pinned_bases_fit_each_other() -> None:
    """flash-attn is compiled for the Python that it runs on: Ubuntu 24.04 has Python 3.12 and glibc 2.39, and a newer C
    library runs what an older one compiled.
    """
    python = IMAGES["bases"]["python"]
    assert python["image"].startswith(f"python:{python['python']}-")
    assert IMAGES["bases"]["cuda-devel"]["image"].endswith("ubuntu24.04")
    assert python["python"].startswith("3.12.")
    assert tuple(map(int, python["glibc"].split("."))) >= (2, 39)


def test_the_dockerfile_starts_from_pins_alone_and_copies_no_code() -> None:
    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    stages = [line.split()[-1] for line in lines if line.startswith("FROM ")]
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    arguments = ["${PYTHON_IMAGE}", "${CUDA_DEVEL_IMAGE}", "flash-attn-${FLASH_ATTN}", "scratch"]
    assert [base for base in bases if base not in [*arguments, *stages]] == []
    # A default would be a second place for a pin.
    assert [line for line in lines if line.startswith("ARG ") and "=" in line] == []
    assert [line for line in lines if line.startswith(("ADD ", "COPY ")) and "--from=" not in line] == []
    assert [line for line in lines if re.search(r"^# *syntax|<<|--link|://", line)] == []


def stages_of_the_dockerfile() -> dict[str, str]:
    """Their instructions, by name."""
    text = (ROOT / "docker/Dockerfile").read_text()
    return {part.split(maxsplit=3)[2]: part for part in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_both_targets_end_as_a_user_without_rights(target: str) -> None:
    stages = stages_of_the_dockerfile()
    assert stages[target].startswith("runtime ")
    assert re.findall(r"^USER (.*)", stages["runtime"] + stages[target], re.MULTILINE)[-1] == "1000:1000"


def test_vllm_ends_as_a_user_without_rights() -> None:
    stages = stages_of_the_dockerfile()
    for name, below in BELOW_VLLM.items():
        assert stages[name].startswith(f"{below} ")
        assert re.findall(r"^USER (.*)", stages[name], re.MULTILINE) == ["root", "1000:1000"]


def test_cuda_alone_has_a_compiler_and_is_no_image_before_triton_has_compiled_in_it() -> None:
    stages = stages_of_the_dockerfile()
    assert [name for name, text in stages.items() if "docker/install compiler" in text] == ["cuda"]
    *_, last = (line for line in stages["cuda"].splitlines() if line)
    assert last.startswith("RUN ")
    assert last.endswith(" python /docker/check_triton.py")
    places = [stages["cuda"].index(text) for text in ("install compiler", "USER 1000:1000", last)]
    assert places == sorted(places)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {"!docker/check_triton.py", "!docker/install"} <= set(ignored), "the build does not see what it runs"
