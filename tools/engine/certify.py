"""Has both engines answer the same questions, and certifies that they answer alike."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import GenerationConfig

from stages.core.dvc_cache import cache_dir
from stages.core.errors import UserError
from stages.core.lineage import combined_digest, file_digests
from stages.core.params.load import load_params
from stages.core.params.schema import ProfileParams, made_by
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.answering import Answerer, load_answerer
from stages.kit.evaluation.generation import decoded, end_tokens, room_for_questions
from stages.kit.launcher.mounts import Mount, links_into_cache
from stages.kit.models.certificate import certified_model
from stages.kit.models.folders import require_weights
from stages.kit.models.load import load_config
from stages.kit.models.processors import Processor, load_processor, tokenizer_of
from stages.kit.planning.plan import read_plan
from stages.tasks import load_task
from tools.engine.certificate import (
    TOLERANCE,
    Certificate,
    compared,
    read_certificate,
    require_alike,
    write_certificate,
)
from tools.engine.environment import Environment, worker_failed
from tools.engine.questions import ANSWERS, Answer, Answers, read_answers, view, write_request

log = logging.getLogger("stages")

SAMPLES = 32
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
    target: str | None
    questions: list[Conversation]
    processor: Processor
    ends: set[int]

    @property
    def room(self) -> int | None:
        """Tokens that a question may have."""
        settings = self.profile.evaluation
        return room_for_questions(settings.max_length, settings.max_new_tokens)

    @property
    def certificate_path(self) -> Path:
        return Path("data/runs") / self.name / "vllm.json"

    def mounts(self, folder: Path) -> list[Mount]:
        """What a container of the engine sees: the model, with what DVC linked into it, and a folder to write to."""
        linked = links_into_cache([self.model_dir], cache_dir(Path.cwd()))
        return [Mount(self.model_dir, self.model_dir), *linked, Mount(folder, folder, writable=True)]

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
        if on_cpu:
            options["distributed_executor_backend"] = "uni"
        if num_pictures := max(len(question.images) for question in self.questions):
            options["limit_mm_per_prompt"] = {"image": num_pictures, "video": 0}
            options["mm_processor_kwargs"] = {"use_fast": False}  # resized by Pillow, as everywhere here
        return options


def read_subject(name: str, num_samples: int) -> Subject:
    """A run or a baseline, and its first validation samples.

    Raises UserError where its merged model is missing, changed, not certified or without weights.
    """
    params = load_params()
    subject, profile = params.subject(name), params.active
    folder, stage = Path("data") / subject.base, made_by(subject.base)
    if name in params.recipes:
        folder, stage = Path("data/runs") / name / "merged", f"merge@{name}"
    if not folder.is_dir():
        raise UserError(f"{folder} is not there; make it with: dvc repro {stage}")
    model_dir, lineage = certified_model(params, name)
    require_weights(model_dir)
    target = read_plan(name).target if name in params.recipes else subject.target
    samples = load_task(subject.task, "samples")
    samples.check(load_config(model_dir).model_type, target)
    records = samples.read_split(Path("data/prepared") / subject.data, params.scored)[:num_samples]
    processor = load_processor(model_dir, profile.images)
    return Subject(
        name=name,
        model_dir=model_dir.absolute(),
        digest=lineage.digest,
        profile=profile,
        samples=samples,
        target=target,
        questions=[samples.conversation(record, answered=False, target=target) for record in records],
        processor=processor,
        ends=end_tokens(_generation_config(model_dir), tokenizer_of(processor)),
    )


def _generation_config(model_dir: Path) -> GenerationConfig:
    if (model_dir / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return GenerationConfig.from_model_config(load_config(model_dir))


@contextmanager
def asked(subject: Subject) -> Iterator[tuple[Path, str]]:
    """A folder with what the worker is asked, and its digest."""
    with tempfile.TemporaryDirectory(prefix="bakeoff-vllm-") as folder_name:
        folder = Path(folder_name)
        write_request(
            folder,
            subject.processor,
            subject.questions,
            engine=subject.options(),
            max_new_tokens=subject.profile.evaluation.max_new_tokens,
            end_tokens=subject.ends,
            room=subject.room,
        )
        digests = file_digests(sorted(folder.iterdir()))
        yield folder, combined_digest({path.name: digest for path, digest in digests.items()})


def certified(
    subject: Subject, environment: Environment, *, device: str, gpus: tuple[str, ...], log_path: Path, again: bool
) -> Certificate:
    """The certificate of a model on an engine, made unless there is one of just this.

    device: cpu, or the GPU's name. again: make it in any case.
    Raises UserError where vLLM fails, or answers unlike our own model.
    """
    with asked(subject) as (folder, request):
        known = read_certificate(subject.certificate_path)
        wanted = (subject.digest, environment.digest, request, device)
        if known and not again and (known.model, known.environment, known.request, known.device) == wanted:
            log.info("certified already: %s", known)
            return known
        log.info("vLLM answers %d questions; what it says is in %s", len(subject.questions), log_path)
        theirs = _answers(subject, environment, folder, gpus, log_path)
    answerer = load_answerer(
        subject.model_dir, subject.profile, subject.samples, subject.questions, target=subject.target, attempt=0
    )
    ours, tolerance = answerer.answers(subject.questions), TOLERANCE[subject.profile.memory.precision]
    results, num_tokens = [], 0
    for question, answer, text in zip(subject.questions, theirs.answers, ours, strict=True):
        answer, their_text = _complete(answer, answerer, subject.ends)
        num_tokens += len(answer.tokens)
        seen = view(answerer.model, answerer.processor, question, answer.tokens, room=subject.room)
        results.append(compared(question.sample_id, answer, seen, same_answer=their_text == text, tolerance=tolerance))
    engine = f"vLLM {theirs.version}"
    require_alike(subject.name, engine, results)
    certificate = Certificate(
        run=subject.name,
        engine=engine,
        model=subject.digest,
        environment=environment.digest,
        request=request,
        device=device,
        precision=subject.profile.memory.precision,
        tolerance=tolerance,
        samples=len(results),
        tokens=num_tokens,
        log_prob_deviation=max(result.deviation for result in results),
        ties=sum(result.ties for result in results),
        same_answers=sum(result.same_answer for result in results),
    )
    write_certificate(certificate, subject.certificate_path)
    log.info("%s answers as %s was evaluated: %s", engine, subject.name, certificate)
    return certificate


def _answers(
    subject: Subject, environment: Environment, folder: Path, gpus: tuple[str, ...], log_path: Path
) -> Answers:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        log_path.open("wb") as output,
        environment.process(("answer", str(folder)), subject.mounts(folder), gpus=gpus, output=output) as child,
    ):
        code = child.wait()
    if code or not (folder / ANSWERS).is_file():
        raise worker_failed(code, log_path)
    return read_answers(folder)


def _complete(answer: Answer, answerer: Answerer, ends: set[int]) -> tuple[Answer, str]:
    """The answer up to where `evaluate` ends it, and its text."""
    tokenizer, complete = tokenizer_of(answerer.processor), answerer.complete
    length = len(answer.tokens)
    if complete is not None:
        lengths = range(1, len(answer.tokens))
        length = next((n for n in lengths if complete(decoded(tokenizer, answer.tokens[:n], ends))), length)
    cut = Answer(prompt=answer.prompt, tokens=answer.tokens[:length], log_probs=answer.log_probs[:length])
    return cut, decoded(tokenizer, cut.tokens, ends)
