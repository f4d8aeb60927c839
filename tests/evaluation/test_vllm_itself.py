"""vLLM itself, in .bakeoff/vllm: it generates as our own models, or is refused. Run by make test-vllm.

It is a community's build for CPUs. vLLM takes theta 10,000 in a vision tower whatever the model's config.json says.
"""

import base64
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from stages.core.tasks import load_task
from stages.evaluation.vllm.engine import CERTIFICATE_FILE, EngineCertificate
from tests import ROOT
from tests.stage_runs import done, refused, write_params

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SAMPLES = 32
RUN = "r1-llm-only"


def base_with_theta(folder: Path, theta: float) -> str:
    """The tiny Qwen2-VL; theta: of its vision tower."""
    shutil.copytree(ROOT / "data/tiny/qwen2-vl", folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["rope_parameters"]["rope_theta"] = theta
    (folder / "config.json").write_text(json.dumps(config))
    return f"folder:{folder}"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A trained run on images, a baseline on texts, and one on images that vLLM reads wrongly; its params.yaml."""
    folder = tmp_path_factory.mktemp("workspace")
    raw: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["bases"] = {
        "vlm": base_with_theta(folder / "vlm", 10_000.0),
        "other": base_with_theta(folder / "other", 1_000.0),
        "llm": f"folder:{ROOT / 'data/tiny/qwen2'}",
    }
    tiny["datasets"] = {name: tiny["datasets"][name] for name in ("nutrition-tables", "visempar")}
    for name, dataset in tiny["datasets"].items():
        dataset.update(source=f"folder:{ROOT / 'data/tiny' / name}", limit={"train": 48, "val": SAMPLES})
    tiny["images"] = {"min_pixels": 3136, "max_pixels": 20000}  # not those of the base's files
    raw["baselines"] = {
        "base-other": {"task": "detection", "data": "nutrition-tables", "base": "bases/other"},
        "base-llm": {"task": "amr", "data": "visempar", "base": "bases/llm", "answer_format": "full"},
    }
    recipes = {RUN: raw["recipes"][RUN] | {"effective_batch": 16, "epochs": 1}}
    raw |= {"profiles": {"tiny": tiny}, "recipes": recipes, "builds": {}, "predictions": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_params(raw)
        for name in tiny["bases"]:
            done("base", name)
        for name in tiny["datasets"]:
            done("prepare", name)
        for stage in ("plan", "train", "merge"):
            done(stage, RUN)
        yield raw


def use_engine(raw: dict[str, Any], engine: str) -> None:
    raw["profiles"]["tiny"]["evaluation"]["engine"] = engine
    write_params(raw)


@pytest.mark.parametrize(("name", "task"), [(RUN, "detection"), ("base-llm", "amr")])
def test_both_engines_give_the_same_predictions(name: str, task: str, workspace: dict[str, Any]) -> None:
    found = {}
    for engine in ("transformers", "vllm"):
        use_engine(workspace, engine)
        done("evaluate", name)
        metrics = json.loads(Path("data/runs", name, "metrics.json").read_text())
        assert metrics.pop("samples_per_second") > 0
        metrics.pop("engine", None)
        found[engine] = (metrics, pq.read_table(f"data/runs/{name}/predictions.parquet").to_pylist())
    assert found["vllm"] == found["transformers"]
    certificate = EngineCertificate.read(Path("data/report", task, "runs", name, CERTIFICATE_FILE), fix="")
    assert (certificate.samples, certificate.same_completions) == (SAMPLES, SAMPLES)
    assert 0 < certificate.log_prob_deviation < 1e-4
    assert not list(Path("data/runs").glob("*/.vllm-*"))


def test_a_model_that_vllm_reads_wrongly_is_refused(workspace: dict[str, Any]) -> None:
    use_engine(workspace, "vllm")
    message = refused("evaluate", "base-other")
    assert f"in {SAMPLES} of {SAMPLES} samples" in message
    assert "log-probabilities off by" in message
    assert not Path("data/runs/base-other/metrics.json").exists()


def ask(port: int, image_url: str, prompt: str) -> str:
    content = [{"type": "image_url", "image_url": {"url": image_url}}, {"type": "text", "text": prompt}]
    body = {"messages": [{"role": "user", "content": content}], "skip_special_tokens": False, "max_tokens": 256}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return str(json.loads(response.read())["choices"][0]["message"]["content"])


def test_the_server_generates_as_evaluated_fetches_nothing_and_ends_with_ctrl_c(workspace: dict[str, Any]) -> None:
    use_engine(workspace, "vllm")
    done("evaluate", RUN)
    completions = {
        row["image_id"]: row["text"] for row in pq.read_table(f"data/runs/{RUN}/predictions.parquet").to_pylist()
    }
    samples = load_task("detection", "samples")
    records = samples.read_split(Path("data/prepared/nutrition-tables"), "val")[:2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tools.serve", RUN, "--port", str(port)]
    with subprocess.Popen(command, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}) as server:
        try:
            while server.poll() is None and psutil.Process(server.pid).status() != psutil.STATUS_ZOMBIE:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                    break
                except OSError:
                    time.sleep(0.5)
            for record in records:
                *_, part = samples.conversation(record, answered=False, answer_format=None).messages[0]["content"]
                url = f"data:image/png;base64,{base64.b64encode(record.image).decode()}"
                assert ask(port, url, part["text"]).removesuffix("<|im_end|>") == completions[record.image_id]
            for elsewhere in ("http://127.0.0.1:9/a.png", f"file://{ROOT}/docs/report.png"):
                with pytest.raises(HTTPError):
                    ask(port, elsewhere, "")
            started = psutil.Process(server.pid).children(recursive=True)
            server.send_signal(signal.SIGINT)
            server.wait(60)
            assert psutil.wait_procs(started, timeout=30)[1] == []
        finally:
            server.kill()
