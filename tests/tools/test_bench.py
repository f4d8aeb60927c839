"""`make bench`, as far as a CPU can run it."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests import ROOT
from tools import bench
from tools.gpu.device import Device


def test_of_several_gpus_it_leases_one_and_hides_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leased = []

    @contextmanager
    def lease(kind: str, *, holder: str) -> Iterator[Device]:
        leased.append((kind, holder))
        yield Device(kind="cuda", name="NVIDIA L4", uuid="GPU-2")

    def results(params: Any, *_: Any) -> Iterator[bench.Result]:
        assert params.active.device.kind == "cuda"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-2"
        yield bench.Result(what="a step", ours="ours", other="theirs", ours_s=1, other_s=2)

    monkeypatch.setattr(bench, "device_to_measure", lease)
    monkeypatch.setattr(bench, "results", results)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(ROOT / "params.yaml", "params.yaml")
    result = CliRunner().invoke(bench.main, ["--cuda"], catch_exceptions=False)
    assert result.exit_code == 0
    assert leased == [("cuda", "make bench")]
    (line,) = Path(".bakeoff/bench.jsonl").read_text().splitlines()
    assert json.loads(line)["device"] == "NVIDIA L4"
    assert json.loads(line)["ratio"] == 2
