"""The contents of the image."""

import json
import platform
import re
import subprocess
import tarfile

import pytest
from packaging.utils import canonicalize_name

from stages.launcher.apptainer import SEAL, ApptainerEngine
from stages.launcher.docker import ContainerEngine
from stages.launcher.images import cpu_torch
from tests import ROOT
from tests.smoke.conftest import ENGINE, client
from tools.image.wheelhouse import WheelPlatform, read_lock

pytestmark = pytest.mark.engine

# Secrets of services that a machine for this work may know (the hub, AWS, GitHub, W&B), private keys, addresses with
# a password.
SECRET = re.compile(
    rb"hf_[A-Za-z0-9]{34}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36}|WANDB_API_KEY\s*=|"
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|https?://[^\s/:@'\"{}<>$%]+:[^\s/:@'\"{}<>$%]+@"
)

FILES_WITH_SECRETS = re.compile(r"(^|/)(\.netrc|\.git-credentials|\.pypirc|pip\.conf|uv\.toml|id_[a-z0-9]+|\.env)$")


of_docker = pytest.mark.skipif(ENGINE == "apptainer", reason="of docker's and podman's images, which it is made from")


@pytest.fixture(scope="module")
def image() -> str:
    if ENGINE == "apptainer":
        return str(ApptainerEngine.find(ENGINE, ROOT, "cpu").sif_path)
    return ContainerEngine.find(ENGINE, ROOT, "cpu").image[1]


def in_image(image: str, code: str) -> str:
    if ENGINE == "apptainer":
        return client("--silent", "exec", *SEAL, image, "python", "-c", code)
    return client("run", "--rm", "--network", "none", "--read-only", image, "python", "-c", code)


@of_docker
def test_no_layer_says_a_secret_or_an_address_it_was_built_from(image: str) -> None:
    history = client("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    config = client("image", "inspect", image)
    for text in (history, config):
        assert not SECRET.search(text.encode())
        assert "://" not in re.sub(r'"org\.opencontainers\.[^"]*": *"[^"]*"', "", text)
    environment = dict(pair.split("=", 1) for pair in json.loads(config)[0]["Config"]["Env"])
    assert not {name for name in environment if re.search("TOKEN|SECRET|PASSWORD|PROXY|INDEX", name, re.IGNORECASE)}


@of_docker
def test_no_file_is_a_secret(image: str) -> None:
    container = client("create", image)
    suspicious, count = [], 0
    try:
        with (
            subprocess.Popen([ENGINE, "export", container], stdout=subprocess.PIPE) as export,
            tarfile.open(fileobj=export.stdout, mode="r|") as files,
        ):
            for file in files:
                count += 1
                if FILES_WITH_SECRETS.search(file.name):
                    suspicious.append(file.name)
                # Python's packages and the base's programs are what their hashes say, and name keys in their texts.
                if file.isfile() and "/site-packages/" not in file.name and not file.name.startswith("usr/"):
                    content = files.extractfile(file)
                    assert content is not None
                    if SECRET.search(content.read()):
                        suspicious.append(file.name)
    finally:
        client("rm", container)
    assert count > 10_000
    assert suspicious == []


def test_it_has_exactly_the_locked_packages(image: str) -> None:
    listed = in_image(
        image,
        "from importlib.metadata import distributions; import platform; print(platform.python_version())\n"
        "for found in distributions(): print(found.name, found.version)",
    )
    python, *lines = listed.splitlines()
    installed = {canonicalize_name(name): version for name, version in (line.split() for line in lines)}
    here = WheelPlatform(python=python, glibc="2.36", machine=platform.machine())
    locks = (read_lock(ROOT / f"docker/{name}.lock", here) for name in ("cpu", "llamacpp"))
    locked = dict(pin.split("==") for lock in locks for pin in lock)
    assert installed == locked | {"torch": cpu_torch(ROOT)}


def test_it_has_no_compiler_no_installer_no_client_and_no_code_of_the_project(image: str) -> None:
    tools = ["gcc", "cc", "g++", "ld", "make", "pip", "uv", "git", "curl", "wget"]
    code = f"import importlib.util, shutil; print(*map(shutil.which, {tools}), importlib.util.find_spec('stages'))"
    assert set(in_image(image, code).split()) == {"None"}
