"""The variables that reach a stage, the instructions that it computes by, and work in threads."""

import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.environment import (
    AVX2,
    OFFLINE,
    SET,
    arithmetic,
    container_environment,
    instruction_set,
    pinned_instructions,
    stage_environment,
)
from stages.launcher.process import STAGES
from tests import ROOT

SECRETS = {
    "HF_TOKEN": "hf_secret",
    "WANDB_API_KEY": "wandb-secret",
    "DVC_STUDIO_TOKEN": "studio-secret",
    "AWS_SECRET_ACCESS_KEY": "aws-secret",
    "GITHUB_TOKEN": "git-secret",
    "NVIDIA_API_KEY": "nvapi-secret",
    "HTTPS_PROXY": "http://user:proxy-secret@proxy",
    "SSH_AUTH_SOCK": "/run/agent",
}

Environment = Callable[..., dict[str, str]]


def on_machine(
    stage: str, caller: Mapping[str, str], *, network: bool = False, terminal: bool = True, native: bool = False
) -> dict[str, str]:
    return stage_environment(stage, caller, network=network, terminal=terminal, native=native)


def in_container(
    stage: str, caller: Mapping[str, str], *, network: bool = False, native: bool = False, num_nodes: int = 1
) -> dict[str, str]:
    passed, given = container_environment(
        stage, caller, network=network, terminal=True, native=native, num_nodes=num_nodes
    )
    return {name: caller[name] for name in passed} | given


@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_secret_reaches_only_the_stages_that_need_it(stage: str, network: bool) -> None:
    expected = {"HF_TOKEN", "HTTPS_PROXY"} if network else set()
    contained = in_container(stage, SECRETS, network=network)
    assert {name for name, value in contained.items() if value in SECRETS.values()} == expected
    if stage == "train":
        expected = expected | {"WANDB_API_KEY"}
    assert SECRETS.keys() & on_machine(stage, SECRETS, network=network).keys() == expected


@given(st.dictionaries(st.text(), st.text()), st.sampled_from(STAGES))
def test_unlisted_names_stay_outside(caller: dict[str, str], stage: str) -> None:
    unlisted = {f"X_{name}": value for name, value in caller.items()}
    assert on_machine(stage, unlisted).keys() <= SET.keys() | AVX2.keys() | OFFLINE.keys()


@pytest.mark.parametrize("environment", [on_machine, in_container])
def test_a_stage_without_a_network_is_offline_and_repeatable(environment: Environment) -> None:
    for network in (True, False):
        found = environment("base", {"HF_HUB_OFFLINE": "0", "PYTHONHASHSEED": "7"}, network=network)
        assert all(found.get(name) == "1" for name in OFFLINE) != network
        assert (found["PYTHONHASHSEED"], found["NCCL_CUMEM_HOST_ENABLE"]) == ("0", "0")
        assert (found["DO_NOT_TRACK"], found["MLFLOW_DISABLE_TELEMETRY"]) == ("1", "true")  # each takes only its own


def test_the_machine_reaches_a_process_and_not_a_container() -> None:
    machine = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "HF_HOME": "/hf", "CC": "/opt/gcc/bin/gcc"}
    both = {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "DVC_EXP_NAME": "loud-fox"}
    caller = {**machine, **both, "HOME": "/home/me", "TRITON_CACHE_DIR": "/shared/by/all"}
    process, container = on_machine("train", caller), in_container("train", caller)
    assert (machine | both).items() <= process.items()
    assert both.items() <= container.items()
    assert (process["HOME"], container["HOME"]) == ("/home/me", "/tmp")
    assert not machine.keys() & container.keys()
    assert "TRITON_CACHE_DIR" not in process.keys() | container.keys()


def test_other_libraries_of_cuda_do_not_take_the_place_of_the_locked_ones(tmp_path: Path) -> None:
    for name in ("cuda/libcudnn_ops.so.9", "blas/libcublasLt.so.13", "nccl/libnccl.so", "driver/libcuda.so.1", "gcc/x"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    folders = [str(tmp_path / name) for name in ("cuda", "driver", "blas", "gcc", "nccl", "nowhere")]
    left = on_machine("train", {"LD_LIBRARY_PATH": ":".join(folders)})["LD_LIBRARY_PATH"]
    assert left.split(":") == [folders[1], folders[3], folders[5]]


def test_a_caller_may_stay_offline_and_a_container_has_its_own_proxies_and_interface() -> None:
    assert on_machine("base", {"HF_HUB_OFFLINE": "1"}, network=True)["HF_HUB_OFFLINE"] == "1"
    assert in_container("train", {})["HTTPS_PROXY"] == "", "docker would add the proxies of its own configuration"
    assert "HTTPS_PROXY" not in in_container("base", {}, network=True)
    caller = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert in_container("train", caller)["GLOO_SOCKET_IFNAME"] == "lo"
    assert in_container("train", caller, num_nodes=2)["GLOO_SOCKET_IFNAME"] == "ib0"
    assert "TQDM_DISABLE" not in on_machine("train", {})
    assert on_machine("train", {}, terminal=False)["TQDM_DISABLE"] == "1"


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("stages.core.environment.CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(
        "vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t\t: fma avx avx2\n" * 2
    )
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize("environment", [on_machine, in_container])
def test_a_stage_computes_by_avx2_if_the_cpu_has_it_and_is_not_native(environment: Environment, cpuinfo: Path) -> None:
    assert environment("train", {"ATEN_CPU_CAPABILITY": "avx512"}).items() >= AVX2.items()
    native = environment("train", {}, native=True)
    assert {name: native[name] for name in AVX2.keys() & native.keys()} == {"MKL_CBWR": "AUTO"}
    assert (instruction_set(native), arithmetic(native)) == (platform.machine(), "AMD EPYC")
    cpuinfo.write_text("flags\t\t: fma avx\n")
    assert not environment("train", {}).keys() & AVX2.keys()


def test_arithmetic_differs_by_instructions_maker_and_mkls_setting(cpuinfo: Path) -> None:
    pinned = pinned_instructions({})
    assert (pinned, instruction_set(pinned), arithmetic(pinned)) == (AVX2, "avx2", "AuthenticAMD avx2")
    for name in AVX2:
        assert arithmetic({**pinned, name: "AUTO"}) != arithmetic(pinned), name
    assert arithmetic({}) == "AMD EPYC"
    compatible = pinned_instructions({"MKL_CBWR": "COMPATIBLE"})
    assert arithmetic(compatible) == "AuthenticAMD avx2, MKL_CBWR=COMPATIBLE"
    cpuinfo.write_text("vendor_id\t: GenuineIntel\nflags\t\t: fma avx2\n")
    assert arithmetic(compatible) == "GenuineIntel avx2, MKL_CBWR=COMPATIBLE", "MKL's square roots differ"


TRAINING = """
import torch
from torch import nn
found = []
for threads in (1, 3):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 700), nn.GELU(), nn.RMSNorm(700), nn.Linear(700, 50), nn.LogSoftmax(-1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.randn(900, 300)).square().mean().backward()
        optimizer.step()
    found.append(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
print(found[0] == found[1], torch.backends.cpu.get_cpu_capability())
"""


def test_torch_computes_by_the_pinned_instructions_and_threads_change_no_bit() -> None:
    pinned = pinned_instructions({})
    if not pinned:
        pytest.skip("this CPU has no AVX2")
    variables = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", **pinned}
    command = [sys.executable, "-c", TRAINING]
    assert subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout == "True AVX2\n"
