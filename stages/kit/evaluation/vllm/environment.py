"""vLLM's own packages, beside .venv or in the image of a stage, and its worker as a process of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import IO, Protocol

from stages.core.environment import stage_environment
from stages.core.errors import UserError
from stages.core.lineage import file_digest
from stages.core.parent_death import end_with_parent

WORKER = Path(__file__).with_name("worker.py")
WORKSPACE_DIR = Path(__file__).resolve().parents[4]
IN_IMAGE = Path("/bakeoff-vllm")
"""The environment in the images vllm and vllm-cpu (docker/install)."""
TARGETS = {"cuda": "vllm", "cpu": "vllm-cpu"}
"""By device: the lock, and the image."""
ENDING_S = 30.0
"""How long a process has from being asked to end until it is killed."""
IN_IMAGES = {"PYTHONPYCACHEPREFIX": f"{IN_IMAGE}/pycache"}
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled when it is first asked, by nvcc, also where answers are greedy
    "PYTHONSAFEPATH": "1",
}
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise half of the machine's memory
    "TORCHDYNAMO_DISABLE": "1",  # enforce_eager leaves some functions to torch.compile, which wants a C++ compiler
}


class Environment(Protocol):
    """Where vLLM's worker can be run."""

    @property
    def digest(self) -> str:
        """Of what is installed: the image's, or the lock's."""
        ...

    def worker(
        self, *arguments: str, model_dir: Path, folder: Path, output: IO[bytes] | None = None
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """The worker, running with these arguments; it has ended when the block ends.

        It reads model_dir and writes to folder, both absolute. output: None for this process's own.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment that is on the path of this process: .bakeoff/vllm, or that of the image it runs in."""

    digest: str
    python: Path
    settings: Mapping[str, str]

    def worker(
        self, *arguments: str, model_dir: Path, folder: Path, output: IO[bytes] | None = None
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        environment = stage_environment("vllm", os.environ, network=False, terminal=False) | dict(self.settings)
        return running([str(self.python), str(WORKER), *arguments], environment, output)


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all that it starts, which have ended when the block ends."""
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,  # a Ctrl-C reaches it once, from here
        preexec_fn=end_with_parent(),
    )
    try:
        yield child
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(ENDING_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, SIGKILL)
        child.wait()


def environment_dir() -> Path:
    """In an image, or beside .venv, which a clone or a git worktree may share with the checkout."""
    return IN_IMAGE if "BAKEOFF_IMAGE" in os.environ else Path(sys.prefix).parent / ".bakeoff/vllm"


def settings(kind: str) -> dict[str, str]:
    """Variables that the worker gets on a device, cpu or cuda, beside those of a stage."""
    return SETTINGS | (ON_CPU if kind == "cpu" else {})


def installed(kind: str) -> Installed:
    """vLLM for a device, cpu or cuda, where this process runs. Raises UserError where it is not installed."""
    folder, given = environment_dir(), settings(kind)
    python = folder / "bin/python"
    if image := os.environ.get("BAKEOFF_IMAGE"):
        if kept := os.environ.get("TRITON_CACHE_DIR"):  # an image has no other folder that outlives a stage
            given["VLLM_CACHE_ROOT"] = f"{kept}/vllm"
        return Installed(digest=image, python=python, settings=given | IN_IMAGES)
    lock = Path("docker") / f"{TARGETS[kind]}.lock"
    copy, fix = folder / ".bakeoff" / lock.name, "make it with: make setup EXTRAS=vllm"
    if not python.exists() or not copy.is_file():
        raise UserError(f"vLLM is not installed in {folder}; {fix}")
    if file_digest(copy) != file_digest(WORKSPACE_DIR / lock):
        raise UserError(f"{folder} holds other packages than {lock}; {fix}")
    given["VLLM_CACHE_ROOT"] = str(folder / "cache")
    return Installed(digest=file_digest(copy), python=python, settings=given)
