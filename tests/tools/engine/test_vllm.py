"""vLLM itself, in .bakeoff/vllm: it answers as our own models, or is refused. Run by make test-vllm.

On a CPU by a community's build. What vLLM does with theta 1000 in a vision tower is its own doing: it takes 10,000
whatever the model's config.json says.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from stages.kit.evaluation.vllm.certificate import CERTIFICATE_FILE, Certificate, read_certificate
from stages.kit.evaluation.vllm.environment import installed
from tests import ROOT
from tests.test_stages import done, refused, write_params
from tools.engine import __main__ as engine
from tools.engine.certify import known_certificate, read_subject
from tools.engine.server import chat_messages

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SAMPLES = 32
RUN = "r1-llm-only"


def base_with_theta(folder: Path, theta: float) -> Path:
    """The tiny Qwen2-VL; theta: of its vision tower."""
    shutil.copytree(ROOT / "data/tiny/qwen2-vl", folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["rope_parameters"]["rope_theta"] = theta
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A trained run of pictures, a baseline of texts, and one of pictures that vLLM does not understand."""
    folder = tmp_path_factory.mktemp("workspace")
    raw: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")
    tiny = raw["profiles"]["tiny"]
    tiny["bases"] = {
        "vlm": f"folder:{base_with_theta(folder / 'vlm', 10_000.0)}",
        "other": f"folder:{base_with_theta(folder / 'other', 1_000.0)}",
        "llm": f"folder:{ROOT / 'data/tiny/qwen2'}",
    }
    tiny["datasets"] = {name: tiny["datasets"][name] for name in ("nutrition-tables", "visempar")}
    for dataset in tiny["datasets"].values():
        dataset["source"] = dataset["source"].replace("folder:", f"folder:{ROOT}/")
        dataset["limit"] = {"train": 48, "val": SAMPLES}
    tiny["images"] = {"min_pixels": 3136, "max_pixels": 20000}  # others than the base has in its files
    raw["baselines"] = {
        "base-vlm": {"task": "detection", "data": "nutrition-tables", "base": "bases/vlm"},
        "base-other": {"task": "detection", "data": "nutrition-tables", "base": "bases/other"},
        "base-llm": {"task": "amr", "data": "visempar", "base": "bases/llm", "answer_format": "full"},
    }
    recipes = {RUN: raw["recipes"][RUN] | {"effective_batch": 16, "epochs": 1}}
    raw |= {"profiles": {"tiny": tiny}, "recipes": recipes, "builds": {}, "predictions": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("BAKEOFF_ENGINE", os.environ.get("BAKEOFF_ENGINE", "process"))
        write_params(raw)
        for name in tiny["bases"]:
            done("base", name)
        for name in tiny["datasets"]:
            done("prepare", name)
        for stage in ("plan", "train", "merge"):
            done(stage, RUN)
        yield folder


def certify(name: str) -> Result:
    return CliRunner().invoke(engine.main, ["certify", name])


def certificate(name: str) -> Certificate | None:
    return read_certificate(Path("data/runs") / name / "vllm.json")


@pytest.fixture(scope="module")
def certified(workspace: Path) -> Certificate:
    result = certify(RUN)
    assert result.exit_code == 0, result.output + str(result.exc_info)
    found = certificate(RUN)
    assert found
    return found


def test_answers_to_pictures_are_the_same(certified: Certificate) -> None:
    assert (certified.samples, certified.same_answers, certified.ties) == (SAMPLES, SAMPLES, 0)
    assert certified.tokens > 16 * SAMPLES
    assert 0 < certified.log_prob_deviation < 1e-4


def test_answers_to_texts_are_the_same(workspace: Path) -> None:
    result = certify("base-llm")
    assert result.exit_code == 0, result.output
    found = certificate("base-llm")
    assert found
    assert (found.samples, found.same_answers) == (SAMPLES, SAMPLES)
    assert 0 < found.log_prob_deviation < 1e-4


def test_a_base_sees_pictures_in_the_profiles_size(workspace: Path) -> None:
    result = certify("base-vlm")
    assert result.exit_code == 0, result.output
    found = certificate("base-vlm")
    assert found
    assert (found.samples, found.same_answers) == (SAMPLES, SAMPLES)


def test_a_model_that_vllm_reads_otherwise_is_refused_and_its_samples_are_named(workspace: Path) -> None:
    result = certify("base-other")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert f"does not answer as base-other does in transformers, in {SAMPLES} of {SAMPLES} samples" in result.output
    first = read_subject("base-other", 1).questions[0].sample_id
    assert f"{first}: token " in result.output
    assert "log-probabilities off by" in result.output
    assert certificate("base-other") is None


@contextmanager
def evaluated_by_vllm() -> Iterator[None]:
    """The workspace's params.yaml with the other engine."""
    path = Path("params.yaml")
    before = path.read_text()
    raw = YAML(typ="safe").load(before)
    raw["profiles"]["tiny"]["evaluation"]["engine"] = "vllm"
    write_params(raw)
    try:
        yield
    finally:
        path.write_text(before)


@pytest.mark.parametrize(("name", "task"), [(RUN, "detection"), ("base-llm", "amr")])
def test_a_stage_evaluates_the_same_with_either_engine(name: str, task: str, workspace: Path) -> None:
    def evaluated() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        done("evaluate", name)
        run_dir = Path("data/runs") / name
        metrics = json.loads((run_dir / "metrics.json").read_text())
        assert metrics.pop("samples_per_second") > 0
        return metrics, pq.read_table(run_dir / "predictions.parquet").to_pylist()

    metrics, rows = evaluated()
    assert len(rows) == SAMPLES
    with evaluated_by_vllm():
        other_metrics, other_rows = evaluated()
    card = Path("data/report") / task / "runs" / name
    found = read_certificate(card / CERTIFICATE_FILE)
    assert found
    assert (found.samples, found.same_answers) == (SAMPLES, SAMPLES)
    assert other_metrics == metrics | {"engine": found.engine}
    assert other_rows == rows
    assert not list(Path("data/runs").glob("*/.vllm-*"))
    own = Path("data/runs", name, CERTIFICATE_FILE)
    kept = own.rename("kept.json") if own.exists() else None
    try:
        subject, environment = read_subject(name, SAMPLES), installed("cpu")
        assert known_certificate(subject, environment, device="cpu") == found, "as `make serve` asks for it"
    finally:
        if kept:
            kept.rename(own)


def test_a_stage_refuses_answers_unlike_its_own_models(workspace: Path) -> None:
    with evaluated_by_vllm():
        message = refused("evaluate", "base-other")
    first = read_subject("base-other", 1).questions[0].sample_id
    assert f"does not answer as base-other does in transformers, in {SAMPLES} of {SAMPLES} samples" in message
    assert f"{first}: token " in message
    assert not Path("data/runs/base-other/metrics.json").exists()


@contextmanager
def serving(name: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command, as a person would type it, and the port that it serves at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tools.engine", "serve", name, "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with Path("said").open("w") as said, subprocess.Popen(command, stderr=said, env=environment, text=True) as process:
        try:
            while process.poll() is None and f"serving {name} at" not in Path("said").read_text():
                time.sleep(0.2)
            yield process, port
        finally:
            process.kill()


def ask(port: int, body: object) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())


def test_the_server_answers_what_was_certified_and_ends_with_ctrl_c(certified: Certificate) -> None:
    subject = read_subject(RUN, 2)
    done("evaluate", RUN)
    rows = pq.read_table(f"data/runs/{RUN}/predictions.parquet").to_pylist()
    answers = {row["image_id"]: row["text"] for row in rows}
    with serving(RUN) as (process, port):
        said = Path("said").read_text()
        assert process.poll() is None, said
        assert "certified already: 32 of 32 answers" in said
        for question in subject.questions:
            body = {"messages": chat_messages(question, subject), "skip_special_tokens": False, "max_tokens": 256}
            answer = ask(port, body)["choices"][0]["message"]["content"]
            assert answer.removesuffix("<|im_end|>") == answers[question.sample_id]
        web = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
        disk = {"type": "image_url", "image_url": {"url": f"file://{ROOT}/docs/report.png"}}
        for elsewhere, reason in ((web, "allowed domain"), (disk, "--allowed-local-media-path")):
            with pytest.raises(HTTPError) as refused:
                ask(port, {"messages": [{"role": "user", "content": [elsewhere]}]})
            assert reason in refused.value.read().decode()
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_a_server_that_dies_ends_the_command_with_a_message(certified: Certificate) -> None:
    with serving(RUN) as (process, _):
        assert process.poll() is None, Path("said").read_text()
        for child in psutil.Process(process.pid).children(recursive=True):
            if "EngineCore" in child.name():
                child.kill()
        assert process.wait() == 1
    assert "Error: vLLM ended with" in Path("said").read_text()
