from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from stages.core.params.schema import DataParams, DatasetParams
from stages.prepare import prepare
from tests import ROOT
from tests.tasks.detection.written import PHOTOS, WRITERS
from tools.data.__main__ import main


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    (tmp_path / "data").mkdir()
    (tmp_path / "data/tiny").symlink_to(ROOT / "data/tiny")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_folder_is_shown_with_all_that_is_wrong_and_the_entry_that_asks_for_it(workspace: Path) -> None:
    WRITERS["yolo"](workspace / "photos", PHOTOS)
    (workspace / "photos/train/labels/a.txt").write_text("9 0.5 0.5 0.1 0.1\n")
    ended = run("photos")
    assert ended.exit_code == 0, ended.output
    lines = [" ".join(line.split()) for line in ended.output.splitlines()]
    for line in (
        "train: images 2, 1 without a box; 1 invalid one",
        "train: boxes an image 0: 1, 3: 1",
        "train: cup 1 box in 1 image",
        "val: Nährwerte 1 box in 1 image",
        "train/labels/a.txt: line 1: no class has the number 9; there are 3",
    ):
        assert line in lines
    assert any(line.startswith("train: tokens ") and "r1-llm-only" in line for line in lines)
    (page,) = (workspace / ".bakeoff/data").iterdir()
    text = page.read_text()
    assert text.count('<img src="data:image/') == 3
    assert "no class has the number 9" in text

    entry = YAML(typ="safe").load(ended.stdout.split("params.yaml:")[1])["nutrition-tables"]
    assert entry["reader"]["category"] == ["Nährwerte", "cup", "red lid"]
    (workspace / "photos/train/labels/a.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    stats = prepare(DatasetParams(**entry), DataParams(), workspace / "prepared")
    assert stats["splits"]["train"]["records"] == 3


def test_a_dataset_is_shown_as_params_have_it(workspace: Path) -> None:
    WRITERS["voc"](workspace / "photos", PHOTOS)
    yaml, path = YAML(), workspace / "params.yaml"
    params = yaml.load(path)
    params["profiles"]["tiny"]["datasets"]["nutrition-tables"] = {
        "task": "detection", "source": "folder:photos",
        "reader": {"category": ["cup", "Nährwerte"], "label": {"cup": "<b>mug</b>"}},
    }  # fmt: skip
    yaml.dump(params, path)
    ended = run("--dataset", "nutrition-tables")
    assert ended.exit_code == 0, ended.output
    assert "Annotations/empty.xml: no boxes" in ended.output
    assert "<b>mug</b>" in ended.output
    page = (workspace / ".bakeoff/data/nutrition-tables.html").read_text()
    assert "<b>mug</b>" not in page
    assert "&lt;b&gt;mug" in page
