"""The reading of GPUs, by a fake of NVIDIA's driver below pynvml."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest

from stages.core.errors import UserError
from stages.kit.launcher.gpus import Gpu, read_gpus
from tests import ROOT
from tests.kit.launcher.small_checkout import set_gpus

MIB, GIB = 2**20, 2**30


def gpu(index: int, **known: Any) -> Gpu:
    return Gpu(**{"index": index, "uuid": f"GPU-{index}", "name": "A100", "used_bytes": 4 * MIB, **known})


BUSY = gpu(1, used_bytes=30 * GIB, total_bytes=80 * GIB, draws=True, compute={11: GIB, 12: None}, graphics={13: 5})
LOST = Gpu(index=0, uuid="", name="not answering", obstacle="GPU is lost")
SPLIT = Gpu(index=2, uuid="GPU-2", name="A100", obstacle="split by MIG; made whole by: nvidia-smi -i 2 -mig 0")


@pytest.mark.parametrize(
    ("known", "empty"),
    [
        ({}, True),
        ({"compute": {7: 4 * MIB}}, False),
        ({"used_bytes": 600 * MIB}, False),  # of a process in another container, which is not listed
        ({"used_bytes": 600 * MIB, "graphics": {7: 300 * MIB}}, True),
        ({"used_bytes": 600 * MIB, "graphics": {7: 300 * MIB}, "compute": {7: 300 * MIB}}, True),
        ({"used_bytes": 600 * MIB, "draws": True}, True),
        ({"used_bytes": 5 * GIB, "graphics": {7: 300 * MIB}, "draws": True}, False),
        ({"used_bytes": 600 * MIB, "draws": True, "compute": {7: 300 * MIB}}, False),
        ({"used_bytes": None}, True),
        ({"used_bytes": None, "compute": {7: None}}, False),
    ],
)
def test_a_gpu_is_empty_where_at_most_a_small_desktop_uses_it(known: dict[str, Any], empty: bool) -> None:
    assert gpu(0, **known).is_empty == empty


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose pynvml is used in this process. Without GPUs at first."""
    monkeypatch.setenv("FAKE_NVML", set_gpus(tmp_path)["FAKE_NVML"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", importlib.import_module("pynvml"))
    return tmp_path


def test_what_nvml_says_is_read_and_a_lost_gpu_does_not_hide_the_others(machine: Path) -> None:
    assert read_gpus() == ()
    gpus = (LOST, BUSY, SPLIT)
    set_gpus(machine, *gpus)
    assert read_gpus() == gpus


@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"])
def test_what_a_gpu_does_not_support_does_not_count_as_use(machine: Path, error: str) -> None:
    queries = ("MigMode", "DisplayActive", "MemoryInfo", "ComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3")
    failing = {f"nvmlDeviceGet{query}": getattr(pynvml, f"NVML_ERROR_{error}") for query in queries}
    set_gpus(machine, gpu(0), BUSY, failing=failing)
    assert read_gpus() == tuple(
        Gpu(index=known.index, uuid=known.uuid, name="A100", draws=True) for known in (gpu(0), BUSY)
    )


def test_without_a_driver_there_are_no_gpus_and_one_that_does_not_work_is_the_users_to_fix(machine: Path) -> None:
    for code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        set_gpus(machine, gpu(0), failing={"nvmlInit": code})
        assert read_gpus() == ()
    set_gpus(machine, gpu(0), failing={"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    with pytest.raises(UserError, match=r"RM has detected an NVML/RM version mismatch.*nvidia-smi$"):
        read_gpus()


def test_the_launcher_does_not_load_what_only_leases_need() -> None:
    code = "import sys, stages.kit.launcher.leases; print({'pynvml', 'torch'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert loaded.stdout == "set()\n"
