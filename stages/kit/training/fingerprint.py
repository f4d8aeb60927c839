"""What a training is known by: runs that agree in all of it give the same bytes, so one may finish the other's work.

No path is part of it, nor anything that a person may change without another result, such as how often it is saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from dataclasses import asdict, replace
from importlib.metadata import distributions
from pathlib import Path

import torch

import stages
from stages.core.cpu import arithmetic
from stages.core.lineage import Lineage, file_digest
from stages.core.params.schema import DeviceParams
from stages.kit.planning.plan import Plan

ARITHMETIC = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "NCCL_", "CUBLAS_", "PYTORCH_", "NVIDIA_TF32_", "FLASH_ATTENTION_"),
    *("ATEN_", "DNNL_", "NPY_"),
)
"""Families of environment variables by which libraries may come to choose other kernels."""


def identity_of(plan: Plan, *, attempt: int, base: Lineage, data_path: Path) -> dict[str, str]:
    """The facts, by names that people read where they differ. All that the training runs has been imported by now.

    The recipe's name is none: two that differ in nothing else are one training.

    plan: as it is used, so many rungs down the ladder as `attempt` says. data_path: the training samples.
    Raises OSError where they cannot be read.
    """
    return {
        "plan": _sha256(json.dumps(asdict(replace(plan, recipe="")), sort_keys=True).encode()),
        "attempt": str(attempt),
        "base": base.digest,
        "data": file_digest(data_path),
        "code": _code_digest(),
        "packages": _packages_digest(),
        "image": os.environ.get("BAKEOFF_IMAGE", "process"),
        "device": _device(plan.device),
        "environment": _sha256(json.dumps(_arithmetic_environment()).encode()),
    }


def _code_digest() -> str:
    """Of every file of this project that this process has imported, or was started with."""
    root = Path(stages.__file__).parent
    imported = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    files = sorted(path.relative_to(root) for path in imported if path.is_relative_to(root))
    return _sha256("\n".join(f"{path.as_posix()} {file_digest(root / path)}" for path in files).encode())


def _packages_digest() -> str:
    """Of Python and what is installed, which is what the locks name, or not."""
    installed = {f"{package.name}=={package.version}" for package in distributions()}
    return _sha256("\n".join((platform.python_version(), *sorted(installed))).encode())


def _device(device: DeviceParams) -> str:
    """Sums are added up in another order by another GPU, another maker's CPU, or another number of threads.

    Threads share out one sum of more than 32,768 numbers (ATen/native/TensorIteratorReduce.cpp), and nothing else.
    """
    if device.kind == "cuda":
        names = [torch.cuda.get_device_name(index) for index in range(device.count)]
    else:
        names = [arithmetic(os.environ), f"{torch.get_num_threads()} threads"]
    return f"{device.count} x {device.kind}: {', '.join(names)}"


def _arithmetic_environment() -> list[str]:
    return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(ARITHMETIC))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
