"""A training over several nodes: its job has a launcher on each of them, and what the first one's stage made is kept.

torchrun joins what they start; the first node is where its processes meet.
"""

from __future__ import annotations

from collections.abc import Mapping

from stages.core.params.schema import DeviceParams

PORTS = range(20000, 30000)
"""On the first node, of which a job takes one by its number. Linux gives none of them to a program that asks for any
(net.ipv4.ip_local_port_range begins at 32768)."""


def nodes_of(stage: str, device: DeviceParams) -> int:
    """On how many nodes a stage runs."""
    return device.nodes if stage == "train" else 1


def node_of(job: Mapping[str, str]) -> int:
    """Which of its job's nodes this is, from 0. job: the environment, which outside of a job names none."""
    return int(job.get("SLURM_NODEID", "0"))


def rendezvous(job: Mapping[str, str]) -> dict[str, str]:
    """What torchrun reads of who joins, as variables (torch/distributed/run.py: PET_ and an option's name)."""
    return {
        "PET_NODE_RANK": str(node_of(job)),
        "PET_MASTER_ADDR": job["SLURM_LAUNCH_NODE_IPADDR"],
        "PET_MASTER_PORT": str(PORTS[int(job["SLURM_JOB_ID"]) % len(PORTS)]),
    }
