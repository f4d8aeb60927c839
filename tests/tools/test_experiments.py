"""What `make experiments` makes of DVC's table."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

import pytest

from tools import experiments
from tools.compare.experiments import HIDDEN
from tools.experiments import experiment_lines

SHOWN = """\
Experiment,rev,typ,Created,State,best,r1.mean_iou,r2.mean_iou,recipes.r1.lora.rank,recipes.r1.max_steps
,workspace,baseline,,,r1,0.66,0.7,8,
,main,baseline,2026-11-22T10:04:00,,r1,0.64,0.7,64,
waxen-prad,19ad0f4,branch_base,2026-11-22T10:06:00,,r1,0.66,0.7,8,
lumpy-ruse,19ad0f5,branch_base,2026-11-22T10:07:00,Failed,,!,!,64,20
,6a43b00,baseline,2026-11-21T10:00:00,,,!,!,64,
sooty-heat,19ad0f6,branch_base,2026-11-21T10:06:00,,r2,0.5,0.7,64,
"""
NONE_YET = "no experiments yet; run one with: dvc exp run --temp -S recipes.r1-llm-only.lora.rank=8"


def test_each_experiment_is_shown_with_what_is_unlike_its_commit() -> None:
    assert experiment_lines(csv.DictReader(SHOWN.splitlines())) == [
        "workspace  (from main)",
        "  r1.mean_iou           0.66  was 0.64",
        "  recipes.r1.lora.rank  8  was 64",
        "main  2026-11-22 10:04:00  (commit)",
        "waxen-prad  2026-11-22 10:06:00  (from main)",
        "  r1.mean_iou           0.66  was 0.64",
        "  recipes.r1.lora.rank  8  was 64",
        "lumpy-ruse  2026-11-22 10:07:00  Failed  (from main)",
        "  recipes.r1.max_steps  20",
        "6a43b00  2026-11-21 10:00:00  (commit)",
        "sooty-heat  2026-11-21 10:06:00  (from 6a43b00)",
        "  best         r2",
        "  r1.mean_iou  0.5",
        "  r2.mean_iou  0.7",
    ]


def test_before_the_first_commit_and_the_first_result_there_is_a_line_too() -> None:
    rows = csv.DictReader(
        "Experiment,rev,typ,Created\n,workspace,baseline,\n,main,baseline,2026-11-22T10:04:00\n".splitlines()
    )
    assert experiment_lines(rows) == [
        "workspace  (from main)",
        "  nothing differs",
        "main  2026-11-22 10:04:00  (commit)",
        NONE_YET,
    ]
    assert experiment_lines(csv.DictReader(["Experiment,rev,typ,Created", ",workspace,baseline,"])) == [
        "workspace",
        "  nothing differs",
        NONE_YET,
    ]


def test_a_clone_without_experiments_shows_how_to_run_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("rank: 8\n")
    (tmp_path / "dvc.yaml").write_text("params: [params.yaml]\n")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("")
    me = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*me, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    experiments.main.callback()  # type: ignore[misc]
    workspace, nothing, commit, last = capsys.readouterr().out.splitlines()
    assert (nothing, last) == ("  nothing differs", NONE_YET)
    assert workspace.startswith("workspace  (from ")
    assert commit.endswith("(commit)")


def test_digests_of_files_are_hidden_and_settings_are_not() -> None:
    hidden = ["data/bases/vlm", "stages/train.py", "params.yaml", "docker", "r1.mean_iou_low"]
    shown = ["data.skip_invalid", "r1.mean_iou", "recipes.docker.seed", "profiles.tiny.memory.placement"]
    assert [name for name in hidden + shown if not re.search(HIDDEN, name)] == shown
