"""Which stages run as jobs, and what makes two calls the same job."""

from dataclasses import replace
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.params.load import load_params
from stages.core.params.schema import Params
from stages.kit.launcher.pipeline import DeclaredStage
from stages.kit.launcher.places import runs_in_slurm, stage_job
from tests import ROOT

PARAMS = load_params(ROOT / "params.yaml")
IN_SLURM = replace(PARAMS, profiles={"tiny": replace(PARAMS.active, place="slurm")})
FOLDERS = ("stages", "docker", "data/x")
STAGE = DeclaredStage(
    name="train@r1", command="docker/run train r1", params=("seed", "tracking"), deps=FOLDERS, outs=()
)


@pytest.mark.parametrize(
    ("stage", "caller", "params", "in_slurm"),
    [
        ("train", {}, PARAMS, False),
        ("train", {"BAKEOFF_PLACE": "slurm"}, PARAMS, True),
        ("train", {}, IN_SLURM, True),
        ("train", {"BAKEOFF_PLACE": "here"}, IN_SLURM, False),
        ("train", {"BAKEOFF_JOB": "/x"}, IN_SLURM, False),
        ("check", {}, IN_SLURM, False),
    ],
)
def test_a_stage_is_submitted_once_where_the_caller_or_the_profile_says_so(
    stage: str, caller: dict[str, str], params: Params, in_slurm: bool
) -> None:
    assert runs_in_slurm(stage, caller, params) is in_slurm


def test_a_mistyped_place_is_refused() -> None:
    with pytest.raises(UserError, match="BAKEOFF_PLACE is 'slrum'; the places are here, slurm"):
        runs_in_slurm("train", {"BAKEOFF_PLACE": "slrum"}, PARAMS)


def fingerprint(workspace: Path, params: Params = PARAMS, **caller: str) -> str:
    return stage_job("train", ("r1",), STAGE, params, [STAGE], workspace, caller, say=print).fingerprint


def test_a_job_is_another_when_its_inputs_settings_code_or_packages_are_and_no_other_thing(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text("1")
    first = fingerprint(tmp_path)
    asking = replace(PARAMS.slurm, save_seconds=10)
    assert fingerprint(tmp_path, replace(PARAMS, slurm=asking, scored="selection"), HOME="/x") == first
    others = [
        fingerprint(tmp_path, replace(PARAMS, seed=1)),
        fingerprint(tmp_path, BAKEOFF_ENGINE="docker"),
        fingerprint(tmp_path, OMP_NUM_THREADS="3"),
    ]
    for folder in FOLDERS:
        (tmp_path / folder / "file").write_text("2")
        others.append(fingerprint(tmp_path))
    assert len({first, *others}) == 7
