"""The images' pins and tags, and what the Dockerfile may not do."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.kit.launcher.client import Client
from stages.kit.launcher.images import image_references, read_pins
from tests import ROOT
from tools.image import __main__ as build

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


def changed(workspace: Path, before: dict[str, tuple[str, ...]]) -> dict[str, list[bool]]:
    """Target to which of its tags are new: that on the pinned base, that on the stand-in."""
    after = {target: image_references(workspace, target) for target in before}
    return {target: [new != old for new, old in zip(after[target], before[target], strict=True)] for target in before}


BOTH, PINNED, STAND_IN, NEITHER = [True, True], [True, False], [False, True], [False, False]


@pytest.mark.parametrize(
    ("file", "cpu", "cuda"),
    [
        ("docker/Dockerfile", BOTH, BOTH),
        ("docker/install", BOTH, BOTH),
        ("docker/installer.lock", BOTH, BOTH),
        ("docker/cpu.lock", BOTH, NEITHER),
        ("docker/cuda.lock", NEITHER, BOTH),
        ("docker/check_triton.py", NEITHER, BOTH),
        ("docker/flash-attn.lock", NEITHER, PINNED),
        ("docker/dev.lock", NEITHER, NEITHER),
        ("docker/lm-eval.lock", NEITHER, NEITHER),
        ("docker/images.yaml", NEITHER, NEITHER),  # what it says counts, not how
    ],
)
def test_a_file_changes_the_tags_of_the_images_that_are_built_from_it(
    workspace: Path, file: str, cpu: list[bool], cuda: list[bool]
) -> None:
    before = {target: image_references(workspace, target) for target in ("cpu", "cuda")}
    (workspace / file).write_text((workspace / file).read_text() + "\n# changed\n")
    assert changed(workspace, before) == {"cpu": cpu, "cuda": cuda}


@pytest.mark.parametrize(
    ("keys", "to", "cpu", "cuda"),
    [
        (("bases", "python", "digest"), "sha256:" + 64 * "1", PINNED, PINNED),
        (("bases", "cuda-devel", "digest"), "sha256:" + 64 * "1", NEITHER, PINNED),
        (("bases", "stand-in", "packages"), ["python3"], STAND_IN, STAND_IN),
        (("bases", "stand-in", "image"), "bakeoff-base:trixie", STAND_IN, STAND_IN),
        (("targets", "cuda", "flash_attn"), not IMAGES["targets"]["cuda"]["flash_attn"], NEITHER, PINNED),
    ],
)
def test_a_pin_changes_the_tags_of_the_images_that_are_built_from_it(
    workspace: Path, keys: tuple[str, ...], to: Any, cpu: list[bool], cuda: list[bool]
) -> None:
    before = {target: image_references(workspace, target) for target in ("cpu", "cuda")}
    change_pins(workspace, *keys, to=to)
    assert changed(workspace, before) == {"cpu": cpu, "cuda": cuda}


def test_the_version_of_torchs_cpu_build_which_no_lock_has_is_in_the_tag(workspace: Path) -> None:
    before = {target: image_references(workspace, target) for target in ("cpu", "cuda")}
    project_path = workspace / "pyproject.toml"
    project_path.write_text(re.sub(r"torch==[\d.]+", "torch==1.2.3", project_path.read_text()))
    assert changed(workspace, before) == {"cpu": BOTH, "cuda": NEITHER}


def test_the_pinned_image_comes_first_and_the_stand_ins_is_named_so(workspace: Path) -> None:
    pinned, stand_in = image_references(workspace, "cpu")
    assert re.fullmatch(r"bakeoff:cpu-[0-9a-f]{12}", pinned)
    assert re.fullmatch(r"bakeoff:cpu-[0-9a-f]{12}-debian", stand_in)
    assert pinned not in stand_in


def test_a_base_without_a_digest_is_refused(workspace: Path) -> None:
    change_pins(workspace, "bases", "python", "digest", to="latest")
    with pytest.raises(UserError, match=r"bases\.python\.digest is latest; sha256: and 64 hex"):
        read_pins(workspace)


def test_flash_attn_is_compiled_for_the_python_that_it_runs_on() -> None:
    """Ubuntu 24.04 has Python 3.12 and glibc 2.39; a newer C library runs what an older one compiled."""
    assert IMAGES["bases"]["cuda-devel"]["image"].endswith("ubuntu24.04")
    assert IMAGES["bases"]["python"]["python"].startswith("3.12.")
    assert tuple(map(int, IMAGES["bases"]["python"]["glibc"].split("."))) >= (2, 39)


def test_the_pinned_base_has_the_python_that_wheels_are_chosen_for() -> None:
    python = IMAGES["bases"]["python"]
    assert python["image"].startswith(f"python:{python['python']}-")


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


# Answers as docker: has the images named in `images`, pulls only where PULLS is set, writes down what it is asked.
FAKE = r"""#!/usr/bin/env bash
cd "$(dirname "$0")"
echo "$*" >>asked
case "$*" in
  "image inspect --format {{.Size}}"*) echo 2040000000 ;;
  "image inspect"*) grep -qxF "${*: -1}" images && echo sha256:0123 ;;
  "pull"*) [ -n "${PULLS:-}" ] || { echo "no route to a registry" >&2; exit 1; } ;;
  "version"*Client*) echo "${CLIENT:-20.10.24}" ;;
  "version"*) [ -z "${STOPPED:-}" ] || { echo "Cannot connect" >&2; exit 1; }; echo "${ARCH:-amd64}" ;;
  "buildx version") [ -n "${BUILDX:-}" ] ;;
  *build*) ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake docker, alone on the PATH with the system's shell."""
    (tmp_path / "docker").write_text(FAKE)
    (tmp_path / "docker").chmod(0o755)
    (tmp_path / "images").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(build, "make_wheelhouse", lambda *_: False)
    monkeypatch.setattr(build, "wheelhouse_digest", lambda _: 64 * "0")
    monkeypatch.setattr(build, "wheelhouse_dir", lambda _: tmp_path)
    return tmp_path


def make_image(docker: Path, *args: str, images: tuple[str, ...] = (), **environment: str) -> tuple[int, str, str]:
    """Exit code, what was said, and the build command, "" where there was none."""
    (docker / "images").write_text("\n".join(images))
    result = CliRunner().invoke(
        build.main, ["image", "--engine", str(docker / "docker"), "--target", "cpu", *args], env=environment
    )
    asked = (docker / "asked").read_text().splitlines()
    return result.exit_code, result.output, next((line for line in asked if "--build-arg" in line), "")


PINS = read_pins(ROOT)
CPU = image_references(ROOT, "cpu")
CUDA = image_references(ROOT, "cuda")


@pytest.mark.parametrize("reference", CPU)
def test_an_image_that_is_there_is_not_built_again(docker: Path, reference: str) -> None:
    code, said, command = make_image(docker, images=(reference,))
    assert (code, command) == (0, "")
    assert f"{reference} is built already" in said
    assert "pull" not in (docker / "asked").read_text()


def test_the_pinned_base_is_preferred_and_the_build_has_no_network(docker: Path) -> None:
    code, _, command = make_image(docker, images=(PINS.python.reference, PINS.stand_in.reference))
    assert code == 0
    assert f"--tag {CPU[0]} --network none" in command
    assert f"PYTHON_IMAGE={PINS.python.reference}" in command


def test_only_cuda_has_a_network_for_its_compiler_and_for_flash_attn(docker: Path) -> None:
    assert PINS.flash_attn["cuda"], "this test needs another target with flash-attn"
    _, _, command = make_image(docker, "--target", "cuda", images=(PINS.python.reference,))
    assert f"--tag {CUDA[0]}" in command
    assert "--network" not in command
    assert "FLASH_ATTN=1" in command


def test_a_base_that_is_not_there_is_pulled_by_its_content(docker: Path) -> None:
    code, _, command = make_image(docker, images=(PINS.stand_in.reference,), PULLS="1")
    assert f"pull --quiet {PINS.python.reference}" in (docker / "asked").read_text()
    assert code == 0
    assert CPU[0] in command


def test_without_a_registry_the_stand_in_is_used_and_that_is_said(docker: Path) -> None:
    code, said, command = make_image(docker, "--target", "cuda", images=(PINS.stand_in.reference,))
    assert code == 0
    assert "using the stand-in bakeoff-base:bookworm: python:3.12" in said
    assert f"--tag {CUDA[1]}" in command
    assert "--network" not in command
    assert "FLASH_ATTN=0" in command


def test_without_any_base_the_way_to_one_is_named(docker: Path) -> None:
    code, said, command = make_image(docker)
    assert (code, command) == (1, "")
    assert "make base-image" in said


def test_a_docker_without_its_build_plugin_is_told_so_before_anything_is_fetched(docker: Path) -> None:
    code, said, command = make_image(docker, CLIENT="28.2.2")
    assert (code, command) == (1, "")
    assert "the plugin buildx is missing" in said
    assert "pull" not in (docker / "asked").read_text()


def test_a_client_that_builds_is_found_behind_one_that_does_not(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = docker / "newer"
    newer.mkdir()
    (newer / "docker").write_text(FAKE.replace("20.10.24", "28.2.2"))
    (newer / "docker").chmod(0o755)
    (newer / "images").write_text("")
    monkeypatch.setenv("PATH", f"{newer}:{docker}:/bin")
    assert build.find_builder(Client("docker")) == (Client(str(docker / "docker")), ("build",))


def test_a_newer_docker_builds_with_its_plugin(docker: Path) -> None:
    _, _, command = make_image(docker, images=(PINS.python.reference,), CLIENT="28.2.2", BUILDX="1")
    assert command.startswith("buildx build --load ")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"STOPPED": "1"}, "does not answer: Cannot connect"),
        ({"ARCH": "riscv64"}, "containers run on riscv64 here"),
    ],
)
def test_an_engine_that_will_not_do_is_named(
    docker: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, said, command = make_image(docker)
    assert (code, command) == (1, "")
    assert message in said


def test_no_engine_at_all_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="neither docker nor podman is on the PATH"):
        build.find_client(None)


def test_without_mmdebstrap_what_is_missing_is_said(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program, **_: None if program == "mmdebstrap" else program)
    result = CliRunner().invoke(build.main, ["base-image", "--engine", str(docker / "docker")])
    assert result.exit_code == 1
    assert "apt install mmdebstrap" in result.output
