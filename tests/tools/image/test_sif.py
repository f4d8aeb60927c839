"""`make image ENGINE=apptainer`, with a fake apptainer and a fake docker. The real ones: tests/smoke."""

import hashlib
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from stages.kit.launcher.apptainer import digest_path, sif_path
from stages.kit.launcher.images import image_references, read_pins
from tests import ROOT
from tools.image import __main__ as build
from tools.image import sif
from tools.image.wheelhouse import WheelPlatform

# Notes what it is asked; builds a file, or a folder for a sandbox, whose packages `exec` installs.
APPTAINER = r"""#!/usr/bin/env bash
echo "$*" >>"$NOTES"
case "$*" in
  "build --sandbox"*) [ -n "${PULLS:-}" ] || { echo "no route to a registry" >&2; exit 1; }; mkdir "$3" ;;
  build*) [ -z "${BROKEN:-}" ] || exit 255; echo a SIF >"$4" ;;
  *"/docker/install cpu") mkdir -p root/image/bakeoff-image/bin ;;
  exec*) [ -z "${REFUSED:-}" ] || exit 1 ;;
esac
"""

# Answers only where ANSWERS is set; then it has every image.
DOCKER = r"""#!/usr/bin/env bash
echo "docker $*" >>"$NOTES"
[ -n "${ANSWERS:-}" ] || exit 1
case "$1" in
  version) echo amd64 ;;
  image) echo sha256:0123 ;;
  save) echo an archive >"$3" ;;
esac
"""

PINNED, STAND_IN = (reference.rpartition(":")[2] for reference in image_references(ROOT, "cpu"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both clients, alone on the PATH with the system's tools; images are made in `images` there."""
    for name, text in (("apptainer", APPTAINER), ("docker", DOCKER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("NOTES", str(tmp_path / "asked"))
    monkeypatch.setattr(build, "IMAGES_DIR", tmp_path / "images")
    monkeypatch.setattr(build, "make_wheelhouse", lambda *_: False)
    (tmp_path / "wheelhouse").mkdir()
    monkeypatch.setattr(build, "wheelhouse_dir", lambda _: tmp_path / "wheelhouse")
    return tmp_path


def make_image(target: str = "cpu", **environment: str) -> tuple[int, str]:
    """Exit code, and what was said."""
    result = CliRunner().invoke(build.main, ["image", "--engine", "apptainer", "--target", target], env=environment)
    return result.exit_code, result.output


def test_it_is_made_from_dockers_image_where_docker_works_and_only_once(machine: Path) -> None:
    code, said = make_image(target="cuda", ANSWERS="1")
    assert code == 0, said
    (made,) = (machine / "images").glob("*.sif")
    assert made == sif_path(machine / "images", image_references(ROOT, "cuda")[0])
    assert digest_path(made).read_text() == f"{hashlib.sha256(made.read_bytes()).hexdigest()}  {made.name}\n"
    asked = (machine / "asked").read_text()
    assert f"docker save --output {machine / 'images'}" in asked
    assert "docker-archive:image.tar" in asked
    assert {path.name for path in (machine / "images").iterdir()} == {made.name, digest_path(made).name}
    code, said = make_image(target="cuda", ANSWERS="1")
    assert f"{made} is built already" in said
    assert (machine / "asked").read_text() == asked


def test_without_docker_it_is_made_of_the_pinned_base_by_a_container_without_network(machine: Path) -> None:
    code, said = make_image(PULLS="1")
    assert code == 0, said
    assert (machine / f"images/{PINNED}.sif").is_file()
    (install,) = (line for line in (machine / "asked").read_text().splitlines() if "/docker/install" in line)
    assert "--network none" in install
    assert "--no-privs" in install


def test_without_a_registry_it_is_made_of_debians_packages_where_they_are(machine: Path) -> None:
    code, said = make_image()
    assert code == 1
    assert "cannot be pulled, for the reason above. Make a stand-in from Debian's packages: make base-image" in said
    (machine / "empty").mkdir()
    with tarfile.open(machine / "images/base.tar", "w") as tar:
        tar.add(machine / "empty", ".")
    code, said = make_image()
    assert code == 0, said
    assert (machine / f"images/{STAND_IN}.sif").is_file()


@pytest.mark.parametrize(
    ("target", "environment", "message"),
    [
        ("cuda", {}, "the image of cuda is built by docker or podman"),
        ("cpu", {"PULLS": "1", "BROKEN": "1"}, ".sif was not built, for the reason above"),
        ("cpu", {"PULLS": "1", "REFUSED": "1"}, "cannot run it on this machine"),
    ],
)
def test_what_will_not_do_is_named(machine: Path, target: str, environment: dict[str, str], message: str) -> None:
    code, said = make_image(target, **environment)
    assert code == 1
    assert message in said
    (machine / "apptainer").unlink()
    assert "no apptainer is on the PATH. Install one (Apptainer: apptainer.org" in make_image(target)[1]


def test_wheels_for_apptainer_are_those_of_the_pinned_base(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "make_wheelhouse", lambda *asked: chosen.append(asked[-1]))
    chosen: list[WheelPlatform] = []
    result = CliRunner().invoke(build.main, ["wheelhouse", "--engine", "apptainer", "--target", "cpu"])
    assert result.exit_code == 0, result.output
    python = read_pins(ROOT).bases.python
    assert [(platform.python, platform.glibc) for platform in chosen] == [(python.python, python.glibc)]
    assert not (machine / "asked").exists(), "there is no docker to ask"


def test_it_has_the_variables_of_the_dockerfile() -> None:
    variables = sif.image_variables((ROOT / "docker/Dockerfile").read_text())
    assert "PYTHONPYCACHEPREFIX=/bakeoff-image/pycache" in variables
    assert any(variable.startswith("PATH=/bakeoff-image/bin:") for variable in variables)
    assert not any("NVIDIA" in variable or "\\" in variable for variable in variables)
