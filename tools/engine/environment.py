"""vLLM's worker in a container that the host starts: certified and served without a network."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stages.core.dvc_cache import cache_dir
from stages.core.environment import container_environment
from stages.core.errors import UserError
from stages.kit.evaluation.vllm.environment import (
    IN_IMAGE,
    IN_IMAGES,
    TARGETS,
    WORKER,
    WORKSPACE_DIR,
    Installed,
    installed,
    running,
    settings,
)
from stages.kit.launcher.docker import HARDENING, ContainerEngine
from stages.kit.launcher.engines import DEFAULT_ENGINE, choose_engine
from stages.kit.launcher.mounts import Mount, links_into_cache


@dataclass(frozen=True, kw_only=True)
class Contained:
    """The environment in an image of docker or podman."""

    engine: ContainerEngine
    settings: Mapping[str, str]
    gpus: tuple[str, ...] = ()
    """UUIDs of those that are leased to it."""

    @property
    def digest(self) -> str:
        return self.engine.image_id

    @contextmanager
    def worker(
        self, *arguments: str, model_dir: Path, folder: Path, output: IO[bytes] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A container that sees the model, with what DVC linked into it, and the folder."""
        name = f"bakeoff-vllm-{secrets.token_hex(4)}"
        linked = links_into_cache([model_dir], cache_dir(Path.cwd()))
        mounts = [Mount(model_dir, model_dir), *linked, Mount(folder, folder, writable=True), Mount(WORKER, WORKER)]
        passed, given = container_environment("vllm", os.environ, network=False, terminal=False)
        environment = [*passed, *(f"{key}={value}" for key, value in (given | dict(self.settings)).items())]
        command = [
            *(self.engine.client.program, "run", "--rm", "--name", name, "--pull", "never", "--log-driver", "none"),
            *("--network", "none", "--hostname", "localhost", *HARDENING),
            *self.engine.account_and_gpus(self.gpus),
            *(option for variable in environment for option in ("--env", variable)),
            *(option for mount in mounts for option in ("--mount", mount.option())),
            *(self.engine.image_id, str(IN_IMAGE / "bin/python"), str(WORKER), *arguments),
        ]
        try:
            with running(command, dict(os.environ), output) as child:
                yield child
        finally:
            self.engine.client.ask("rm", "--force", name)


def find_environment(kind: str, *, caller: Mapping[str, str], say: Callable[[str], None]) -> Contained | Installed:
    """vLLM for a device, cpu or cuda: where a stage that answers by it would run.

    Raises UserError where it is not installed, and for Apptainer.
    """
    name = caller.get("BAKEOFF_ENGINE") or DEFAULT_ENGINE
    engine = choose_engine(name, workspace_dir=WORKSPACE_DIR, target=TARGETS[kind], say=say)
    if isinstance(engine, ContainerEngine):
        return Contained(engine=engine, settings=settings(kind) | IN_IMAGES)
    if engine.image is not None:
        raise UserError(
            f"{engine.name} evaluates by vLLM, and does not serve; name another engine: BAKEOFF_ENGINE=process, "
            "after make setup EXTRAS=vllm"
        )
    return installed(kind)
