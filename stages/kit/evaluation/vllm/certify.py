"""Has vLLM answer a model's questions, and certifies that our own model answers them alike."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from types import ModuleType
from typing import Any

import torch
from transformers import GenerationConfig

from stages.core.errors import OutOfMemory, UserError, counted
from stages.core.params.schema import ProfileParams
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answer import Answerer, decoded, end_tokens, room_for_questions
from stages.kit.evaluation.vllm.certificate import TOLERANCE, Certificate, compared, mean_deviation, require_alike
from stages.kit.evaluation.vllm.environment import Environment, installed
from stages.kit.evaluation.vllm.questions import (
    ANSWERS,
    PROGRESS,
    Answer,
    Answers,
    read_answers,
    request_digest,
    view,
    write_request,
)
from stages.kit.memory_use import says_out_of_memory
from stages.kit.models.folders import require_weights
from stages.kit.models.load import load_config
from stages.kit.models.prompts import Processor, load_processor, tokenizer_of

log = logging.getLogger("stages")

SAMPLES = 32
"""Answered by both engines, unless somebody wants others."""
AT_ONCE = 256
"""Answers at once after no attempt ran out of memory: vLLM's own default on most GPUs."""
PIXELS_AT_ONCE = 500_000_000
"""Pixels of the pictures that the worker holds, likewise; three bytes each."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and questions of its task."""

    name: str
    model_dir: Path
    """Absolute."""
    digest: str
    profile: ProfileParams
    samples: ModuleType
    answer_format: str | None
    questions: list[Conversation]
    num_certified: int
    """How many of the questions, the first ones, our own model answers too."""
    processor: Processor
    ends: set[int]
    attempt: int
    """How often memory ran out before."""

    @property
    def room(self) -> int | None:
        """Tokens that a question may have."""
        settings = self.profile.evaluation
        return room_for_questions(settings.max_length, settings.max_new_tokens)

    def options(self) -> dict[str, Any]:
        """vLLM's, by the names of its EngineArgs: those of the certificate and of the server alike."""
        on_cpu = self.profile.device.kind == "cpu"
        options: dict[str, Any] = {
            "model": str(self.model_dir),
            "served_model_name": self.name,
            "dtype": DTYPES[self.profile.memory.precision],
            "max_model_len": -1,  # what there is room for
            "seed": 0,
            "enforce_eager": on_cpu,  # nothing is compiled
            "generation_config": "vllm",  # nothing of the checkpoint's but its end tokens
            "override_generation_config": {"temperature": 0.0},
        }
        if self.attempt:
            options["max_num_seqs"] = max(1, AT_ONCE >> self.attempt)
        if on_cpu:
            options["distributed_executor_backend"] = "uni"
        if num_pictures := max(len(question.images) for question in self.questions):
            options["limit_mm_per_prompt"] = {"image": num_pictures, "video": 0}
            options["mm_processor_kwargs"] = {"use_fast": False}  # resized by Pillow, as everywhere here
            if limits := self.profile.images:
                size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
                options["mm_processor_kwargs"]["size"] = size
        return options


def subject_of(
    name: str,
    model_dir: Path,
    digest: str,
    profile: ProfileParams,
    samples: ModuleType,
    questions: list[Conversation],
    *,
    answer_format: str | None,
    num_certified: int = SAMPLES,
    attempt: int = 0,
) -> Subject:
    """digest: of the model. samples: of its task, which it is to answer in the form `answer_format`.

    Raises UserError for a model without weights, or one that is not the task's.
    """
    require_weights(model_dir)
    config = load_config(model_dir)
    samples.check(config.model_type, answer_format)
    processor, generation = load_processor(model_dir, profile.images), GenerationConfig.from_model_config(config)
    if (model_dir / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return Subject(
        name=name,
        model_dir=model_dir.absolute(),
        digest=digest,
        profile=profile,
        samples=samples,
        answer_format=answer_format,
        questions=questions,
        num_certified=num_certified,
        processor=processor,
        ends=end_tokens(generation, tokenizer_of(processor)),
        attempt=attempt,
    )


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A model's questions and vLLM's answers, not certified."""

    subject: Subject
    answers: Answers
    environment: str
    """Digest of vLLM's environment."""
    request: str
    """Digest of what is to be certified of the request."""


@contextmanager
def asked(subject: Subject, parent: Path | None = None) -> Iterator[tuple[Path, str]]:
    """A folder with what the worker is asked, and the digest of what is to be certified of it."""
    with tempfile.TemporaryDirectory(prefix=".vllm-", dir=parent) as folder_name:
        folder = Path(folder_name).absolute()
        write_request(
            folder,
            subject.processor,
            subject.questions,
            engine=subject.options(),
            max_new_tokens=subject.profile.evaluation.max_new_tokens,
            end_tokens=subject.ends,
            room=subject.room,
            pixels_at_once=PIXELS_AT_ONCE >> subject.attempt,
        )
        yield folder, request_digest(folder, subject.num_certified)


def answered(subject: Subject, environment: Environment, folder: Path, request: str) -> Answered:
    """vLLM's answers to what it is asked there; it has ended.

    request: its digest. Raises UserError, with the end of what it said, where vLLM fails.
    """
    log_path = folder / "log"
    log.info("vLLM answers %d questions", len(subject.questions))
    with (
        log_path.open("wb") as output,
        environment.worker("answer", str(folder), model_dir=subject.model_dir, folder=folder, output=output) as child,
    ):
        said_so_far = ""
        while (code := child.poll()) is None:
            with suppress(FileNotFoundError):
                if (so_far := (folder / PROGRESS).read_text()) != said_so_far:
                    log.info("answered %s/%d", so_far, len(subject.questions))
                    said_so_far = so_far
            time.sleep(0.2)
    if code or not (folder / ANSWERS).is_file():
        said = log_path.read_text(encoding="utf-8", errors="replace")
        sys.stderr.write(said)
        raise worker_failed(code, said)
    answers = read_answers(folder)
    log.info("vLLM %s took %.1f s", answers.version, answers.seconds)
    return Answered(subject=subject, answers=answers, environment=environment.digest, request=request)


def ask_vllm(subject: Subject, parent: Path) -> Answered:
    """The answers of the vLLM that is installed where this process runs, asked by files in a folder of its own."""
    environment = installed(subject.profile.device.kind)
    for left in parent.glob(".vllm-*"):  # by an evaluation that was killed
        shutil.rmtree(left)
    with asked(subject, parent) as (folder, request):
        return answered(subject, environment, folder, request)


def worker_failed(code: int, said: str) -> UserError:
    """For a worker that ended with this code, after it said this."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = [line for line in said.splitlines() if line.strip()]
    # The kernel kills what takes more memory than there is.
    ran_out = code == -SIGKILL or says_out_of_memory("\n".join(lines[-50:]))
    kind = OutOfMemory if ran_out else UserError
    return kind(f"vLLM ended with {how}; all that it said is above, and ends in:\n" + "\n".join(lines[-5:]))


def certified(theirs: Answered, answerer: Answerer) -> tuple[Certificate, list[str]]:
    """The certificate of vLLM's answers, and the text of each.

    Raises UserError where they are unlike our own model's, or where it ended one that is no answer yet.
    """
    subject = theirs.subject
    max_new_tokens = subject.profile.evaluation.max_new_tokens
    tolerance = TOLERANCE[subject.profile.memory.precision]
    complete, num_cut = [], 0
    for question, answer in zip(subject.questions, theirs.answers.answers, strict=True):
        whole = _complete(answer, answerer, subject.ends)
        complete.append(whole)
        if len(whole[0].tokens) == len(answer.tokens) and answer.tokens[-1] not in subject.ends:
            num_cut += 1
            if len(answer.tokens) < max_new_tokens:
                raise UserError(
                    f"vLLM ended the answer to {question.sample_id} after {counted(len(answer.tokens), 'token')}: "
                    f"it has no room for more beside the question. Set max_length or a smaller max_new_tokens in the "
                    f"profile's evaluation, or take a GPU with more memory"
                )
    if num_cut:
        log.warning("%s cut at max_new_tokens %d", counted(num_cut, "answer"), max_new_tokens)
    questions = subject.questions[: subject.num_certified]
    results = []
    for question, (answer, their_text), text in zip(questions, complete, answerer.answers(questions), strict=False):
        seen = view(answerer.model, answerer.processor, question, answer.tokens, room=subject.room)
        results.append(compared(question.sample_id, answer, seen, same_answer=their_text == text, tolerance=tolerance))
    engine = f"vLLM {theirs.answers.version}"
    require_alike(subject.name, engine, results, tolerance=tolerance)
    device = answerer.model.device
    certificate = Certificate(
        run=subject.name,
        engine=engine,
        model=subject.digest,
        environment=theirs.environment,
        request=theirs.request,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        precision=subject.profile.memory.precision,
        tolerance=tolerance,
        samples=len(results),
        tokens=sum(len(result.deviations) for result in results),
        log_prob_deviation=max(result.deviation for result in results),
        mean_deviation=mean_deviation(results),
        ties=sum(result.ties for result in results),
        same_answers=sum(result.same_answer for result in results),
    )
    log.info("%s answers as %s does in transformers: %s", engine, subject.name, certificate)
    return certificate, [text for _, text in complete]


def _complete(answer: Answer, answerer: Answerer, ends: set[int]) -> tuple[Answer, str]:
    """The answer up to where our own model would end it, and its text."""
    tokenizer, complete = tokenizer_of(answerer.processor), answerer.complete
    length = len(answer.tokens)
    if complete is not None:
        lengths = range(1, len(answer.tokens))
        length = next((n for n in lengths if complete(decoded(tokenizer, answer.tokens[:n], ends))), length)
    cut = Answer(prompt=answer.prompt, tokens=answer.tokens[:length], log_probs=answer.log_probs[:length])
    return cut, decoded(tokenizer, cut.tokens, ends)
