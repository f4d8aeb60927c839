"""vLLM's own environment, in a container or beside .venv, and processes that run in it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import IO

from stages.core.environment import container_environment, stage_environment
from stages.core.errors import UserError
from stages.core.lineage import file_digest
from stages.core.parent_death import end_with_parent
from stages.kit.launcher.container import NotUsable
from stages.kit.launcher.docker import HARDENING, ContainerEngine
from stages.kit.launcher.mounts import Mount

WORKER = Path(__file__).with_name("worker.py")
WORKSPACE_DIR = Path(__file__).resolve().parents[2]
ENDING_S = 30.0
"""How long a process has from being asked to end until it is killed."""
SETTINGS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise half of the machine's memory
    "TORCHDYNAMO_DISABLE": "1",  # enforce_eager leaves some functions to torch.compile, which wants a C++ compiler
}


@dataclass(frozen=True, kw_only=True)
class Environment:
    digest: str
    """Of what is installed: the image's, or the lock's."""
    python: Path | None
    """Its interpreter, where it is a virtual environment."""
    engine: ContainerEngine | None
    settings: Mapping[str, str]
    """Variables that a process gets, beside those of a stage."""

    @contextmanager
    def process(
        self,
        arguments: Sequence[str],
        mounts: Sequence[Mount],
        *,
        gpus: tuple[str, ...],
        output: IO[bytes] | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The worker, running with these arguments; it has ended when the block ends.

        mounts: what a container sees. gpus: UUIDs of those that are leased to it. output: None for this process's own.
        """
        name = f"bakeoff-vllm-{secrets.token_hex(4)}"
        if self.engine is None:
            environment = stage_environment("vllm", os.environ, network=False, terminal=False) | dict(self.settings)
            environment |= {"VLLM_CACHE_ROOT": str(environment_dir() / "cache")}
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            command = [str(self.python), str(WORKER), *arguments]
        else:
            environment = dict(os.environ)
            command = self._container(name, arguments, mounts, gpus)
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
            if self.engine is not None:
                self.engine.client.ask("rm", "--force", name)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, SIGKILL)
            child.wait()

    def _container(
        self, name: str, arguments: Sequence[str], mounts: Sequence[Mount], gpus: tuple[str, ...]
    ) -> list[str]:
        assert self.engine is not None
        passed, given = container_environment("vllm", os.environ, network=False, terminal=False)
        environment = [*passed, *(f"{key}={value}" for key, value in (given | dict(self.settings)).items())]
        return [
            *(self.engine.client.program, "run", "--rm", "--name", name, "--pull", "never", "--log-driver", "none"),
            *("--network", "none", "--hostname", "localhost", *HARDENING),
            *self.engine.account_and_gpus(gpus),
            *(option for variable in environment for option in ("--env", variable)),
            *(option for mount in (*mounts, Mount(WORKER, WORKER)) for option in ("--mount", mount.option())),
            *(self.engine.image_id, "python", str(WORKER), *arguments),
        ]


def environment_dir() -> Path:
    """Beside .venv, which a clone or a git worktree may share with the checkout."""
    return Path(sys.prefix).parent / ".bakeoff/vllm"


def find_environment(kind: str, *, caller: Mapping[str, str], say: Callable[[str], None]) -> Environment:
    """vLLM for a device, cpu or cuda: in a container where BAKEOFF_ENGINE has one, else in .bakeoff/vllm.

    Raises UserError where it is not installed.
    """
    wanted, reasons = caller.get("BAKEOFF_ENGINE", "auto"), []
    target, settings = ("vllm", SETTINGS) if kind == "cuda" else ("vllm-cpu", SETTINGS | ON_CPU)
    for program in ("docker", "podman"):
        if wanted in (program, "auto"):
            try:
                engine = ContainerEngine.find(program, WORKSPACE_DIR, target)
            except NotUsable as reason:
                reasons.append(reason.message)
            else:
                say(f"vLLM in {engine.reference} of {engine.name}, without a network")
                return Environment(digest=engine.image_id, python=None, engine=engine, settings=settings)
    if wanted not in ("process", "auto"):
        raise UserError(
            "; ".join(reasons) or f"BAKEOFF_ENGINE is {wanted}; vLLM can be run by docker, podman or process"
        )
    folder, lock = environment_dir(), Path("docker") / f"{target}.lock"
    installed, python = folder / ".bakeoff" / lock.name, folder / "bin/python"
    fix = "make it with: make setup EXTRAS=vllm"
    if not python.exists() or not installed.is_file():
        raise UserError("; ".join((*reasons, f"vLLM is not installed in {folder}; {fix}")))
    if file_digest(installed) != file_digest(WORKSPACE_DIR / lock):
        raise UserError(f"{folder} holds other packages than {lock}; {fix}")
    say("; ".join((f"vLLM in {folder}, without a container", *reasons)))
    return Environment(digest=file_digest(installed), python=python, engine=None, settings=settings)


def worker_failed(code: int, log_path: Path) -> UserError:
    """For a worker that ended with this code."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = [line for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return UserError(f"vLLM ended with {how}; all that it said: {log_path}; the end of it:\n" + "\n".join(lines[-5:]))
