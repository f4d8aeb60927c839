from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.environment import AVX2, SET, container_environment, job_environment, stage_environment
from stages.kit.launcher.process import STAGES

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


def on_machine(
    stage: str, caller: Mapping[str, str], *, network: bool = False, terminal: bool = True
) -> dict[str, str]:
    return stage_environment(stage, caller, network=network, terminal=terminal)


def in_container(stage: str, caller: Mapping[str, str], *, network: bool = False) -> dict[str, str]:
    passed, given = container_environment(stage, caller, network=network, terminal=True)
    return {name: caller[name] for name in passed} | given


@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_secret_reaches_only_what_it_is_for(stage: str, network: bool) -> None:
    expected = {"HF_TOKEN", "HTTPS_PROXY"} if network else set()
    reached = {
        name for name, value in in_container(stage, SECRETS, network=network).items() if value in SECRETS.values()
    }
    assert reached == expected
    if stage == "train":
        expected = expected | {"WANDB_API_KEY"}
    assert SECRETS.keys() & on_machine(stage, SECRETS, network=network).keys() == expected


def test_a_job_gets_what_its_stage_may_get_and_nothing_of_the_machine_that_it_was_submitted_from() -> None:
    caller = {
        **SECRETS,
        "PATH": "/bin",
        "DVC_STAGE": "train@r1",
        "BAKEOFF_ENGINE": "docker",
        "SBATCH_PARTITION": "gpu",
        "TMPDIR": "/tmp/me",
        "CUDA_VISIBLE_DEVICES": "3",
        "BAKEOFF_PLACE": "slurm",
        "SLURM_JOB_ID": "1",
        "SBATCH_WAIT": "1",
    }
    passed = {"PATH", "DVC_STAGE", "BAKEOFF_ENGINE", "SBATCH_PARTITION"}
    assert job_environment("plan", caller, network=False).keys() == passed
    assert job_environment("train", caller, network=False).keys() == passed | {"WANDB_API_KEY"}
    assert job_environment("base", caller, network=True).keys() == passed | {"HF_TOKEN", "HTTPS_PROXY"}


@pytest.mark.parametrize("environment", [on_machine, in_container])
def test_what_fetches_nothing_may_not_use_the_hub(environment: Callable[..., dict[str, str]]) -> None:
    for network in (True, False):
        names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
        found = environment("base", {"HF_HUB_OFFLINE": "0"}, network=network)
        assert all(found.get(name) == "1" for name in names) != network


def test_a_fetching_stage_can_be_kept_offline() -> None:
    assert on_machine("base", {"HF_HUB_OFFLINE": "1"}, network=True)["HF_HUB_OFFLINE"] == "1"


def test_a_container_has_a_home_of_its_own_and_nothing_of_the_machine() -> None:
    caller = {"PATH": "/bin", "HOME": "/home/me", "CUDA_VISIBLE_DEVICES": "1", "HF_HOME": "/hf", "OMP_NUM_THREADS": "1"}
    found = in_container("train", caller)
    assert found["HOME"] == "/tmp"
    assert not {"PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME"} & found.keys()
    assert found["OMP_NUM_THREADS"] == "1"


def test_a_process_compiles_with_the_callers_compiler_but_not_into_the_callers_cache() -> None:
    caller = {"CC": "/opt/gcc/bin/gcc", "TRITON_CACHE_DIR": "/shared/by/all"}
    assert {name: on_machine("train", caller).get(name) for name in caller} == {**caller, "TRITON_CACHE_DIR": None}
    assert not caller.keys() & in_container("train", caller).keys()


def test_the_proxies_that_docker_would_add_by_itself_are_empty_without_a_network() -> None:
    assert in_container("train", {})["HTTPS_PROXY"] == ""
    assert "HTTPS_PROXY" not in in_container("base", {}, network=True)


def test_what_makes_runs_repeatable_cannot_be_overridden() -> None:
    environment = on_machine("train", {"PYTHONHASHSEED": "7", "CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert (environment["PYTHONHASHSEED"], environment["CUBLAS_WORKSPACE_CONFIG"]) == ("0", ":4096:8")


@pytest.mark.parametrize("environment", [on_machine, in_container])
def test_a_stage_computes_by_avx2_whatever_its_caller_asks_of_newer_instructions(
    environment: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr("stages.core.environment.CPUINFO", cpuinfo)
    cpuinfo.write_text("flags\t\t: fma avx avx2 avx512f\n")
    assert environment("train", {"ATEN_CPU_CAPABILITY": "avx512"}).items() >= AVX2.items()
    cpuinfo.write_text("flags\t\t: fma avx\n")
    assert not environment("train", {}).keys() & AVX2.keys()


def test_machine_and_experiment_reach_the_stage() -> None:
    caller = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "1",
        "OMP_NUM_THREADS": "1",
        "DVC_EXP_NAME": "loud-fox",
    }
    assert caller.items() <= on_machine("train", caller).items()


@given(st.dictionaries(st.text(), st.text()), st.sampled_from(STAGES))
def test_names_nobody_listed_stay_outside(caller: dict[str, str], stage: str) -> None:
    unlisted = {f"X_{name}": value for name, value in caller.items()}
    assert on_machine(stage, unlisted).keys() <= SET.keys() | AVX2.keys() | {
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    }


def test_progress_bars_are_for_terminals() -> None:
    assert "TQDM_DISABLE" not in on_machine("train", {})
    assert on_machine("train", {}, terminal=False)["TQDM_DISABLE"] == "1"


def test_processes_meet_in_their_container_alone_unless_they_are_on_several_nodes() -> None:
    caller = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert in_container("train", caller)["GLOO_SOCKET_IFNAME"] == "lo"
    passed, given = container_environment("train", caller, network=False, terminal=True, num_nodes=2)
    assert "GLOO_SOCKET_IFNAME" in passed
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & given.keys()
