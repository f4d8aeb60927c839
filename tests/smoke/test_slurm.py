"""Stages as jobs of a real Slurm: `.ci/with-slurm .venv/bin/python -m pytest -m engine tests/smoke/test_slurm.py`.

The stage runs until it is told to end, so that each moment can be waited for.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.kit.launcher.gpus import Gpu
from tests.kit.launcher.small_checkout import run, set_gpus
from tests.smoke.conftest import wait_until
from tests.smoke.slurm_jobs import (
    ENVIRONMENT,
    NEEDS_SLURM,
    Command,
    jobs,
    let_end,
    make_workspace,
    notes,
    num_ended,
    occupied,
    set_params,
    trained,
)

pytestmark = NEEDS_SLURM


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test leaves no job, whatever it does. In place of the fixture that looks for containers."""
    yield
    for _ in range(300):  # the job of a stage that has just ended takes a moment to end too
        if not (left := jobs()):
            return
        time.sleep(0.1)
    for number in left:
        subprocess.run(["scancel", number], check=True)
    wait_until(lambda: jobs() == {})
    pytest.fail(f"left behind: {left}")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return make_workspace(tmp_path)


def test_a_job_shows_what_it_prints_and_its_outputs_are_kept_by_dvc(workspace: Path) -> None:
    command = Command(workspace)
    command.until("the stage speaks")
    ((number, state),) = jobs().items()
    assert state == "RUNNING"
    shown = subprocess.run(["scontrol", "show", "job", number], check=True, capture_output=True, text=True).stdout
    script = subprocess.run(["scontrol", "write", "batch_script", number, "-"], check=True, capture_output=True)
    assert "docker/run train r1-llm-only" in script.stdout.decode()
    assert "hf_smoke" not in shown + script.stdout.decode()
    let_end(workspace)
    assert command.ended() == 0, command.said
    assert notes(workspace) == ["begin None None", "end"]
    assert trained(workspace) == "of seed 42"
    assert '"engine": "process"' in (workspace / "data/provenance/train.json").read_text()
    assert {path.name for path in (workspace / "data/.outputs").rglob("*")} == {"train", "lock", "waiter"}
    assert "up to date" in run(workspace, "dvc", "status", "train")
    assert "up to date" in run(workspace, "dvc", "repro", "train", **ENVIRONMENT)


def test_a_stage_computes_on_the_gpu_that_slurm_gave_it(workspace: Path) -> None:
    """Slurm's first GPU of a node is 0 whoever else has leased a GPU 0; the driver knows it by its UUID."""
    set_params(workspace, profile="qwen2-vl-2b-24gb")
    gpus = (Gpu(index=index, uuid=f"GPU-{index}", name="H100", used_bytes=0, total_bytes=2**36) for index in (0, 1))
    named = set_gpus(workspace, *gpus)["FAKE_NVML"]
    fake = workspace / "pynvml.py"
    fake.write_text(fake.read_text().replace('os.environ["FAKE_NVML"]', repr(named)))
    let_end(workspace)
    run(workspace, "docker/run", "train", "r1-llm-only", **ENVIRONMENT)
    assert notes(workspace) == ["begin None GPU-0", "end"]


def test_a_failed_stage_has_its_own_exit_code_and_the_same_command_runs_it_again(workspace: Path) -> None:
    let_end(workspace)
    (workspace / "fail").touch()
    said = run(workspace, "docker/run", "train", "r1-llm-only", code=7, **ENVIRONMENT)
    assert "the stage speaks" in said
    (workspace / "fail").unlink()
    run(workspace, "docker/run", "train", "r1-llm-only", **ENVIRONMENT)
    assert trained(workspace) == "of seed 42"


@pytest.mark.parametrize("phase", ["pending", "running", "ended"])
def test_killed_with_dvc_a_launcher_finds_its_job_again_and_submits_no_second_one(workspace: Path, phase: str) -> None:
    first_in_queue = occupied(workspace) if phase == "pending" else None
    command = Command(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("waits in the queue" if first_in_queue else "the stage speaks")
    command.kill()
    if phase == "ended":
        let_end(workspace)
        wait_until(lambda: jobs() == {})
        assert not (workspace / "data/trained").exists(), "put aside, where dvc does not remove it"
    again = Command(workspace)
    again.until({"ended": "takes what its job left"}.get(phase, f"takes up job {number}, {phase}"))
    if first_in_queue:
        subprocess.run(["scancel", first_in_queue], check=True)
    let_end(workspace)
    assert again.ended() == 0, again.said
    assert "the stage speaks" in again.said
    assert trained(workspace) == "of seed 42"
    assert notes(workspace) == ["begin None None", "end"]
    wait_until(lambda: num_ended(workspace) == 1)
    assert "up to date" in run(workspace, "dvc", "status", "train")


def test_a_launcher_killed_while_it_published_leaves_nothing_half_taken(workspace: Path) -> None:
    command = Command(workspace)
    command.until("the stage speaks")
    command.kill()
    let_end(workspace)
    wait_until(lambda: jobs() == {})
    (aside,) = (workspace / "data/.outputs/train").glob("job-*/outputs")
    aside.rename(aside.with_name("taken"))
    (aside.with_name("taken") / "data/trained").rename(workspace / "data/trained")
    assert "killed while it took" in run(workspace, "dvc", "repro", "train", **ENVIRONMENT)
    assert notes(workspace).count("end") == 2
    assert trained(workspace) == "of seed 42"


def test_outputs_that_dvc_removed_while_a_job_ended_are_made_again(workspace: Path) -> None:
    command = Command(workspace)
    command.until("the stage speaks")
    command.kill()
    let_end(workspace)
    wait_until(lambda: jobs() == {})
    (aside,) = (workspace / "data/.outputs/train").glob("job-*/end.json")
    aside.write_text('{"code": 0, "outputs": ["data/provenance/train.json"]}')
    said = run(workspace, "dvc", "repro", "train", **ENVIRONMENT)
    assert "it runs again" in said
    assert notes(workspace).count("end") == 2
    assert trained(workspace) == "of seed 42"


def test_a_closed_terminal_and_the_end_of_dvc_leave_the_job_running(workspace: Path) -> None:
    command = Command(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    os.killpg(command.process.pid, signal.SIGHUP)
    command.until(f"leaves job {number} to itself; the same command takes it up")
    command.ended()
    second = Command(workspace)
    second.until(f"takes up job {number}, running")
    second.process.terminate()  # dvc alone
    second.until(f"leaves job {number} to itself")
    second.ended()
    third = Command(workspace)
    third.until(f"takes up job {number}, running")
    os.killpg(third.process.pid, signal.SIGTERM)  # as a reboot does
    third.until(f"leaves job {number} to itself")
    third.ended()
    let_end(workspace)
    assert run(workspace, "dvc", "repro", "train", **ENVIRONMENT).count("launcher: take") == 1
    assert notes(workspace) == ["begin None None", "end"]


def test_ctrl_c_has_the_stage_save_and_the_same_command_goes_on(workspace: Path) -> None:
    command = Command(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.ended() != 0
    assert f"asks job {number} to save its work and end" in command.said
    assert notes(workspace) == ["begin None None", "asked by SIGTERM"]
    wait_until(lambda: jobs() == {})
    let_end(workspace)
    assert "takes" not in run(workspace, "dvc", "repro", "train", **ENVIRONMENT)
    assert trained(workspace) == "of seed 42"


def test_ctrl_c_withdraws_a_job_that_waits_and_ends_one_that_ignores_it(workspace: Path) -> None:
    before = occupied(workspace)
    waiting = Command(workspace)
    waiting.until("waits in the queue: (Resources|Priority)\n")
    waiting.launcher().send_signal(signal.SIGINT)
    assert waiting.ended() != 0
    assert "was waiting in the queue, and is withdrawn" in waiting.said
    assert set(jobs()) == {before}
    subprocess.run(["scancel", before], check=True)
    (workspace / "stages/train.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(300)"
    )
    deaf = Command(workspace)
    deaf.until("deaf")
    deaf.launcher().send_signal(signal.SIGINT)
    deaf.until("asks job")
    time.sleep(2)  # two within this time are one request
    deaf.launcher().send_signal(signal.SIGINT)
    deaf.until(r"ends job \d+")
    assert deaf.ended() != 0
    wait_until(lambda: jobs() == {})


def test_a_changed_setting_cancels_the_job_that_runs_without_it(workspace: Path) -> None:
    command = Command(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    command.kill()
    set_params(workspace, seed=7)
    changed = Command(workspace)
    changed.until(f"job {number} is of other inputs, settings or code: cancelled")
    let_end(workspace)
    assert changed.ended() == 0, changed.said
    assert trained(workspace) == "of seed 7"


def test_when_the_time_of_its_job_is_over_a_training_goes_on_in_the_queue(workspace: Path) -> None:
    """Slurm's own limit of a minute, and its signal before that."""
    set_params(workspace, partition="short", minutes=1, save_seconds=58)
    command = Command(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until(f"launcher: job {number} goes back into the queue, and on from there when it is its turn")
    wait_until(lambda: notes(workspace).count("begin None None") == 2)
    let_end(workspace)
    assert command.ended() == 0, command.said
    assert notes(workspace)[:3] == ["begin None None", "asked by SIGUSR1", "begin None None"]
    assert notes(workspace).count("end") == 1
    assert trained(workspace) == "of seed 42"


def test_a_training_that_saves_nothing_in_its_time_is_not_started_for_ever(workspace: Path) -> None:
    set_params(workspace, partition="short", save_seconds=58)
    command = Command(workspace, OMP_FORGETS="1")
    assert command.ended() != 0
    assert "the time of its job was over before it had saved anything new; give it more" in command.said, command.said
    assert notes(workspace) == ["begin None None", "asked by SIGUSR1"]


def test_a_requeued_job_goes_on_and_its_launcher_waits(workspace: Path) -> None:
    command = Command(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    subprocess.run(["scontrol", "requeue", number], check=True)
    wait_until(lambda: notes(workspace).count("begin None None") == 2)
    let_end(workspace)
    assert command.ended() == 0, command.said
    assert trained(workspace) == "of seed 42"


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"options": ["--gres=gpu:3"]}, "Slurm takes no such job: .*node configuration is not available"),
        ({"partition": "nowhere"}, "Slurm takes no such job: .*Invalid partition"),
        ({"partition": "short", "minutes": 5}, "would never start: PartitionTimeLimit, says Slurm, so it was"),
    ],
)
def test_an_impossible_job_is_refused_with_slurms_reason(workspace: Path, slurm: dict[str, Any], said: str) -> None:
    set_params(workspace, **slurm)
    assert re.search(said, run(workspace, "docker/run", "train", "r1-llm-only", code=1, **ENVIRONMENT))
    assert jobs() == {}


def test_a_job_that_somebody_holds_or_cancels_is_named(workspace: Path) -> None:
    set_params(workspace, options=["--hold"])
    command = Command(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until(f"job {number} waits in the queue: JobHeldUser; see what that means to")
    subprocess.run(["scontrol", "release", number], check=True)
    command.until("the stage speaks")
    subprocess.run(["scancel", number], check=True)
    assert command.ended() != 0
    assert f"job {number} of train has ended without a result: CANCELLED" in command.said


def test_a_job_that_finds_its_settings_changed_does_nothing(workspace: Path) -> None:
    first_in_queue = occupied(workspace)
    command = Command(workspace)
    command.until("waits in the queue")
    set_params(workspace, seed=7)
    subprocess.run(["scancel", first_in_queue], check=True)
    assert command.ended() != 0
    assert "params changed after this job was submitted" in command.said
    assert notes(workspace) == []
