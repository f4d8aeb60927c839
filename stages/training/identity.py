"""The identity of a training: everything that its resulting bytes depend on. Its checkpoints resume no other."""

from __future__ import annotations

import ast
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch

import stages
from stages.core.environment import ARITHMETIC_PREFIXES, arithmetic, installed_packages
from stages.core.lineage import Lineage, file_digest, json_digest
from stages.core.params.schema import DeviceParams
from stages.planning.plan import Plan


def identity_of(plan: Plan, *, attempt: int, base: Lineage, data: Mapping[str, Path]) -> dict[str, str]:
    """The facts that identify a training, by names that people read if they differ: equal facts give equal bytes.

    Neither the recipe's name nor a path is among them, nor a setting without effect on the result, such as how often a
    checkpoint is saved. Everything that the training runs must have been imported by now.

    plan: as used, `attempt` rungs down the memory ladder. data: the files of samples by name, `data` those of training.
    Raises OSError if they cannot be read.
    """
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(ARITHMETIC_PREFIXES))
    packages = [platform.python_version(), installed_packages(sys.path)]
    return {
        "plan": json_digest(asdict(replace(plan, name=""))),
        "attempt": str(attempt),
        "base": base.digest,
        **{name: file_digest(path) for name, path in data.items()},
        "code": json_digest([*_imported_code()]),
        "packages": json_digest(packages),
        "image": os.environ.get("BAKEOFF_IMAGE", "process"),
        "device": _device(plan.device),
        "environment": json_digest(variables),
    }


def _imported_code() -> Iterator[tuple[str, str]]:
    """(path, code) of each file of this project that this process has imported, or was started with."""
    root = Path(stages.__file__).parent
    imported = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    for path in sorted(path.relative_to(root) for path in imported if path.is_relative_to(root)):
        yield path.as_posix(), _without_texts((root / path).read_bytes())


@cache
def _without_texts(source: bytes) -> str:
    """A file's syntax tree, without comments, docstrings, layout and line numbers: they change no result."""

    class WithoutTexts(ast.NodeTransformer):
        def visit_Expr(self, statement: ast.Expr) -> ast.Expr | None:
            return None if isinstance(statement.value, ast.Constant) else statement

    return ast.dump(WithoutTexts().visit(ast.parse(source)))


def _device(device: DeviceParams) -> str:
    """Sums are added up in another order by another GPU, another maker's CPU, or another number of threads.

    Threads share out one sum of more than 32,768 numbers (ATen/native/TensorIteratorReduce.cpp), and nothing else.
    """
    if device.kind == "cuda":
        names = [torch.cuda.get_device_name(index) for index in range(device.count)]
        # The libraries that were loaded, whatever the packages' names say.
        names += [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
        names.append(f"NCCL {torch.cuda.nccl.version()}")
    else:
        names = [arithmetic(os.environ), f"{torch.get_num_threads()} threads"]
    return f"{device.count} x {device.kind}: {', '.join(names)}"
