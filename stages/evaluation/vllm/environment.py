"""vLLM's own packages, beside .venv or in the image of a stage, and the options that it runs with."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from stages.core.environment import stage_environment
from stages.core.errors import UserError
from stages.core.lineage import file_digest
from stages.core.params.schema import ProfileParams

WORKER = Path(__file__).with_name("worker.py")
WORKSPACE_DIR = Path(__file__).resolve().parents[3]
IN_IMAGE = Path("/bakeoff-vllm")
"""The environment in the images vllm and vllm-cpu (docker/install)."""
TARGETS = {"cuda": "vllm", "cpu": "vllm-cpu"}
"""Name of the lock and of the image, by device."""
AT_ONCE = 256
"""Sequences at once that an attempt after running out of memory starts from: vLLM's own default on most GPUs."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # nvcc would compile it at the first request, also for greedy decoding
    "PYTHONSAFEPATH": "1",
}
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise half of the machine's memory
    "TORCHDYNAMO_DISABLE": "1",  # enforce_eager leaves some functions to torch.compile, which wants a C++ compiler
}


@dataclass(frozen=True, kw_only=True)
class Installed:
    """vLLM's environment where this process runs."""

    python: Path
    variables: dict[str, str]
    """All environment variables of the worker."""

    def version(self) -> str:
        """Without the local part that names a build."""
        packages = distributions(path=[str(path) for path in self.python.parents[1].glob("lib/python*/site-packages")])
        version = next((each.version for each in packages if each.name in TARGETS.values()), "unknown")
        return version.partition("+")[0]


def environment_dir() -> Path:
    """In an image, or beside .venv, which a clone or a git worktree may share with the checkout."""
    return IN_IMAGE if "BAKEOFF_IMAGE" in os.environ else Path(sys.prefix).parent / ".bakeoff/vllm"


def installed(kind: str) -> Installed:
    """vLLM for a device, cpu or cuda. Raises UserError if it is not installed here."""
    folder = environment_dir()
    python = folder / "bin/python"
    variables = stage_environment("vllm", os.environ, network=False, terminal=False) | SETTINGS
    variables |= ON_CPU if kind == "cpu" else {}
    if "BAKEOFF_IMAGE" in os.environ:
        if kept := os.environ.get("TRITON_CACHE_DIR"):  # an image has no other folder that outlives a stage
            variables |= {"VLLM_CACHE_ROOT": f"{kept}/vllm", "FLASHINFER_WORKSPACE_BASE": kept}
        return Installed(python=python, variables=variables | {"PYTHONPYCACHEPREFIX": f"{IN_IMAGE}/pycache"})
    lock = Path("docker") / f"{TARGETS[kind]}.lock"
    copy, fix = folder / ".bakeoff" / lock.name, "make it with: make setup EXTRAS=vllm"
    if not python.exists() or not copy.is_file():
        raise UserError(f"vLLM is not installed in {folder}; {fix}")
    if file_digest(copy) != file_digest(WORKSPACE_DIR / lock):
        raise UserError(f"{folder} holds other packages than {lock}; {fix}")
    variables["VLLM_CACHE_ROOT"] = str(folder / "cache")
    return Installed(python=python, variables=variables)


def engine_options(
    name: str, model_dir: Path, profile: ProfileParams, *, images: int, attempt: int = 0
) -> dict[str, Any]:
    """Keywords of vLLM's EngineArgs, the same for evaluation and for the server.

    images: most images in a question; 0 for text. attempt: how often memory ran out before.
    """
    on_cpu = profile.device.kind == "cpu"
    options: dict[str, Any] = {
        "model": str(model_dir.absolute()),
        "served_model_name": name,
        "dtype": DTYPES[profile.memory.precision],
        "max_model_len": -1,  # as long as memory allows
        "seed": 0,
        "enforce_eager": on_cpu,  # compiles nothing
        "generation_config": "vllm",  # takes only the end tokens from the checkpoint
        "override_generation_config": {"temperature": 0.0},
    }
    if attempt:
        options["max_num_seqs"] = max(1, AT_ONCE >> attempt)
    if on_cpu:
        options["distributed_executor_backend"] = "uni"
    if images:
        options["limit_mm_per_prompt"] = {"image": images, "video": 0}
        options["mm_processor_kwargs"] = {"use_fast": False}  # Pillow resizes, as everywhere here
        if limits := profile.images:
            size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
            options["mm_processor_kwargs"]["size"] = size
    return options
