"""Stages as jobs of a real Slurm: `.ci/with-slurm .venv/bin/python -m pytest -m engine tests/smoke/test_slurm.py`.

The stage runs until there is a file `go`, so that each moment can be waited for.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.launcher.gpus import Gpu
from tests.launcher.small_checkout import notes, run, set_gpus, wait_until
from tests.smoke.slurm_jobs import (
    ENVIRONMENT,
    NEEDS_SLURM,
    jobs,
    kill,
    launcher_of,
    let_end,
    make_workspace,
    num_ended,
    occupied,
    repro,
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


def test_job_shows_its_output_and_dvc_stores_its_results(workspace: Path) -> None:
    command = repro(workspace)
    command.until("the stage speaks")
    ((number, state),) = jobs().items()
    assert state == "RUNNING"
    shown = subprocess.run(["scontrol", "show", "job", number], check=True, capture_output=True, text=True).stdout
    script = subprocess.run(["scontrol", "write", "batch_script", number, "-"], check=True, capture_output=True)
    assert "docker/run train r1-llm-only" in script.stdout.decode()
    assert "hf_smoke" not in shown + script.stdout.decode()
    let_end(workspace)
    assert command.ended() == 0, command.output
    assert notes(workspace) == ["begin None None", "end"]
    assert trained(workspace) == "of seed 42"
    assert '"engine": "process"' in (workspace / "data/provenance/train.json").read_text()
    assert {path.name for path in (workspace / "data/.outputs").rglob("*")} == {"train", "lock", "waiter"}
    assert "up to date" in run(workspace, "dvc", "status", "train")
    assert "up to date" in run(workspace, "dvc", "repro", "train", **ENVIRONMENT)


def test_stage_computes_on_the_gpu_that_slurm_assigned(workspace: Path) -> None:
    """Slurm's first GPU of a node is 0 whoever else has leased a GPU 0; the driver knows it by its UUID."""
    set_params(workspace, profile="qwen2-vl-2b", gpu=24)
    gpus = (Gpu(index=index, uuid=f"GPU-{index}", name="H100", used_bytes=0, total_bytes=2**36) for index in (0, 1))
    named = set_gpus(workspace, *gpus)["FAKE_NVML"]
    fake = workspace / "pynvml.py"
    fake.write_text(fake.read_text().replace('os.environ["FAKE_NVML"]', repr(named)))
    let_end(workspace)
    run(workspace, "docker/run", "train", "r1-llm-only", **ENVIRONMENT)
    assert notes(workspace) == ["begin None GPU-0", "end"]


@pytest.mark.parametrize("phase", ["pending", "running", "ended"])
def test_launcher_killed_with_dvc_reattaches_and_submits_no_second_job(workspace: Path, phase: str) -> None:
    first_in_queue = occupied(workspace) if phase == "pending" else None
    command = repro(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("waits in the queue" if first_in_queue else "the stage speaks")
    kill(command)
    if phase == "ended":
        let_end(workspace)
        wait_until(lambda: jobs() == {})
        assert not (workspace / "data/trained").exists(), "put aside, where dvc does not remove it"
    again = repro(workspace)
    again.until({"ended": "collecting the outputs of its job"}.get(phase, f"reattached to job {number}, {phase}"))
    if first_in_queue:
        subprocess.run(["scancel", first_in_queue], check=True)
    let_end(workspace)
    assert again.ended() == 0, again.output
    assert "the stage speaks" in again.output
    assert trained(workspace) == "of seed 42"
    assert notes(workspace) == ["begin None None", "end"]
    wait_until(lambda: num_ended(workspace) == 1)
    assert "up to date" in run(workspace, "dvc", "status", "train")


def test_launcher_killed_while_it_published_leaves_no_half_result(workspace: Path) -> None:
    command = repro(workspace)
    command.until("the stage speaks")
    kill(command)
    let_end(workspace)
    wait_until(lambda: jobs() == {})
    (aside,) = (workspace / "data/.outputs/train").glob("job-*/outputs")
    (aside / "data/trained").rename(workspace / "data/trained")
    assert "running the stage again" in run(workspace, "dvc", "repro", "train", **ENVIRONMENT)
    assert notes(workspace).count("end") == 2
    assert trained(workspace) == "of seed 42"


def test_closed_terminal_and_end_of_dvc_leave_the_job_running(workspace: Path) -> None:
    command = repro(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    os.killpg(command.process.pid, signal.SIGHUP)
    command.until(f"detached from job {number}; run the same command to reattach")
    command.ended()
    second = repro(workspace)
    second.until(f"reattached to job {number}, running")
    second.process.terminate()  # dvc alone
    second.until(f"detached from job {number}")
    second.ended()
    third = repro(workspace)
    third.until(f"reattached to job {number}, running")
    os.killpg(third.process.pid, signal.SIGTERM)  # as a reboot does
    third.until(f"detached from job {number}")
    third.ended()
    let_end(workspace)
    output = run(workspace, "dvc", "repro", "train", **ENVIRONMENT)
    assert len(re.findall("launcher: (reattached|collecting)", output)) == 1
    assert notes(workspace) == ["begin None None", "end"]


def test_ctrl_c_has_the_stage_save_and_the_same_command_resumes(workspace: Path) -> None:
    command = repro(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.ended() != 0
    assert f"asking job {number} to save and end" in command.output
    assert notes(workspace) == ["begin None None", "asked by SIGTERM"]
    wait_until(lambda: jobs() == {})
    let_end(workspace)
    assert "reattached" not in run(workspace, "dvc", "repro", "train", **ENVIRONMENT)
    assert trained(workspace) == "of seed 42"


def test_ctrl_c_withdraws_a_waiting_job_and_ends_one_that_ignores_it(workspace: Path) -> None:
    before = occupied(workspace)
    waiting = repro(workspace)
    waiting.until("waits in the queue: (Resources|Priority)\n")
    launcher_of(waiting).send_signal(signal.SIGINT)
    assert waiting.ended() != 0
    assert "was waiting in the queue, and is withdrawn" in waiting.output
    assert set(jobs()) == {before}
    subprocess.run(["scancel", before], check=True)
    (workspace / "stages/train.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(300)"
    )
    deaf = repro(workspace)
    deaf.until("deaf")
    launcher_of(deaf).send_signal(signal.SIGINT)
    deaf.until("asking job")
    time.sleep(2)  # two within this time are one request
    launcher_of(deaf).send_signal(signal.SIGINT)
    deaf.until(r"ending job \d+ now")
    assert deaf.ended() != 0
    wait_until(lambda: jobs() == {})


def test_changed_setting_cancels_the_running_job(workspace: Path) -> None:
    command = repro(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    kill(command)
    set_params(workspace, seed=7)
    changed = repro(workspace)
    changed.until(f"cancelling job {number}: its inputs, settings or code")
    let_end(workspace)
    assert changed.ended() == 0, changed.output
    assert trained(workspace) == "of seed 7"


def test_training_is_requeued_when_the_time_of_its_job_is_over(workspace: Path) -> None:
    """Slurm's own limit of a minute, and its signal 20 to 50 seconds after the start."""
    set_params(workspace, partition="short", minutes=1, save_seconds=10)
    command = repro(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until(f"launcher: job {number} goes back into the queue, and resumes from there")
    wait_until(lambda: notes(workspace).count("begin None None") == 2)
    let_end(workspace)
    assert command.ended() == 0, command.output
    assert notes(workspace)[:3] == ["begin None None", "asked by SIGUSR1", "begin None None"]
    assert notes(workspace).count("end") == 1
    assert trained(workspace) == "of seed 42"


def test_training_that_saves_nothing_in_its_time_is_not_requeued(workspace: Path) -> None:
    command = repro(workspace, OMP_FORGETS="1")
    number = command.until(r"launcher: job (\d+)")
    command.until("the stage speaks")
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
    assert command.ended() != 0
    assert "the time of its job was over before it saved a new checkpoint; increase slurm" in command.output, (
        command.output
    )
    assert notes(workspace) == ["begin None None", "asked by SIGUSR1"]


def test_impossible_job_is_refused_with_slurms_reason(workspace: Path) -> None:
    set_params(workspace, partition="nowhere")
    output = run(workspace, "docker/run", "train", "r1-llm-only", code=1, **ENVIRONMENT)
    assert re.search("Slurm refuses the job: .*Invalid partition", output)
    assert jobs() == {}


def test_held_and_cancelled_jobs_are_reported(workspace: Path) -> None:
    set_params(workspace, options=["--hold"])
    command = repro(workspace)
    number = command.until(r"launcher: job (\d+)")
    command.until(f"job {number} waits in the queue: JobHeldUser; for details: scontrol")
    subprocess.run(["scontrol", "release", number], check=True)
    command.until("the stage speaks")
    subprocess.run(["scancel", number], check=True)
    assert command.ended() != 0
    assert f"job {number} of train has ended without a result: CANCELLED" in command.output
