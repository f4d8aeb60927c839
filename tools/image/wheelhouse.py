"""The wheelhouse: every package of an image, as files, with the hashes that the locks name.

An image is built from it alone, without network. It is made for the image's Python and platform, whatever this machine
has, in `.bakeoff/wheelhouse/<target>`, and is complete or not there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from stages.core.atomic import atomic_folder
from stages.core.errors import UserError
from stages.core.lineage import file_digest, json_digest

SOURCE_ONLY = "antlr4-python3-runtime"
"""A package that is published without a wheel; the image build makes it."""
CONTENTS = "contents.json"
"""The file that marks a complete wheelhouse: its requirements, and each file's digest."""


@dataclass(frozen=True, kw_only=True)
class WheelPlatform:
    """The Python and the machine that wheels are chosen for."""

    python: str
    """Full version, e.g. "3.12.14"."""
    glibc: str
    """The newest that a wheel may ask for, e.g. "2.41"."""
    machine: str
    """Linux's name: x86_64 or aarch64."""

    @property
    def python_minor(self) -> str:
        """E.g. "3.12"."""
        return self.python.rpartition(".")[0]

    def marker_environment(self) -> dict[str, str]:
        """Values of environment markers; the others that a lock has are those of this interpreter."""
        python = {"python_full_version": self.python, "python_version": self.python_minor}
        return python | {"platform_machine": self.machine, "platform_system": "Linux", "sys_platform": "linux"}

    def pip_options(self) -> list[str]:
        """Make pip choose wheels for this platform, the newest glibc first (PEP 600)."""
        major, newest = (int(part) for part in self.glibc.split("."))
        oldest = 5 if self.machine == "x86_64" else 17
        aliases = {17: ["manylinux2014"], 12: ["manylinux2010"], 5: ["manylinux1"]}
        versions = range(newest, oldest - 1, -1)
        names = [name for minor in versions for name in (f"manylinux_{major}_{minor}", *aliases.get(minor, []))]
        platforms = [f"--platform={name}_{self.machine}" for name in (*names, "linux")]
        abi = "cp" + self.python_minor.replace(".", "")
        return [*platforms, f"--python-version={self.python_minor}", "--implementation=cp", f"--abi={abi}"]


def read_lock(lock_path: Path, platform: WheelPlatform) -> dict[str, str]:
    """The packages that a lock names for a platform: a line for pip, with hashes, by `name==version`."""
    environment, hashed = platform.marker_environment(), {}
    for entry in re.split(r"^(?=[A-Za-z0-9])", lock_path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        requirement = Requirement(entry.partition("\\\n")[0])
        if requirement.marker is None or requirement.marker.evaluate(environment):
            hashes = sorted(re.findall(r"--hash=sha256:[0-9a-f]{64}", entry))
            assert hashes, f"{lock_path}: {requirement} has no hash"
            pin = f"{requirement.name}{requirement.specifier}"
            hashed[pin] = " ".join((pin, *hashes))
    return hashed


def make_wheelhouse(folder: Path, locks: Sequence[Path], cpu_torch: str | None, platform: WheelPlatform) -> bool:
    """Make `folder` hold exactly the locked packages for the platform. Returns False if it already did.

    cpu_torch: the version of torch's CPU build to add, e.g. "2.13.0+cpu".
    Raises UserError if a package cannot be fetched, or is not the locked one; then there is no wheelhouse.
    """
    requirements = list({pin: line for lock in locks for pin, line in read_lock(lock, platform).items()}.values())
    wanted = json_digest([requirements, cpu_torch, platform.pip_options()])
    if (folder / CONTENTS).is_file():
        contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        # Bytes are checked when they are installed.
        if contents["for"] == wanted and {path.name for path in folder.iterdir()} == {CONTENTS, *contents["files"]}:
            return False
    with atomic_folder(folder) as partial:
        # Files of an older wheelhouse are not fetched again.
        options = [*platform.pip_options(), "--dest", str(partial), *(["--find-links", str(folder)] * folder.is_dir())]
        if not _pip_download(requirements, [*options, "--require-hashes"]):
            raise UserError("the packages could not be fetched, for the reason above; nothing was kept")
        if cpu_torch:
            _download_cpu_torch(cpu_torch, platform, options)
            (wheel,) = partial.glob(f"torch-{cpu_torch}-*.whl")
            torch = f"torch=={cpu_torch} --hash=sha256:{file_digest(wheel)}\n"  # not in the project's locks
            (partial / "torch.lock").write_text(torch, encoding="utf-8")
        contents = {"for": wanted, "files": {path.name: file_digest(path) for path in sorted(partial.iterdir())}}
        (partial / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return True


def wheelhouse_digest(folder: Path) -> str:
    """SHA-256 (hex) over the names and digests of the files of a complete wheelhouse."""
    return file_digest(folder / CONTENTS)


def _download_cpu_torch(version: str, platform: WheelPlatform, options: Sequence[str]) -> None:
    """Fetch it from the indexes and folders of pip's configuration, else from PyTorch's own: uv knows its address."""
    if _pip_download([f"torch=={version}"], options, quiet=True):
        return
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
    index = re.search(r"# from (\S+)", resolved.stdout)
    if index is None or not _pip_download([f"torch=={version}"], [*options, "--index-url", index[1]]):
        raise UserError(
            f"torch's CPU build, torch=={version}, was not found for Python {platform.python_minor} on "
            f"{platform.machine}. Let pip find it (PIP_FIND_LINKS=FOLDER with its wheel, or PIP_EXTRA_INDEX_URL) "
            f"and do the same again"
        )


def _pip_download(requirements: Sequence[str], options: Sequence[str], *, quiet: bool = False) -> bool:
    """Whether pip could fetch all of them; it prints the reason otherwise, unless quiet."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        command += ["--only-binary=:all:", f"--no-binary={SOURCE_ONLY}", *options]
        # pip draws its progress on a terminal; elsewhere only errors are of use.
        command += ["-r", file.name] if sys.stderr.isatty() and not quiet else ["-qq", "-r", file.name]
        return subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None, check=False).returncode == 0
