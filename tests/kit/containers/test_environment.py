import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.kit.containers.environment import SET, stage_environment
from stages.kit.containers.stage_run import STAGES

FETCHING = {"base", "prepare"}

SECRETS = {
    "HF_TOKEN": "hf_secret",
    "WANDB_API_KEY": "wandb-secret",
    "DVC_STUDIO_TOKEN": "studio-secret",
    "AWS_SECRET_ACCESS_KEY": "aws-secret",
    "GITHUB_TOKEN": "git-secret",
    "HTTPS_PROXY": "http://user:proxy-secret@proxy",
    "SSH_AUTH_SOCK": "/run/agent",
}


def secrets_that_reach(stage: str) -> set[str]:
    return SECRETS.keys() & stage_environment(stage, SECRETS, terminal=True).keys()


@pytest.mark.parametrize("stage", STAGES)
def test_a_secret_reaches_only_the_stages_it_is_for(stage: str) -> None:
    fetching = {"HF_TOKEN", "HTTPS_PROXY"}
    expected = {"train": {"WANDB_API_KEY"}, "base": fetching, "prepare": fetching}
    assert secrets_that_reach(stage) == expected.get(stage, set())


@pytest.mark.parametrize("stage", STAGES)
def test_only_the_fetching_stages_may_use_the_hub(stage: str) -> None:
    environment = stage_environment(stage, {"HF_HUB_OFFLINE": "0"}, terminal=True)
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    assert all(environment.get(name) == "1" for name in names) == (stage not in FETCHING)


def test_a_fetching_stage_can_be_kept_offline() -> None:
    assert stage_environment("base", {"HF_HUB_OFFLINE": "1"}, terminal=True)["HF_HUB_OFFLINE"] == "1"


def test_what_makes_runs_repeatable_cannot_be_overridden() -> None:
    environment = stage_environment("train", {"PYTHONHASHSEED": "7", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}, terminal=True)
    assert (environment["PYTHONHASHSEED"], environment["CUBLAS_WORKSPACE_CONFIG"]) == ("0", ":4096:8")


def test_machine_and_experiment_reach_the_stage() -> None:
    caller = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "1",
        "OMP_NUM_THREADS": "1",
        "DVC_EXP_NAME": "loud-fox",
    }
    assert caller.items() <= stage_environment("train", caller, terminal=True).items()


@given(st.dictionaries(st.text(), st.text()), st.sampled_from(STAGES))
def test_names_nobody_listed_stay_outside(caller: dict[str, str], stage: str) -> None:
    unlisted = {f"X_{name}": value for name, value in caller.items()}
    assert stage_environment(stage, unlisted, terminal=True).keys() <= SET.keys() | {
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    }


def test_progress_bars_are_for_terminals() -> None:
    assert "TQDM_DISABLE" not in stage_environment("train", {}, terminal=True)
    assert stage_environment("train", {}, terminal=False)["TQDM_DISABLE"] == "1"
