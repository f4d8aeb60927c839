"""The wheelhouse: every package of an image, as files, checked against the locks.

An image is built from it alone, without network. It is made for the image's Python and platform, whatever this
machine has, in `.bakeoff/wheelhouse/<target>`, and is complete or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from stages.core.errors import UserError

SOURCE_ONLY = ("antlr4-python3-runtime", "flash-attn")
"""Packages that are published without a wheel; the image build makes theirs."""

CONTENTS = "contents.json"
"""The file that a complete wheelhouse has: what it was made for, and each file's digest."""

TORCH_LOCK = "torch.lock"
"""The lock of torch's CPU build, written when it is fetched: the project's locks cannot have it."""

# pip asks a source for its metadata before it saves it, which would run its setup.py here, on packages that it
# wants to import. This build backend, found before setuptools, answers from PKG-INFO, which every source has.
_BUILD_BACKEND = """
import email, pathlib

class Backend:
    def get_requires_for_build_wheel(self, config_settings=None):
        return []

    def prepare_metadata_for_build_wheel(self, metadata_directory, config_settings=None):
        text = pathlib.Path("PKG-INFO").read_text(encoding="utf-8")
        package = email.message_from_string(text)
        folder = pathlib.Path(metadata_directory, f"{package['Name'].replace('-', '_')}-{package['Version']}.dist-info")
        folder.mkdir()
        (folder / "METADATA").write_text(text, encoding="utf-8")
        return folder.name

__legacy__ = Backend()
"""


@dataclass(frozen=True, kw_only=True)
class WheelPlatform:
    """What wheels are chosen for."""

    python: str
    """Full version, e.g. "3.12.14"."""
    glibc: str
    """The newest that a wheel may ask for, e.g. "2.41"."""
    machine: str
    """As Linux names it: x86_64 or aarch64."""

    @property
    def python_minor(self) -> str:
        """E.g. "3.12"."""
        return ".".join(self.python.split(".")[:2])

    def marker_environment(self) -> dict[str, str | AbstractSet[str]]:
        """What the locks' environment markers are evaluated in."""
        return {
            "implementation_name": "cpython",
            "implementation_version": self.python,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.python,
            "python_version": self.python_minor,
            "sys_platform": "linux",
        }

    def pip_options(self) -> list[str]:
        """Make pip choose wheels for this platform, the newest glibc first (PEP 600)."""
        major, minor = (int(part) for part in self.glibc.split("."))
        oldest = 5 if self.machine == "x86_64" else 17
        aliases = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
        platforms = []
        for version in range(minor, oldest - 1, -1):
            platforms += [f"manylinux_{major}_{version}", *([aliases[version]] if version in aliases else [])]
        options = [f"--platform={name}_{self.machine}" for name in (*platforms, "linux")]
        abi = "cp" + self.python_minor.replace(".", "")
        return [*options, f"--python-version={self.python_minor}", "--implementation=cp", f"--abi={abi}"]


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One package of a lock."""

    name: str
    """Normalized, e.g. "ruamel-yaml"."""
    version: str
    hashes: frozenset[str]
    """SHA-256 of each of its files, hex; empty where any is right: torch's CPU build."""


def read_lock(lock_path: Path, platform: WheelPlatform) -> list[Pin]:
    """The packages that a lock names for a platform."""
    environment = platform.marker_environment()
    pins = []
    for entry in re.split(r"^(?=[A-Za-z0-9])", lock_path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        requirement = Requirement(entry.partition("\\\n")[0])
        if requirement.marker is None or requirement.marker.evaluate(environment):
            hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
            assert hashes, f"{lock_path}: {requirement} has no hash"
            pins.append(
                Pin(name=requirement.name, version=str(requirement.specifier).removeprefix("=="), hashes=hashes)
            )
    return pins


def make_wheelhouse(folder: Path, locks: Sequence[Path], cpu_torch: str | None, platform: WheelPlatform) -> bool:
    """Make `folder` hold exactly what the locks name for the platform. Returns False where it already did.

    cpu_torch: the version of torch's CPU build to add, e.g. "2.13.0+cpu".
    Raises UserError where a package cannot be fetched or is not the one that was locked; then there is none.
    """
    pins = [pin for lock in locks for pin in read_lock(lock, platform)]
    if cpu_torch:
        pins.append(Pin(name="torch", version=cpu_torch, hashes=frozenset()))
    purpose = _purpose(pins, platform)
    if _is_complete(folder, purpose):
        return False
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _download(pins, platform, partial, known=folder)
    _check(partial, pins)
    if cpu_torch:
        (wheel,) = partial.glob(f"torch-{cpu_torch}-*.whl")
        (partial / TORCH_LOCK).write_text(f"torch=={cpu_torch} --hash=sha256:{_sha256(wheel)}\n", encoding="utf-8")
    contents = {"for": purpose, "files": {path.name: _sha256(path) for path in sorted(partial.iterdir())}}
    (partial / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return True


def wheelhouse_digest(folder: Path) -> str:
    """SHA-256, hex, of a complete wheelhouse: of the names and digests of its files."""
    return _sha256(folder / CONTENTS)


def _purpose(pins: Iterable[Pin], platform: WheelPlatform) -> str:
    """A digest of what a wheelhouse is asked to hold."""
    packages = sorted((pin.name, pin.version, sorted(pin.hashes)) for pin in pins)
    return hashlib.sha256(json.dumps([packages, platform.pip_options()]).encode()).hexdigest()


def _is_complete(folder: Path, purpose: str) -> bool:
    """Whether it was made for that and no file came or went; their bytes are checked when they are installed."""
    if not (folder / CONTENTS).is_file():
        return False
    contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
    names = {path.name for path in folder.iterdir()}
    return contents["for"] == purpose and names == {CONTENTS, *contents["files"]}


def _download(pins: Iterable[Pin], platform: WheelPlatform, folder: Path, *, known: Path) -> None:
    """Fetch one file a pin into `folder`. What `known`, an older wheelhouse, has is not fetched again."""
    options = [*platform.pip_options(), "--dest", str(folder)]
    if known.is_dir():
        options += ["--find-links", str(known)]
    locked = [pin for pin in pins if pin.hashes]
    if not _pip_download([_requirement(pin) for pin in locked], [*options, "--require-hashes"]):
        raise UserError("the packages could not be fetched, for the reason above; nothing was kept")
    for pin in pins:
        if not pin.hashes:
            _download_cpu_torch(pin.version, platform, options)


def _download_cpu_torch(version: str, platform: WheelPlatform, options: Sequence[str]) -> None:
    """Ask the indexes and folders that pip is configured with, then PyTorch's own index, whose address uv knows."""
    if _pip_download([f"torch=={version}"], options, quiet=True):
        return
    index = _own_index_of_torch(version, platform)
    if index is None or not _pip_download([f"torch=={version}"], [*options, "--index-url", index]):
        raise UserError(
            f"torch's CPU build, torch=={version}, was not found for Python {platform.python_minor} on "
            f"{platform.machine}. Let pip find it (PIP_FIND_LINKS=FOLDER with its wheel, or PIP_EXTRA_INDEX_URL) "
            f"and do the same again"
        )


def _own_index_of_torch(version: str, platform: WheelPlatform) -> str | None:
    """The address that uv would fetch torch's CPU build from, None where it cannot reach it."""
    resolved = subprocess.run(
        [
            *(Path(sys.executable).with_name("uv"), "pip", "compile", "-", "--quiet", "--no-deps"),
            *("--torch-backend", "cpu", "--emit-index-annotation"),
            *("--python-version", platform.python_minor, "--python-platform", f"{platform.machine}-unknown-linux-gnu"),
        ],
        input=f"torch=={version.removesuffix('+cpu')}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"# from (\S+)", resolved.stdout)
    return found.group(1) if resolved.returncode == 0 and found else None


def _pip_download(requirements: Sequence[str], options: Sequence[str], *, quiet: bool = False) -> bool:
    """Whether pip could fetch all of them; it says why not, unless quiet."""
    with tempfile.TemporaryDirectory() as work_dir:
        backend = Path(work_dir, "setuptools")
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BUILD_BACKEND, encoding="utf-8")
        requirements_path = Path(work_dir, "requirements.txt")
        requirements_path.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        command += ["--only-binary=:all:", f"--no-binary={','.join(SOURCE_ONLY)}", *options]
        # pip draws its progress on a terminal; elsewhere only what goes wrong is of use.
        command += [] if sys.stderr.isatty() and not quiet else ["-qq"]
        return (
            subprocess.run(
                [*command, "-r", str(requirements_path)],
                env=os.environ | {"PYTHONPATH": work_dir},
                stderr=subprocess.DEVNULL if quiet else None,
                check=False,
            ).returncode
            == 0
        )


def _requirement(pin: Pin) -> str:
    return " ".join((f"{pin.name}=={pin.version}", *(f"--hash=sha256:{digest}" for digest in sorted(pin.hashes))))


def _check(folder: Path, pins: Iterable[Pin]) -> None:
    """Raises UserError unless there is one file for each pin, the locked one, and no other."""
    wanted = {(pin.name, Version(pin.version)): pin for pin in pins}
    for path in sorted(folder.iterdir()):
        pin = wanted.pop(_package_of(path), None)
        if pin is None or (pin.hashes and _sha256(path) not in pin.hashes):
            raise UserError(f"{path.name} was fetched, which is not a file that the locks name; nothing was kept")
    if wanted:
        missing = ", ".join(f"{name} {version}" for name, version in wanted)
        raise UserError(f"not fetched: {missing}; nothing was kept")


def _package_of(path: Path) -> tuple[str, Version]:
    """The normalized name and the version of a wheel or a source."""
    parse = parse_wheel_filename if path.suffix == ".whl" else parse_sdist_filename
    return parse(path.name)[:2]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
