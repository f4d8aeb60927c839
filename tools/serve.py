"""Serve a run's merged model, or a baseline's base, by vLLM's OpenAI-compatible server on this machine's loopback.

Reads   data/runs/RUN/merged and its certificate; data/report/TASK/runs/RUN/vllm.json, the certificate that an
        evaluation with `evaluation.engine: vllm` leaves. Without one for these weights nothing starts
Run     make serve RUN=r4-joint PORT=8000
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import click

from stages.core.errors import UserError, configure_logging
from stages.core.params import load_params
from stages.core.params.schema import Params, TemplateOptions
from stages.core.records import rebuild
from stages.evaluation.vllm.engine import CERTIFICATE_FILE, EngineCertificate
from stages.evaluation.vllm.environment import WORKER, engine_options, installed
from stages.models.certificate import certified_model
from stages.models.prompts import OPTIONS
from stages.reporting.runs import report_runs_dir

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("name", metavar="RUN")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="On 127.0.0.1.")
def main(name: str, port: int) -> None:
    configure_logging(f"serve {name}")
    params = load_params()
    profile = params.active
    model_dir, lineage = certified_model(params, name)
    vllm = installed(profile.device.kind)
    certificate = require_certificate(params, name, model=lineage.digest, engine=f"vLLM {vllm.version()}")
    log.info("certified: %s", certificate)
    options = server_options(
        engine_options(name, model_dir, profile, images=certificate.images),
        port,
        OPTIONS | params.subject(name).template_options,
    )
    log.info("serving %s at http://127.0.0.1:%d/v1; Ctrl-C ends it", name, port)
    os.execve(vllm.python, [str(vllm.python), str(WORKER), "serve", *options], vllm.variables)


def require_certificate(params: Params, name: str, *, model: str, engine: str) -> EngineCertificate:
    """The engine's certificate for these weights on this device. Raises UserError if there is none."""
    path = report_runs_dir(Path("data"), params.subject(name).task) / name / CERTIFICATE_FILE
    stage = params.evaluation_stage(name)
    by_vllm = params.active.evaluation.engine == "vllm"
    fix = rebuild(stage) if by_vllm else f"dvc exp run -S ++profiles.{params.profile}.evaluation.engine=vllm {stage}"
    certificate = EngineCertificate.read(path, fix=fix)
    expected = {
        "model": model,
        "engine": engine,
        "device": device_name(params),
        "precision": params.active.memory.precision,
    }
    actual = {key: getattr(certificate, key) for key in expected}
    if different := [f"{key} {actual[key]}, not {value}" for key, value in expected.items() if actual[key] != value]:
        raise UserError(
            f"vLLM has no certificate for {name}: {path} is for {', '.join(different)}; evaluate it by vLLM: {fix}"
        )
    return certificate


def device_name(params: Params) -> str:
    """cpu, or the GPU's name."""
    if params.active.device.kind == "cpu":
        return "cpu"
    import torch

    return torch.cuda.get_device_name()


def server_options(engine: dict[str, Any], port: int, template_options: TemplateOptions) -> list[str]:
    """Command line of `vllm serve` from keywords of vLLM's EngineArgs."""
    options = engine | {
        "host": "127.0.0.1",
        "port": port,
        # The template gets images and texts as parts if it tells them apart; vLLM's own guess is wrong for some.
        "chat_template_content_format": "openai" if "limit_mm_per_prompt" in engine else "string",
        "default_chat_template_kwargs": template_options,
        "disable_uvicorn_access_log": True,
        # Images come with the question as data: URLs. The server fetches none.
        "allowed_media_domains": ["images-are-sent-as-data.invalid"],
        "allowed_origins": [],  # no web page that is open in a browser here may send requests
    }
    words = []
    for name, value in options.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, dict) or value == []:
            words.append(json.dumps(value))
        elif isinstance(value, list):
            words += value
        elif value is not True:
            words.append(str(value))
    return words


if __name__ == "__main__":
    main()
