"""`make image` and `make base-image`, with a fake docker that writes down its commands."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stages.core.errors import UserError
from stages.kit.launcher.docker import Client
from stages.kit.launcher.images import image_references, read_pins
from tests import ROOT
from tools.image import __main__ as build

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
PYTHON, STAND_IN = PINS.bases.python.reference, PINS.bases.stand_in.reference
CPU = image_references(ROOT, "cpu")
CUDA = image_references(ROOT, "cuda")


@pytest.mark.parametrize("reference", CPU)
def test_an_image_that_is_there_is_not_built_again(docker: Path, reference: str) -> None:
    code, said, command = make_image(docker, images=(reference,))
    assert (code, command) == (0, "")
    assert f"{reference} is built already" in said
    assert "pull" not in (docker / "asked").read_text()


def test_the_pinned_base_is_preferred_and_only_cuda_has_a_network_for_its_compiler_and_for_flash_attn(
    docker: Path,
) -> None:
    code, _, command = make_image(docker, images=(PYTHON, STAND_IN))
    assert code == 0
    assert f"--tag {CPU[0]} --network none" in command
    assert f"PYTHON_IMAGE={PYTHON}" in command
    assert PINS.flash_attn, "this test needs a target with flash-attn"
    (docker / "asked").unlink()
    _, _, command = make_image(docker, "--target", "cuda", images=(PYTHON,))
    assert f"--tag {CUDA[0]}" in command
    assert "--network" not in command
    assert "FLASH_ATTN=1" in command


def test_a_base_that_is_not_there_is_pulled_by_its_content_or_the_stand_in_is_used_and_that_is_said(
    docker: Path,
) -> None:
    code, _, command = make_image(docker, images=(STAND_IN,), PULLS="1")
    assert f"pull --quiet {PYTHON}" in (docker / "asked").read_text()
    assert code == 0
    assert CPU[0] in command
    (docker / "asked").unlink()
    code, said, command = make_image(docker, "--target", "cuda", images=(STAND_IN,))
    assert code == 0
    assert "using the stand-in bakeoff-base:bookworm: python:3.12" in said
    assert f"--tag {CUDA[1]}" in command
    assert "--network" not in command
    assert "FLASH_ATTN=0" in command


def test_a_client_that_builds_is_found_behind_one_that_does_not(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = docker / "newer"
    newer.mkdir()
    (newer / "docker").write_text(FAKE.replace("20.10.24", "28.2.2"))
    (newer / "docker").chmod(0o755)
    (newer / "images").write_text("")
    monkeypatch.setenv("PATH", f"{newer}:{docker}:/bin")
    assert build.find_builder(Client("docker")) == (Client(str(docker / "docker")), ("build",))


def test_a_newer_docker_builds_with_its_plugin(docker: Path) -> None:
    _, _, command = make_image(docker, images=(PYTHON,), CLIENT="28.2.2", BUILDX="1")
    assert command.startswith("buildx build --load ")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "make base-image"),  # there is no base
        ({"STOPPED": "1"}, "does not answer: Cannot connect"),
        ({"ARCH": "riscv64"}, "containers run on riscv64 here"),
        ({"CLIENT": "28.2.2"}, "the plugin buildx is missing"),
    ],
)
def test_an_engine_or_a_machine_that_will_not_do_is_named(
    docker: Path, environment: dict[str, Any], message: str
) -> None:
    code, said, command = make_image(docker, **environment)
    assert (code, command) == (1, "")
    assert message in said
    assert ("pull" in (docker / "asked").read_text()) == (environment == {}), "nothing is fetched in vain"


def test_what_is_not_installed_is_named(docker: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda program, **_: None if program == "mmdebstrap" else program)
    result = CliRunner().invoke(build.main, ["base-image", "--engine", str(docker / "docker")])
    assert result.exit_code == 1
    assert "apt install mmdebstrap" in result.output
    monkeypatch.setattr(shutil, "which", lambda program, **_: None)
    with pytest.raises(UserError, match="no docker, podman or apptainer is on the PATH"):
        build.find_engine(None)
