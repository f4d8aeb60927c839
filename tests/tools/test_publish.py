"""`make publish` refuses a run that its stage could not publish, before DVC is asked."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from stages.launcher.pipeline import declared_stages
from tests import ROOT
from tools.publish import main


@pytest.mark.parametrize(
    ("run", "missing", "message"),
    [
        ("r4-joit", "", "no recipe or export of params.yaml is called 'r4-joit' (did you mean 'r4-joint'?)"),
        ("base-vlm", "", "no recipe or export of params.yaml is called 'base-vlm'"),
        (
            "r4-joint",
            "data/runs/r4-joint/merged",
            "these are not here: data/runs/r4-joint/merged make them",
        ),
        (
            "r4-joint",
            "data/provenance/detection",
            "make them with: dvc repro evaluate@r4-joint",
        ),
    ],
)
def test_an_unknown_run_and_missing_inputs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, missing: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", None)
    for name in ("dvc.yaml", "params.yaml"):
        Path(name).symlink_to(ROOT / name)
    (stage,) = (each for each in declared_stages(ROOT) if each.name == "publish@r4-joint")
    for path in {*stage.inputs("data")} - {missing}:
        Path(path).mkdir(parents=True)
    result = CliRunner().invoke(main, [run])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
