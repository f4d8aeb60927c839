"""A fake NVIDIA driver: the real pynvml loads it in place of the real one, in a process started with its environment.

driver = build_fake_nvml(folder)
driver.set_gpus(GpuState(...), ...)
subprocess.run(..., env={**os.environ, **driver.environment})
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.kit.launcher.gpus import GpuState

NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
DRIVER_MISMATCH = 18  # the driver was updated under a running kernel module

SOURCE = Path(__file__).with_name("fake_nvml.c")


@dataclass(frozen=True, kw_only=True)
class FakeNvml:
    """The library, in a folder of its own, and the file that it reads its GPUs from at every nvmlInit."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.folder), "FAKE_NVML_STATE": str(self._state_path)}

    @property
    def _state_path(self) -> Path:
        return self.folder / "state"

    def set_gpus(self, *states: GpuState, failing: Mapping[str, int] | None = None) -> None:
        """From the next nvmlInit on there are these GPUs.

        states: a GPU without a UUID is lost; any other obstacle is MIG.
        failing: functions by their C name, and the error code that they return.
        """
        lines = []
        for index, state in enumerate(states):
            assert index == state.gpu.index
            lines.append(
                f"gpu {state.gpu.uuid or 'lost'} {state.used_bytes or 0} {state.total_bytes or 0} {int(state.draws)} "
                f"{int(bool(state.obstacle))} {state.gpu.name}"
            )
        for index, state in enumerate(states):
            for kind, processes in (("compute", state.compute), ("graphics", state.graphics)):
                lines += [
                    f"{kind} {index} {process.pid} {-1 if process.used_bytes is None else process.used_bytes}"
                    for process in processes
                ]
            if not state.gpu.uuid:
                lines.append(f"lost {index}")
        lines += [f"fails {function} {code}" for function, code in (failing or {}).items()]
        new = self.folder / "state.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self._state_path)  # at once: another process may be about to read it


def build_fake_nvml(folder: Path) -> FakeNvml:
    """Compiles the library into `folder`, on a machine without GPUs at first. Skips the test where it cannot."""
    if sys.platform != "linux":
        pytest.skip("the fake NVML is found by LD_LIBRARY_PATH, which only Linux heeds")
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler for the fake NVML")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([cc, "-shared", "-fPIC", "-Wall", "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    driver = FakeNvml(folder=folder)
    driver.set_gpus()
    return driver
