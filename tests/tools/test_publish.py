"""`make publish` refuses a run that its stage could not publish, before DVC is asked."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from stages.launcher.pipeline import declared_stages
from tests import ROOT
from tests.documents import write_yaml
from tools.publish import main


@pytest.mark.parametrize(
    ("run", "missing", "message"),
    [
        ("r4-joit", "", "no recipe or export of params.yaml is called 'r4-joit' (did you mean 'r4-joint'?)"),
        ("base-vlm", "", "no recipe or export of params.yaml is called 'base-vlm'"),
        (
            "r4-joint",
            "data/runs/r4-joint/merged",
            "not here: data/runs/r4-joint/merged run: dvc repro evaluate@r4-joint; or, if a remote has the results: ",
        ),
        (
            "r4-joint",
            "data/provenance/detection",
            "dvc pull --with-deps evaluate@r4-joint",
        ),
    ],
)
def test_an_unknown_run_and_missing_inputs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, missing: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.execv", None)
    for name in ("dvc.yaml", "params.yaml"):
        Path(name).symlink_to(ROOT / name)
    (stage,) = (each for each in declared_stages(ROOT) if each.name == "publish@r4-joint")
    for path in {*stage.inputs("data")} - {missing}:
        Path(path).mkdir(parents=True)
    result = CliRunner().invoke(main, [run])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(("run", "kind"), [("r4-joint", "publish"), ("q8", "published")])
def test_a_recipe_and_an_export_are_published_by_their_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").symlink_to(ROOT / "dvc.yaml")
    raw = YAML(typ="safe").load(ROOT / "params.yaml")
    export = {"task": "detection", "data": "nutrition-tables", "recipe": "r4-joint", "format": "bitsandbytes"}
    write_yaml({**raw, "exports": {"q8": {**export, "quantization": "int8"}}}, Path("params.yaml"))
    for stage in declared_stages(tmp_path):
        if stage.name == f"{kind}@{run}":
            for path in stage.inputs("data"):
                Path(path).mkdir(parents=True, exist_ok=True)
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _path, command: started.append(command))
    result = CliRunner().invoke(main, [run])
    assert result.exit_code == 0, result.output
    assert started[0][1:] == ["-m", "dvc", "repro", "--single-item", f"{kind}@{run}"]
