"""The training stage, where several processes are one training."""

from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.core.lineage import write_lineage
from stages.train import read_base


def test_the_files_of_a_base_are_read_by_one_process_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = Path("data/bases/vlm")
    base.mkdir(parents=True)
    (base / "model.safetensors").write_text("weights")
    lineage = write_lineage(base, kind="base", name="vlm", source={"folder": "somewhere"})
    (base / "model.safetensors").write_text("others")
    monkeypatch.setenv("RANK", "1")
    assert read_base(str(base)) == lineage
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"now holds .*dvc repro -f -s base@vlm"):
        read_base(str(base))
