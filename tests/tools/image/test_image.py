"""`make image` with docker, and with Apptainer with or without docker: fakes that note their arguments."""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stages.launcher.apptainer import digest_path, sif_path
from stages.launcher.engines import CONTAINER_ENGINES
from stages.launcher.images import PINS_VARIABLE, image_reference, read_base
from tests import ROOT
from tools.image import __main__ as build

# Responds like docker: has the images named in `images`, pulls only if PULLS is set, notes its arguments.
DOCKER = r"""#!/bin/bash
cd "$(dirname "$0")"
echo "$*" >>asked
[ -z "${STOPPED:-}" ] || { echo "Cannot connect" >&2; exit 1; }
case "$*" in
  "image inspect"*) grep -qxF "${*: -1}" images && echo sha256:0123 ;;
  "pull"*) [ -n "${PULLS:-}" ] || { echo "no route to a registry" >&2; exit 1; } ;;
  "info"*) echo "{\"Architecture\": \"${ARCH:-x86_64}\"}" ;;
  "buildx version") [ -n "${BUILDX:-}" ] ;;
  save*) echo an archive >"$3" ;;
esac
"""

# Responds like apptainer: builds a file.
APPTAINER = r"""#!/bin/bash
echo "apptainer $*" >>"$(dirname "$0")/asked"
[ -z "${BROKEN:-}" ] || exit 255
echo a SIF >"$4"
"""

PYTHON = read_base(ROOT).reference
CPU, CUDA = (image_reference(ROOT, target) for target in ("cpu", "cuda"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fakes and of the programs that they use, which is the whole PATH."""
    for name, text in (("docker", DOCKER), ("apptainer", APPTAINER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("dirname", "grep", "mkdir"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "wheelhouse").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "IMAGES_DIR", tmp_path / "sifs")
    monkeypatch.setattr(build, "make_wheelhouse", lambda *_: False)
    monkeypatch.setattr(build, "wheelhouse_digest", lambda _: 64 * "0")
    monkeypatch.setattr(build, "wheelhouse_dir", lambda _: tmp_path / "wheelhouse")
    return tmp_path


def make(machine: Path, *has: str, target: str = "cpu", engine: str = "docker", **environment: str) -> tuple[str, str]:
    """(output, commands of the fakes). has: images that docker has."""
    (machine / "images").write_text("\n".join(has))
    (machine / "asked").write_text("")
    result = CliRunner().invoke(build.main, ["--engine", engine, "--target", target], env=environment)
    assert result.exit_code == ("Error: " in result.output), result.output
    return result.output, (machine / "asked").read_text()


def test_existing_image_is_not_built_again(machine: Path) -> None:
    output, asked = make(machine, CPU)
    assert f"{CPU} is built already" in output
    assert not re.search("^(pull|build)", asked, re.MULTILINE)


def test_only_cuda_has_a_network_while_it_is_built(machine: Path) -> None:
    _, asked = make(machine, PULLS="1", BUILDX="1")
    assert f"pull --quiet {PYTHON}" in asked
    assert "\nbuildx build --load " in asked
    assert f"--tag {CPU} --network none" in asked
    assert f"PYTHON_IMAGE={PYTHON}" in asked
    _, asked = make(machine, PYTHON, target="cuda")
    assert f"--tag {CUDA}" in asked
    assert "--network" not in asked
    assert "FLASH_ATTN" not in asked


def test_flash_attn_is_compiled_by_choice_with_the_compiler_of_torchs_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = (ROOT / "docker/images.yaml").read_text()
    (cuda,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)", (ROOT / "docker/cuda.lock").read_text(), re.MULTILINE)
    assert f"nvidia/cuda:{cuda}." in pins
    (tmp_path / "images.yaml").write_text(pins.replace("flash_attn: false", "flash_attn: true"))
    monkeypatch.setenv(PINS_VARIABLE, str(tmp_path / "images.yaml"))
    monkeypatch.setattr(build, "wheelhouse_digest", lambda _: 64 * "0")
    base = read_base(ROOT)
    for target, compiled in (("cuda", True), ("vllm", True), ("cpu", False)):
        options = build.build_options(target, base, "bakeoff:x")
        assert ("FLASH_ATTN=true" in options) == (f"CUDA_DEVEL_IMAGE={base.cuda_devel}" in options) == compiled


@pytest.mark.parametrize(
    ("has", "environment", "message"),
    [
        ([], {}, "cannot be pulled, for the reason above; build bakeoff:cpu-"),
        ([PYTHON], {"STOPPED": "1"}, "does not respond: Cannot connect"),
        ([PYTHON], {"ARCH": "riscv64"}, "containers run on riscv64 here"),
    ],
)
def test_unusable_docker_is_refused(machine: Path, has: list[str], environment: dict[str, Any], message: str) -> None:
    output, asked = make(machine, *has, **environment)
    assert message in output
    assert "--build-arg" not in asked


def test_missing_engine_is_named(machine: Path) -> None:
    for name in ("docker", "apptainer"):
        (machine / name).unlink()
    result = CliRunner().invoke(build.main, ["--target", "cpu"])
    assert f"no {' or '.join(CONTAINER_ENGINES)} is on the PATH" in result.output


def test_sif_is_made_from_dockers_image_and_only_once(machine: Path) -> None:
    output, asked = make(machine, CUDA, target="cuda", engine="apptainer")
    made = sif_path(machine / "sifs", CUDA)
    assert digest_path(made).read_text() == f"{hashlib.sha256(made.read_bytes()).hexdigest()}  {made.name}\n"
    assert "docker-archive:image.tar" in asked
    assert {path.name for path in (machine / "sifs").iterdir()} == {made.name, digest_path(made).name}, output
    output, asked = make(machine, CUDA, target="cuda", engine="apptainer")
    assert f"{made} is built already" in output
    assert asked == ""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"STOPPED": "1"}, "neither works here. On a machine with one of them: make image ENGINE=apptainer TARGET=cpu"),
        ({"BROKEN": "1"}, ".sif was not built, for the reason above"),
    ],
)
def test_failure_of_a_sif_is_reported(machine: Path, environment: dict[str, str], message: str) -> None:
    output, _ = make(machine, CPU, engine="apptainer", **environment)
    assert message in output
    assert list((machine / "sifs").glob("*")) == []
