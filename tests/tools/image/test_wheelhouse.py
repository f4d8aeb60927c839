"""The wheelhouse, with a pip that makes up the files that it is to fetch."""

import hashlib
import re
import sys
from pathlib import Path

import pytest

from stages.core.errors import UserError
from tests import ROOT
from tools.image.wheelhouse import WheelPlatform, make_wheelhouse, read_lock

PYTHON_312 = WheelPlatform(python="3.12.14", glibc="2.41", machine="x86_64")
PYTHON_311_ARM = WheelPlatform(python="3.11.2", glibc="2.36", machine="aarch64")

# Responds like python and uv. A file's bytes are its requirement. It lacks LACKS.
FAKE = r"""#!{python}
import os, pathlib, sys
with open(os.environ["ASKED"], "a") as asked:
    print(*sys.argv[1:], file=asked)
if sys.argv[1:3] == ["pip", "compile"]:
    sys.exit(print("torch==2.13.0+cpu\n    # from some://index") if "UV_FINDS" in os.environ else 1)
options = sys.argv[1:]
folder = pathlib.Path(options[options.index("--dest") + 1])
requirements = pathlib.Path(options[-1]).read_text()
if os.environ.get("LACKS", "nothing") in requirements and "--index-url" not in options:
    sys.exit(1)
for line in requirements.splitlines():
    name, version = line.split()[0].split("==")
    end = ".tar.gz" if name.startswith("antlr4") else "-py3-none-any.whl"
    (folder / f"{{name.replace('-', '_')}}-{{version}}{{end}}").write_text(f"{{name}}=={{version}}")
"""
TORCH = "2.13.0+cpu"
FILES = {
    *("antlr4_python3_runtime-4.9.3.tar.gz", "numpy-2.4.6-py3-none-any.whl"),
    *(f"torch-{TORCH}-py3-none-any.whl", "torch.lock", "contents.json"),
}


def entry(requirement: str) -> str:
    pin = requirement.split(" ;")[0]
    return f"{requirement} \\\n    --hash=sha256:{hashlib.sha256(pin.encode()).hexdigest()}\n    # via something\n"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.lock"
    names = ["antlr4-python3-runtime==4.9.3", "numpy==2.4.6", "pywin32==312 ; sys_platform == 'win32'"]
    path.write_text("# made by uv\n" + "".join(entry(name) for name in names))
    return path


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The arguments of pip and uv, one call a line."""
    for name in ("python", "uv"):
        (tmp_path / name).write_text(FAKE.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    (tmp_path / "asked").touch()
    return tmp_path / "asked"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_holds_the_locked_packages_each_fetched_by_hash(tmp_path: Path, lock: Path, asked: Path) -> None:
    assert make_wheelhouse(tmp_path / "cpu", [lock], TORCH, PYTHON_312)
    assert names(tmp_path / "cpu") == FILES
    assert list(tmp_path.glob("*.partial")) == []
    locked, torch = asked.read_text().splitlines()
    assert {"--require-hashes", "--no-deps"} <= set(locked.split())
    assert "--require-hashes" not in torch
    digest = hashlib.sha256(f"torch=={TORCH}".encode()).hexdigest()
    assert (tmp_path / "cpu/torch.lock").read_text() == f"torch=={TORCH} --hash=sha256:{digest}\n"


def test_a_second_call_fetches_nothing_unless_something_changed(tmp_path: Path, lock: Path, asked: Path) -> None:
    def make(platform: WheelPlatform = PYTHON_312) -> bool:
        return make_wheelhouse(tmp_path / "cpu", [lock], TORCH, platform)

    assert make()
    asked.write_text("")
    assert not make()
    assert asked.read_text() == ""
    (tmp_path / "cpu/numpy-2.4.6-py3-none-any.whl").unlink()
    assert make()
    (tmp_path / "cpu/stale-1.0-py3-none-any.whl").touch()
    assert make()
    assert names(tmp_path / "cpu") == FILES
    lock.write_text(lock.read_text().replace(entry("numpy==2.4.6"), entry("numpy==2.4.7")))
    assert make()
    assert names(tmp_path / "cpu") == FILES - {"numpy-2.4.6-py3-none-any.whl"} | {"numpy-2.4.7-py3-none-any.whl"}
    assert make(PYTHON_311_ARM)


@pytest.mark.parametrize(
    ("lacks", "message"),
    [("numpy", "could not be fetched"), ("torch", r"torch==2.13.0\+cpu, was not found for Python 3.12 on x86_64")],
)
def test_it_is_complete_or_not_there(
    tmp_path: Path, lock: Path, asked: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, message: str
) -> None:
    monkeypatch.setenv("LACKS", lacks)
    with pytest.raises(UserError, match=message):
        make_wheelhouse(tmp_path / "cpu", [lock], TORCH, PYTHON_312)
    assert names(tmp_path) == {"asked", "cpu.lock", "python", "uv"}


def test_torchs_cpu_build_comes_from_the_index_that_uv_knows(
    tmp_path: Path, lock: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACKS", "torch")
    monkeypatch.setenv("UV_FINDS", "1")
    make_wheelhouse(tmp_path / "cpu", [lock], TORCH, PYTHON_312)
    _, from_pip, from_uv, from_index = asked.read_text().splitlines()
    assert "--index-url" not in from_pip
    assert "--torch-backend cpu" in from_uv
    assert "--python-version 3.12" in from_uv
    assert "--index-url some://index" in from_index


@pytest.mark.parametrize(
    ("marker", "platform", "named"),
    [
        ("python_full_version >= '3.12'", PYTHON_312, True),
        ("python_full_version >= '3.12'", PYTHON_311_ARM, False),
        ("platform_machine == 'aarch64' and implementation_name == 'cpython'", PYTHON_311_ARM, True),
    ],
)
def test_markers_are_those_of_the_image_and_not_of_this_machine(
    tmp_path: Path, marker: str, platform: WheelPlatform, *, named: bool
) -> None:
    (tmp_path / "lock").write_text(entry(f"package==1.0 ; {marker}"))
    assert list(read_lock(tmp_path / "lock", platform)) == (["package==1.0"] if named else [])


def test_every_package_of_the_projects_lock_is_read() -> None:
    text = (ROOT / "docker/cuda.lock").read_text()
    everything = set(re.findall(r"^([a-z0-9][a-z0-9.-]*)==", text, re.MULTILINE))
    pins = read_lock(ROOT / "docker/cuda.lock", PYTHON_312)
    assert everything - {pin.partition("==")[0] for pin in pins} <= {"httpx2-jsfetch", "pywin32", "tzdata"}
    assert sum(line.count("--hash=") for line in pins.values()) > 1000


def test_wheels_are_chosen_up_to_the_images_c_library() -> None:
    options = PYTHON_311_ARM.pip_options()
    assert options[0] == "--platform=manylinux_2_36_aarch64"
    assert {"--platform=manylinux2014_aarch64", "--python-version=3.11", "--abi=cp311"} <= set(options)
    assert not [option for option in options if re.search(r"2_37|manylinux1_|x86", option)]
    assert {"--platform=manylinux1_x86_64", "--platform=manylinux_2_5_x86_64"} <= set(PYTHON_312.pip_options())
