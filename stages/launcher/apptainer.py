"""The engine apptainer: a stage is a fresh, sealed container of a SIF, started without a daemon and without root.

Apptainer filters no system calls by itself: a process could make a user namespace, in which it has every capability,
or read the kernel's keyrings, which no namespace hides. seccomp.json forbids what docker's profile forbids of these:
`clone` and `unshare` with CLONE_NEWUSER (0x10000000), keyrings, bpf and the like. The flags of `clone3` cannot be seen
by a filter; traced without a tracer it fails with ENOSYS, upon which the C library uses `clone`. `ptrace` is forbidden
so that there is no tracer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from stages.core.environment import TMP_DIR
from stages.core.errors import UserError
from stages.core.signals import ENDING
from stages.launcher.container import Mount, NoImage, NotUsable, SealedEngine, StageFolder, first_process, run_client
from stages.launcher.images import image_reference
from stages.launcher.pipeline import Request
from stages.launcher.process import MACHINE_COUNTERS, as_out_of_memory, oom_kills

IMAGES_DIR = Path(".bakeoff/images")
# No namespace, folder or variable of the host; nothing that a cluster's apptainer.conf adds; no evaluation of variables
# by a shell; and no privileges for root, who would keep them.
SEAL = ("--containall", "--cleanenv", "--no-home", "--no-mount", "bind-paths,hostfs,sys", "--no-eval", "--no-privs")
SECCOMP = ("--security", "seccomp:stages/launcher/seccomp.json")
"""Relative to the checkout, where the launcher runs: a comma in a path would end the option."""
KERNEL_SETTINGS = (
    *(f"/proc/{name}" for name in ("acpi", "bus", "fs", "irq", "mtrr", "scsi", "sys", "sysrq-trigger")),
    *("/sys/bus", "/sys/class", "/sys/devices", "/sys/fs/cgroup"),
)
"""Mounted read-only if they exist: root may write there without a capability, and change the machine around the
container. From /sys, the parts that torch and NCCL read of the hardware, and the memory limit of a Slurm job."""
HOSTS_PATH = Path("/etc/hosts")
"""An image has none, or an empty one."""
CALLERS_SETTINGS = ("APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "APPTAINER_CONFIGDIR")
"""Folders of Apptainer's own files; all its other variables are options, and could undo the seal."""


@dataclass(frozen=True, kw_only=True)
class ApptainerEngine(SealedEngine):
    """Its image has the name that the same image has in docker and podman, and the digest of the SIF. If the client is
    killed, so is the stage."""

    sif_path: Path

    @classmethod
    def find(cls, name: str, workspace_dir: Path, target: str) -> ApptainerEngine:
        """The engine, with the SIF of this checkout. Raises NotUsable if one of them is missing."""
        if not shutil.which("apptainer"):
            raise NotUsable("apptainer is not installed")
        reference = image_reference(workspace_dir, target)
        # In the checkout, or beside the .venv that docker/run found for a clone or a git worktree.
        folders = dict.fromkeys(folder / IMAGES_DIR for folder in (workspace_dir, Path(sys.prefix).parent))
        paths = [sif_path(folder, reference) for folder in folders]
        if path := next((path for path in paths if path.is_file()), None):
            return cls(name=name, sif_path=path, image=(reference, recorded_digest(path)))
        raise NoImage(f"apptainer has no image {paths[0]}; build it with: make image ENGINE=apptainer TARGET={target}")

    def run_container(self, request: Request, mounts: list[Mount], folder: StageFolder) -> int:
        passed, given = self.variables(request, terminal=sys.stderr.isatty() and sys.stdout.isatty())
        given["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in request.gpus)
        # Processes on several nodes have to reach each other.
        network, hosts_path = request.network or request.num_nodes > 1, HOSTS_PATH
        if not network:
            hosts_path = folder.scratch_dir / "hosts"
            hosts_path.write_text("127.0.0.1 localhost\n", encoding="utf-8")
        # Read-only. Else the folders of a workspace below /tmp would be made in the writable /tmp of the container.
        empty_dir = folder.scratch_dir / "workspace"
        empty_dir.mkdir()
        workspace = Mount(empty_dir, request.workspace_dir)
        all_mounts = (*kernel_settings(), workspace, *mounts, Mount(hosts_path, HOSTS_PATH))
        command = [
            *("apptainer", "--silent", "exec", *SEAL, *SECCOMP),
            *(() if network else ("--net", "--network", "none")),
            # Processes that train together look each other up by this name, also without a network.
            *(("--hostname", "localhost") if request.num_nodes == 1 else ()),
            *("--workdir", str(folder.scratch_dir), "--pwd", str(request.workspace_dir)),
            *(("--nv",) if request.gpus else ()),
            *(option for mount in all_mounts for option in ("--mount", mount.option())),
            # Apptainer sets another HOME.
            *(str(self.sif_path), "env", f"HOME={TMP_DIR}", *first_process(request)),
        ]
        killed_before = oom_kills(MACHINE_COUNTERS)

        def send(number: int, client: subprocess.Popen[bytes]) -> bool:
            client.send_signal(number)
            return True

        def failed(code: int) -> int:
            # Its own failures have codes that a stage may have too: 255, or 1 without user namespaces.
            if folder.ready_path.stat().st_size == 0 and code - 128 not in ENDING:
                raise UserError(
                    "apptainer could not start the container, for the reason above. It needs user namespaces, or an "
                    f"installation with setuid, and a whole image (in {self.sif_path.parent}: sha256sum --check "
                    f"{digest_path(self.sif_path).name}). Without a container: BAKEOFF_ENGINE=process"
                )
            # It has no cgroup of its own with counters.
            return as_out_of_memory(code, killed_before)

        environment = client_environment(passed, given, os.environ)
        return run_client(command, folder.ready_path, environment=environment, send=send, failed=failed)


def sif_path(folder: Path, reference: str) -> Path:
    """`cpu-3f9c0d12ab34.sif` for `bakeoff:cpu-3f9c0d12ab34`."""
    return folder / f"{reference.rpartition(':')[2]}.sif"


def digest_path(sif: Path) -> Path:
    """A file as sha256sum writes it: hashing gigabytes would take longer than some stages."""
    return sif.with_name(f"{sif.name}.sha256")


def recorded_digest(sif: Path) -> str:
    """Raises NoImage if there is no file with the digest."""
    path = digest_path(sif)
    if not path.is_file():
        raise NoImage(
            f"{path} is missing; copy it with the image, or: cd '{path.parent}' && sha256sum {sif.name} > {path.name}"
        )
    return f"sha256:{path.read_text(encoding='utf-8').split()[0]}"


def kernel_settings() -> list[Mount]:
    """Includes file systems mounted inside them, such as binfmt_misc in /proc/sys, which would stay writable."""
    settings = {path for path in map(Path, KERNEL_SETTINGS) if path.exists()}
    mounted = {Path(partition.mountpoint) for partition in psutil.disk_partitions(all=True)}
    settings |= {path for path in mounted if not settings.isdisjoint(path.parents)}
    return [Mount(path, path) for path in sorted(settings)]


def client_environment(passed: list[str], given: Mapping[str, str], caller: Mapping[str, str]) -> dict[str, str]:
    """The environment of Apptainer's client. It holds the container's variables: no other account can read them there.

    passed: names of the caller's variables that the container gets; given: further variables.
    """
    own = {
        name: value
        for name, value in caller.items()
        if name in CALLERS_SETTINGS or not name.startswith(("APPTAINER", "SINGULARITY"))
    }
    inside = {name: caller[name] for name in passed if name in caller} | dict(given)
    return own | {f"APPTAINERENV_{name}": value for name, value in inside.items() if name != "HOME"}
