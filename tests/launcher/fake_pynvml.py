"""pynvml on the GPUs of the JSON file that FAKE_NVML names; errors and constants are those of the real module.

Copied as pynvml.py to a folder that Python searches first. `gpus` has the fields of Gpu; one without a UUID is lost.
`failing` has error codes by the name of the function that fails.
"""

import importlib.util
import inspect
import json
import os
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_spec: Any = importlib.util.spec_from_file_location("real_pynvml", Path(sysconfig.get_path("purelib"), "pynvml.py"))
_real: Any = importlib.util.module_from_spec(_spec)
sys.modules["real_pynvml"] = _real  # it looks for itself there
_spec.loader.exec_module(_real)
globals().update({name: value for name, value in vars(_real).items() if not name.startswith("__")})


def _state() -> Any:
    return json.loads(Path(os.environ["FAKE_NVML"]).read_text())


def _handle(index: int) -> Any:
    gpu = _state()["gpus"][index]
    if not gpu["uuid"]:
        raise _real.NVMLError(_real.NVML_ERROR_GPU_IS_LOST)
    return gpu


def _memory(gpu: Any, version: int) -> Any:
    assert version == _real.nvmlMemory_v2  # version 1 counts what the driver reserves
    return SimpleNamespace(used=gpu["used_bytes"], total=gpu["total_bytes"])


_RESULTS: dict[str, Any] = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: _state()["driver"],
    "nvmlDeviceGetCount": lambda: len(_state()["gpus"]),
    "nvmlDeviceGetHandleByIndex": _handle,
    "nvmlDeviceGetUUID": lambda gpu: gpu["uuid"],
    "nvmlDeviceGetName": lambda gpu: gpu["name"],
    "nvmlDeviceGetMinorNumber": lambda gpu: gpu["minor"],
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetComputeRunningProcesses_v3": lambda gpu: [SimpleNamespace(pid=pid) for pid in gpu["processes"]],
}


def _function(name: str) -> Any:
    def function(*args: Any) -> Any:
        inspect.signature(getattr(_real, name)).bind(*args)
        if code := _state()["failing"].get(name):
            raise _real.NVMLError(code)
        return _RESULTS[name](*args)

    return function


globals().update({name: _function(name) for name in _RESULTS})
