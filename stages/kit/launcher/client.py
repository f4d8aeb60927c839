"""docker and podman, by their command lines, which are alike."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Client:
    """A container engine's command."""

    program: str
    """docker or podman, or a path to one of them."""

    @cached_property
    def is_podman(self) -> bool:
        """Whether it is podman, also under docker's name: the package podman-docker installs a script that calls it."""
        path = Path(shutil.which(self.program) or self.program)
        if "podman" in path.name:
            return True
        with path.open("rb") as file:
            start = file.read(4096)
        return start.startswith(b"#!") and b"podman" in start

    def ask(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run one of its commands unseen."""
        # Of its own process group: the signal that a closing terminal sends to all of the launcher's must not end the
        # very command that passes it on.
        return subprocess.run(
            [self.program, *args],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    def show(self, *args: str, **environment: str) -> bool:
        """Run one of its commands in sight of the user; whether it succeeded."""
        return subprocess.run([self.program, *args], env=os.environ | environment, check=False).returncode == 0

    def answers(self, *args: str) -> bool:
        """Whether one of its commands succeeds."""
        return self.ask(*args).returncode == 0

    def image_id(self, reference: str) -> str | None:
        """The digest of the image of that name on this machine; None where there is none, or no engine answers."""
        found = self.ask("image", "inspect", "--format", "{{.Id}}", reference)
        return found.stdout.strip() if found.returncode == 0 else None

    def problem(self) -> str | None:
        """Why the engine cannot be used, in one line; None where it answers."""
        answer = self.ask("info" if self.is_podman else "version")
        return None if answer.returncode == 0 else (answer.stderr.strip() or "no reason given").splitlines()[-1]
