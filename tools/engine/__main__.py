"""vLLM as a second engine: certify that it answers as a run was evaluated, and serve the run.

    make certify RUN=r4-joint
    make serve RUN=r4-joint PORT=8000

Reads   the merged model of a run and its certificate (or a baseline's base), the prepared data
Writes  data/runs/RUN/vllm.json, the engine's certificate

It is no stage of the pipeline: nothing depends on it. vLLM runs in an environment of its own: make setup EXTRAS=vllm,
or make image TARGET=vllm.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from stages.core.logs import configure_logging
from stages.core.params.load import load_params
from stages.kit.evaluation.vllm.certify import SAMPLES
from stages.kit.evaluation.vllm.environment import Environment
from stages.kit.launcher.leases import leased_gpus
from stages.kit.memory_use import recognised_out_of_memory
from tools.engine.certify import certify, known_certificate, read_subject
from tools.engine.environment import Contained, find_environment
from tools.engine.server import listening_on, serve_model

log = logging.getLogger("stages")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where vLLM runs."""

    environment: Environment
    device: str
    """cpu, or the GPU's name."""


@contextmanager
def place(holder: str) -> Iterator[Place]:
    """vLLM's environment, and the profile's device, leased where it is a GPU. Raises UserError where one is missing."""
    kind = load_params().active.device.kind
    environment = find_environment(kind, caller=os.environ, say=say)
    with leased_gpus(
        int(kind == "cuda"),
        locks_dir=Path(".bakeoff/gpus"),
        holder=holder,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        say=say,
    ) as gpus:
        uuids = tuple(gpu.uuid for gpu in gpus)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)  # our own model is asked there too
        if isinstance(environment, Contained):
            environment = replace(environment, gpus=uuids)
        yield Place(environment=environment, device=gpus[0].name if gpus else "cpu")


def say(text: str) -> None:
    log.info("%s", text)


@click.group(help=__doc__)
def main() -> None:
    pass


samples_option = click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=SAMPLES,
    show_default=True,
    help="Validation samples that both engines answer.",
)


@main.command("certify")
@click.argument("name", metavar="RUN")
@samples_option
@recognised_out_of_memory()
def certify_run(name: str, samples: int) -> None:
    """Have vLLM and the evaluation's own code answer the same samples; refuse where they differ."""
    configure_logging(f"certify {name}")
    subject = read_subject(name, samples)
    with place(f"certify {name}") as where:
        certify(subject, where.environment)


@main.command()
@click.argument("name", metavar="RUN")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="On 127.0.0.1.")
@samples_option
@recognised_out_of_memory()
def serve(name: str, port: int, samples: int) -> None:
    """Serve a run's model by vLLM's OpenAI-compatible server on this machine alone, once it is certified."""
    configure_logging(f"serve {name}")
    subject = read_subject(name, samples)
    with listening_on(port) as listening:
        with place(f"serve {name}") as where:
            certified = known_certificate(subject, where.environment, device=where.device)
        if not certified:  # in a process of its own: what a process has had on a GPU, vLLM would lack
            command = [sys.executable, "-m", "tools.engine", "certify", name, "--samples", str(samples)]
            if code := subprocess.run(command, check=False).returncode:
                sys.exit(code)
        with place(f"serve {name}") as where:
            serve_model(subject, where.environment, listening=listening)


if __name__ == "__main__":
    main(prog_name="python -m tools.engine")
