"""Leases of GPUs through docker/run and DVC's queue, on a fake NVIDIA driver; what is checked before a stage starts."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.core.params.schema import DeviceParams, Params
from stages.kit.evaluation.vllm import environment
from stages.kit.launcher import launch as launcher
from stages.kit.launcher.engines import choose_engine
from stages.kit.launcher.gpus import Gpu
from stages.kit.launcher.launch import refuse_undeclared
from stages.kit.launcher.needs import gpus_wanted, hub_cache, image_target, kept_dirs, source_dir, source_of
from stages.kit.launcher.outputs import Outputs, refuse_links_out
from stages.kit.launcher.pipeline import declared_stages, stage_of_command
from stages.kit.launcher.process import ProcessEngine
from stages.kit.launcher.stage_run import STAGES
from stages.kit.planning.plan import resolve_plan, write_plan
from tests import ROOT
from tests.documents import write_yaml
from tests.kit.launcher.small_checkout import CALLER, commit, run, set_gpus, small_checkout

GPUS = tuple(
    Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA A100", used_bytes=0, total_bytes=80 * 2**30) for index in (0, 1)
)

# Notes when it starts and ends, and on which GPUs. With MEETS it waits until another one runs too.
STAGE = """
import os, pathlib, time

notes = pathlib.Path(os.environ["DVC_ROOT"], "notes")

def note(text):
    with notes.open("a") as file:
        print(text, file=file)

gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
pathlib.Path(os.environ["DVC_ROOT"], "triton").write_text(os.environ.get("TRITON_CACHE_DIR", "nowhere"))
note(f"start {gpus}")
for _ in range(600 if os.environ.get("OMP_MEETS") else 10):
    if os.environ.get("OMP_MEETS") and notes.read_text().count("start") > 1:
        break
    time.sleep(0.05)
else:
    assert not os.environ.get("OMP_MEETS"), "alone to the end"
note(f"end {gpus}")
pathlib.Path("trained").write_text("trained")
"""

PIPELINE = """
stages:
  train:
    cmd: exec docker/run train r1-llm-only
    params: [seed]
    outs: [trained]
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A repository of DVC's with one stage, which wants one GPU. The machine has none at first."""
    workspace = small_checkout(tmp_path / "a workspace", pipeline=PIPELINE, train=STAGE)
    write_yaml(YAML(typ="safe").load(ROOT / "params.yaml") | {"profile": "qwen2-vl-2b-24gb"}, workspace / "params.yaml")
    with (workspace / ".gitignore").open("a") as ignored:
        ignored.write("/triton\n/trained\n")
    set_gpus(workspace)
    run(workspace, "git", "init", "--quiet")
    run(workspace, "dvc", "init", "--quiet")
    commit(workspace)
    return workspace


def train(workspace: Path, *gpus: Gpu, code: int = 0, **environment: str) -> str:
    """What the launcher prints, on a machine with these GPUs."""
    environment |= set_gpus(workspace, *gpus)
    return run(workspace, "docker/run", "train", "r1-llm-only", code=code, DVC_ROOT=str(workspace), **environment)


def queued(workspace: Path, *gpus: Gpu, **more: str) -> list[str]:
    """What the stages noted in two experiments that two workers of DVC's queue ran."""
    environment = CALLER | set_gpus(workspace, *gpus) | more

    def dvc(*args: str) -> str:
        # Into a file: the workers that `dvc queue start` leaves behind would hold a pipe open.
        with (workspace / ".dvc/tmp/said").open("w+") as said:
            subprocess.run(["dvc", *args], cwd=workspace, env=environment, check=True, stdout=said)
            said.seek(0)
            return said.read()

    for seed in (1, 2):
        dvc("exp", "run", "--queue", "-S", f"seed={seed}")
    dvc("queue", "start", "--jobs", "2")
    status = ""
    try:
        for _ in range(120):
            # A worker may be writing what this reads (dvc 3.67).
            with contextlib.suppress(subprocess.CalledProcessError):
                status = dvc("queue", "status")
            if status.count("Success") + status.count("Failed") == 2:
                break
            time.sleep(0.5)
    finally:
        # The first worker to find the queue empty takes down what the other one would hear that from (dvc 3.67).
        for pid in (workspace / ".dvc/tmp/exps/celery").glob("dvc-exp-worker-*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)
    assert status.count("Success") == 2, status
    return (workspace / "notes").read_text().splitlines()


@pytest.mark.pipeline
def test_two_queued_experiments_run_side_by_side_on_two_gpus(workspace: Path) -> None:
    first, second, *ends = queued(workspace, *GPUS, OMP_MEETS="1")
    assert {first, second} == {"start GPU-0", "start GPU-1"}
    assert set(ends) == {"end GPU-0", "end GPU-1"}


def test_a_stage_gets_the_gpu_that_is_free_and_keeps_what_triton_compiles_in_the_repository(workspace: Path) -> None:
    folders = []
    for own in ("", "/shared/by/all"):
        train(workspace, *GPUS, CUDA_VISIBLE_DEVICES="1", TRITON_CACHE_DIR=own)
        folders.append(Path((workspace / "triton").read_text()))
    assert (workspace / "notes").read_text().splitlines() == ["start GPU-1", "end GPU-1"] * 2
    assert folders[0] == folders[1]
    assert folders[0].parent == workspace / ".bakeoff/triton"
    shutil.copy(ROOT / "params.yaml", workspace)
    train(workspace, TRITON_CACHE_DIR="/shared/by/all")
    assert (workspace / "triton").read_text() == "nowhere", "on a CPU"


def test_without_a_free_gpu_a_stage_is_refused_before_anything_runs(workspace: Path) -> None:
    refused = train(workspace, code=1)
    assert "train r1-llm-only wants 1 GPU" in refused
    assert "Traceback" not in refused
    assert not (workspace / "notes").exists()


@pytest.mark.parametrize("link", ["data/bases", "data", "data/.outputs", ".bakeoff"])
def test_a_link_out_of_the_checkout_is_refused_before_anything_is_written_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """Another stage's outputs too: DVC removes those before it calls the launcher."""
    checkout, victim = tmp_path / "checkout", tmp_path / "victim"
    (victim / "vlm").mkdir(parents=True)
    (checkout / link).parent.mkdir(parents=True)
    (checkout / link).symlink_to(victim)
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, checkout)
    monkeypatch.setattr(launcher, "WORKSPACE_DIR", checkout)
    monkeypatch.setenv("BAKEOFF_ENGINE", "process")
    monkeypatch.delenv("DVC_ROOT", raising=False)
    with pytest.raises(UserError, match=f"{link} is a link out of this checkout, to {victim}"):
        launcher.launch("check", (), command_line=())
    assert [path.name for path in victim.iterdir()] == ["vlm"]
    (checkout / link).unlink()
    (checkout / "within").mkdir()
    (checkout / link).symlink_to(checkout / "within")
    refuse_links_out(checkout, [f"{link}/vlm"])


@pytest.mark.parametrize(
    ("stage", "kind", "wanted"),
    [("train", "cuda", 4), ("merge", "cuda", 1), ("evaluate", "cuda", 1), ("plan", "cuda", 0), ("train", "cpu", 0)],
)
def test_training_takes_the_profiles_gpus_and_inference_one(stage: str, kind: str, wanted: int) -> None:
    assert gpus_wanted(stage, DeviceParams(kind=kind, count=4)) == wanted  # type: ignore[arg-type]


def test_where_vllm_is_to_answer_its_image_is_wanted_and_missed_before_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "environment_dir", lambda: tmp_path)
    params = load_params(ROOT / "params.yaml")
    profile = params.active
    assert image_target("evaluate", params) == "cpu"
    profile = replace(profile, evaluation=replace(profile.evaluation, engine="vllm"))
    for kind, target in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        profile = replace(profile, device=DeviceParams(kind=kind))  # type: ignore[arg-type]
        params = replace(params, profiles={params.profile: profile})
        targets = {stage: image_target(stage, params) for stage in STAGES}
        assert {stage for stage in STAGES if targets[stage] == target} == {"plan", "evaluate"}
        assert set(targets.values()) == {kind, target}
        with pytest.raises(UserError, match="make setup EXTRAS=vllm"):
            choose_engine("process", workspace_dir=ROOT, target=target, say=print)
    assert isinstance(choose_engine("process", workspace_dir=ROOT, target="cuda", say=print), ProcessEngine)


def test_where_a_fetching_stage_takes_its_data_from_is_what_params_yaml_says() -> None:
    params = load_params(ROOT / "params.yaml")
    assert source_of("base", "vlm", params) == "folder:data/tiny/qwen2-vl"
    assert source_of("prepare", "nutrition-tables", params) == "folder:data/tiny/nutrition-tables"
    assert source_of("train", "r1-llm-only", params) == ""
    assert source_of("base", "no such", params) == ""
    assert source_dir("folder:data/tiny/../photos", ROOT) == ROOT / "data/photos"
    assert source_dir("folder:/photos", ROOT) == Path("/photos")
    assert source_dir("mix", ROOT) is None
    assert source_dir("random:qwen2-vl-7b", ROOT) is None


def test_what_dvc_would_not_wait_for_is_refused_with_the_lines_to_add(tmp_path: Path) -> None:
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    raw["builds"]["moe"]["experts"].append({"recipe": "moe-dense", "domain": "all"})
    datasets = raw["profiles"]["tiny"]["datasets"]
    datasets["more"] = datasets["qmsum"]
    datasets["both-domains"]["mix"]["more"] = 5
    write_yaml(raw, tmp_path / "params.yaml")
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    params = load_params(tmp_path / "params.yaml")

    def look(stage: str, name: str) -> None:
        declared = stage_of_command(declared_stages(tmp_path), stage, [name])
        assert declared is not None
        refuse_undeclared(declared, stage, name, params)

    look("prepare", "only-qmsum")
    with pytest.raises(UserError, match=r"(?s)build@moe needs .*data/runs/moe-dense/merged") as build:
        look("build", "moe")
    with pytest.raises(UserError, match=r"(?s)prepare@both-domains needs .*data/prepared/more") as mix:
        look("prepare", "both-domains")

    pipeline = YAML(typ="safe").load(tmp_path / "dvc.yaml")
    for error in (build, mix):
        for where, line in re.findall(r"^  stages\.(\S+):  - (\S+)$", error.value.message, re.MULTILINE):
            stage, _, key = where.split(".")
            pipeline["stages"][stage]["do"][key].append(line)
    write_yaml(pipeline, tmp_path / "dvc.yaml")
    look("build", "moe")
    look("prepare", "both-domains")


def test_downloads_are_kept_where_the_hubs_own_client_keeps_them() -> None:
    assert hub_cache({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/cache"}) == Path("/hf")
    assert hub_cache({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/huggingface")
    assert hub_cache({}) == Path.home() / ".cache/huggingface"


def test_only_a_training_what_is_tracked_and_what_signs_write_beside_their_outputs() -> None:
    params, repository = load_params(ROOT / "params.yaml"), Path("/repository")
    checkpoints = repository / ".bakeoff/checkpoints/r1-llm-only"
    features, tracking = repository / ".bakeoff/features", repository / ".bakeoff/tracking"
    assert kept_dirs("train", "r1-llm-only", params, repository) == (checkpoints, features)
    tracked = replace(params, tracking=replace(params.tracking, wandb=True))
    assert kept_dirs("train", "r1-llm-only", tracked, repository) == (checkpoints, features, tracking)
    for stage, name in (("merge", "r1-llm-only"), ("train", ""), ("train", "--help"), ("train", "../../x")):
        assert kept_dirs(stage, name, tracked, repository) == ()
    for stage, name in (("evaluate", "base-vlm"), ("compare", "detection")):
        assert kept_dirs(stage, name, params, repository) == ()
        assert kept_dirs(stage, name, tracked, repository) == (tracking,)
    assert kept_dirs("publish", "r1-llm-only", params, repository) == (repository / ".bakeoff/signing",)


PUBLISH = """
import os, pathlib, sys
names = ("HF_TOKEN", "HF_HUB_OFFLINE")
pathlib.Path("notes").write_text(" ".join([*sys.argv[1:], *(str(os.environ.get(name)) for name in names)]))
if "--to" not in sys.argv:
    folder = pathlib.Path("data/published/r1-llm-only")
    folder.mkdir(parents=True)
    (folder / "model").write_text("weights")
"""


def test_only_what_sends_a_published_folder_has_network_and_token_and_it_sends_what_was_made(tmp_path: Path) -> None:
    pipeline = (
        "stages:\n  publish:\n    foreach: ${recipes}\n    do:\n      cmd: exec docker/run publish\n"
        "      deps: [stages]\n"
        "      outs:\n        - data/provenance/publish@${key}.json\n        - data/published/${key}\n"
    )
    workspace = small_checkout(tmp_path / "workspace", pipeline=pipeline, publish=PUBLISH)
    send = ("docker/run", "publish", "r1-llm-only", "--to", "owner/name")
    run(workspace, "docker/run", "publish", "r1-llm-only", HF_TOKEN="secret")
    assert (workspace / "notes").read_text() == "r1-llm-only None 1"
    record = workspace / "data/provenance/publish@r1-llm-only.json"
    before = record.read_bytes()
    run(workspace, *send, HF_TOKEN="secret")
    assert (workspace / "notes").read_text() == "r1-llm-only --to owner/name secret None"
    assert record.read_bytes() == before, "sending makes nothing"
    (workspace / "data/published/r1-llm-only/model").write_text("other weights")
    said = run(workspace, *send, code=1, HF_TOKEN="secret")
    assert "data/published/r1-llm-only is not what publish@r1-llm-only made" in said


def test_a_container_that_sends_sees_of_the_data_only_what_it_sends(tmp_path: Path) -> None:
    sending = stage_of_command(declared_stages(ROOT), "publish", ["r4-joint", "--to", "owner/name"])
    assert sending is not None
    assert sending.inputs("data") == ("data/published/r4-joint",)
    assert "stages/publish.py" in sending.deps
    outputs = Outputs(sending, tmp_path)
    with outputs.alone(), outputs.aside():
        assert outputs.folders == ()
        outputs.take([])


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """A workspace with a plan of r1: 40 bytes are trained, 400 merged."""
    params = load_params(ROOT / "params.yaml")
    plan = resolve_plan(params, "r1-llm-only", train_samples=32)
    trainable = {"vision": 0, "projector": 0, "llm": 10, "total": 10, "all": 110}
    write_plan(replace(plan, trainable=trainable), tmp_path / "data/runs/r1-llm-only/plan.yaml")
    monkeypatch.setattr(launcher, "WORKSPACE_DIR", tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return params


@pytest.mark.parametrize(("stage", "takes"), [("train", 40 + 3 * 3 * 40), ("merge", 400)])
def test_a_stage_that_would_fill_the_disk_is_refused_before_it_starts(
    planned: Params, monkeypatch: pytest.MonkeyPatch, stage: str, takes: int
) -> None:
    for free in (takes, takes - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if free == takes:
            launcher.refuse_full_disk(stage, "r1-llm-only", planned)
            continue
        with pytest.raises(UserError, match=f"{stage} r1-llm-only takes up to {takes} B of disk"):
            launcher.refuse_full_disk(stage, "r1-llm-only", planned)
    launcher.refuse_full_disk("evaluate", "r1-llm-only", planned)
    launcher.refuse_full_disk(stage, "r4-joint", planned)  # without a plan, which the stage itself names


def test_checkpoints_that_are_there_already_need_no_more_room_and_those_on_another_disk_none(
    planned: Params, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40 + 60))
    saved = tmp_path / ".bakeoff/checkpoints/r1-llm-only/0/step-000001/state"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(bytes(3 * 3 * 40 - 60))
    launcher.refuse_full_disk("train", "r1-llm-only", planned)
    saved.write_bytes(bytes(3 * 3 * 40 - 61))
    with pytest.raises(UserError, match="takes up to 101 B"):
        launcher.refuse_full_disk("train", "r1-llm-only", planned)
    monkeypatch.setattr(launcher, "same_disk", lambda one, _: "checkpoints" not in str(one))
    launcher.refuse_full_disk("train", "r1-llm-only", planned)


def test_a_cache_on_another_disk_needs_the_room_too(
    planned: Params, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = {tmp_path / "data/runs": 10**9, tmp_path: 39}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    launcher.refuse_full_disk("train", "r1-llm-only", planned)
    monkeypatch.setattr(launcher, "same_disk", lambda *_: False)
    with pytest.raises(UserError, match="in DVC's cache, takes up to 40 B"):
        launcher.refuse_full_disk("train", "r1-llm-only", planned)
