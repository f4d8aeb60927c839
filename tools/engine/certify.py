"""Certifies that vLLM answers as a run's own model does."""

from __future__ import annotations

import logging
from pathlib import Path

from stages.core.params.load import load_params
from stages.core.publish import publish_json
from stages.kit.evaluation.answer import load_answerer
from stages.kit.evaluation.vllm.certificate import CERTIFICATE_FILE, Certificate, read_certificate
from stages.kit.evaluation.vllm.certify import Subject, answered, asked, certified, subject_of
from stages.kit.evaluation.vllm.environment import Environment
from stages.kit.models.certificate import certified_model
from stages.kit.planning.plan import read_plan
from stages.kit.reporting.cards import cards_dir
from stages.tasks import load_task

log = logging.getLogger("stages")


def read_subject(name: str, num_samples: int) -> Subject:
    """A run or a baseline, and its first validation samples.

    Raises UserError where its merged model is missing, changed, not certified or without weights.
    """
    params = load_params()
    subject, profile = params.subject(name), params.active
    model_dir, lineage = certified_model(params, name)
    answer_format = read_plan(name).answer_format if name in params.recipes else subject.answer_format
    samples = load_task(subject.task, "samples")
    records = samples.read_split(Path("data/prepared") / subject.data, params.scored)[:num_samples]
    questions = [samples.conversation(record, answered=False, answer_format=answer_format) for record in records]
    return subject_of(
        name,
        model_dir,
        lineage.digest,
        profile,
        samples,
        questions,
        answer_format=answer_format,
        num_certified=num_samples,
    )


def certificates(subject: Subject) -> list[Path]:
    """Where it may have one: made here, or by `evaluate`."""
    task = load_params().subject(subject.name).task
    return [
        Path("data/runs") / subject.name / CERTIFICATE_FILE,
        cards_dir(Path("data"), task) / subject.name / CERTIFICATE_FILE,
    ]


def known_certificate(subject: Subject, environment: Environment, *, device: str) -> Certificate | None:
    """The certificate of a model on an engine and a device, cpu or the GPU's name, if there is one of just these."""
    with asked(subject) as (_, request):
        wanted = (subject.digest, environment.digest, request, device)
    for known in filter(None, map(read_certificate, certificates(subject))):
        if (known.model, known.environment, known.request, known.device) == wanted:
            log.info("certified already: %s", known)
            return known
    return None


def certify(subject: Subject, environment: Environment) -> Certificate:
    """The certificate of a model on an engine, made and kept.

    Raises UserError where vLLM ends early, or answers unlike our own model.
    """
    with asked(subject) as (folder, request):
        theirs = answered(subject, environment, folder, request)
    answerer = load_answerer(
        subject.model_dir,
        subject.profile,
        subject.samples,
        subject.questions,
        answer_format=subject.answer_format,
        attempt=0,
    )
    certificate, _ = certified(theirs, answerer)
    publish_json(certificate, certificates(subject)[0])
    return certificate
