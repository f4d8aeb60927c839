"""The stage that checks params.yaml."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

import stages.check
import stages.prepare
from tests import ROOT
from tests.stage_runs import write_params


def test_the_shipped_file_is_without_mistakes_and_an_unknown_task_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    write_params(raw)
    assert CliRunner().invoke(stages.check.main).exit_code == 0
    raw["baselines"]["base-vlm"]["task"] = "nosuch"
    raw["profiles"]["tiny"]["datasets"]["visempar"]["task"] = "amrr"
    write_params(raw)
    refused = CliRunner().invoke(stages.check.main)
    assert refused.exit_code == 1
    assert "baselines.base-vlm.task: no task is called 'nosuch'; there are " in refused.output
    assert "profiles.tiny.datasets.visempar.task: no task is called 'amrr' (did you mean 'amr'?)" in refused.output


def test_a_split_of_no_files_is_refused_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    raw["profiles"]["tiny"]["datasets"]["visempar"] |= {
        "source": f"folder:{ROOT / 'data/tiny/visempar'}",
        "splits": {"test": "public_test*"},
    }
    write_params(raw)
    refused = CliRunner().invoke(stages.prepare.main, ["visempar"])
    assert refused.exit_code == 1
    assert "profiles.tiny.datasets.visempar.splits.test: 'public_test*' matches no file of" in refused.output
    assert not Path("data").exists() or not list(Path("data").rglob("*.parquet"))


def test_settings_of_a_dataset_are_checked_by_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    datasets = raw["profiles"]["tiny"]["datasets"]
    datasets["nutrition-tables"]["reader"] = {"columns": {"ordr": "xywh"}, "max_image_pixels": 0}
    datasets["visempar"]["reader"] = {"group": "x"}
    datasets["conversations"]["reader"] = {"metrics": ["bleu"], "grup": "x"}
    datasets["both"] = {"task": "chat", "source": "mix", "mix": {"conversations": None}}
    write_params(raw)
    refused = CliRunner().invoke(stages.check.main)
    assert refused.exit_code == 1
    here = "profiles.tiny.datasets"
    assert f"{here}.nutrition-tables.reader.columns.ordr: unknown key (did you mean 'order'?)" in refused.output
    assert f"{here}.nutrition-tables.reader.max_image_pixels: input should be greater" in refused.output
    assert f"{here}.visempar.reader.group: unknown key" in refused.output
    assert f"{here}.both.mix: datasets of the task chat cannot be mixed" in refused.output
    assert f"{here}.conversations.reader.metrics.0: input should be" in refused.output
    assert f"{here}.conversations.reader.grup: unknown key (did you mean 'group'?)" in refused.output
