"""Open a page that asks a trained model and its base what you give it: a photograph, a sentence, a question.

Reads   the model that `evaluate` scores and its certificate, the base that it goes back to, the prepared data
Writes  nothing; what is asked lies in a temporary folder until the end
Run     make try RUN=r4-joint

Answers are those of `predict` and `evaluate`: the same models, questions and settings, one question at a time. The page
is for this machine alone and loads nothing from elsewhere. Needs gradio (make setup EXTRAS=try).
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import webbrowser
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import click

from stages.core.environment import pinned_instructions
from stages.core.errors import OutOfMemory, UserError, configure_logging
from stages.core.lineage import short
from stages.core.params import load_params
from stages.kit.memory_use import recognised_out_of_memory
from stages.kit.models.certificate import base_model, certified_model
from stages.kit.planning.plan import read_plan
from stages.tasks import load_task
from tools.try_it import forms
from tools.try_it.asking import Form, LoadedModel, Subject


@click.command(help=__doc__)
@click.argument("run")
@click.option("--alone", is_flag=True, help="Without the base, which takes as much memory again.")
@click.option("--port", type=click.IntRange(min=1, max=65535), help="Of the page.  [default: one from 7860 on]")
def main(run: str, alone: bool, port: int | None) -> None:
    configure_logging(f"try {run}")
    require_gradio()
    if port is not None:
        require_free(port)
    os.environ |= pinned_instructions(os.environ)  # those of stages; torch reads them when it is imported
    params = load_params()
    trained = run in params.recipes
    subject = Subject(
        params=params,
        run=run,
        answer_format=read_plan(run).answer_format if trained else params.subject(run).answer_format,
    )
    form = form_of(subject)
    try:
        with recognised_out_of_memory():
            models = load_models(subject, with_base=trained and not alone)
    except OutOfMemory as error:  # no launcher is there to start it again
        raise UserError(f"{error.message}; without the base: make try RUN={run} ALONE=1") from error
    with tempfile.TemporaryDirectory() as scratch:
        # Gradio reads them when it is imported: no telemetry, and uploads nowhere else.
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": scratch}
        from tools.try_it.page import make_page, serve

        url = serve(make_page(f"{run}, {params.subject(run).task}", form, models), port)
        opened = webbrowser.open(url)
        click.echo(f"{'opened' if opened else 'no browser here; open this in one:'} {url} (Ctrl-C ends it)")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def require_gradio() -> None:
    """Raises UserError where it is not installed."""
    try:
        version("gradio")
    except PackageNotFoundError:
        raise UserError("gradio is not installed; install it with: make setup EXTRAS=try") from None


def require_free(port: int) -> None:
    """Raises UserError where something else listens on the port: now, not once the models are loaded."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a page that has just ended does not count
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"port {port} cannot be had: {error.strerror}; choose another one: PORT=7900") from None


def form_of(subject: Subject) -> Form:
    """The task's form, of the module below `forms` that is called like it. Raises UserError where there is none."""
    name = f"{forms.__name__}.{subject.params.subject(subject.run).task}"
    try:
        form: Form = import_module(name).Form(subject)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(f"{subject.run} cannot be tried on a page: there is no {name.replace('.', '/')}.py") from None
    return form


def load_models(subject: Subject, *, with_base: bool) -> list[LoadedModel]:
    """The base that a recipe goes back to, if asked for, and the run's model, each ready to answer one at a time.

    Raises UserError where a model's files are not as recorded.
    """
    from stages.kit.evaluation.answer import load_answerer

    params, run = subject.params, subject.run
    folders = {run: certified_model(params, run)}
    if with_base:
        folders = {params.root(run): base_model(params.root(run)), **folders}
    samples = load_task(params.subject(run).task, "samples")
    profile = replace(params.active, evaluation=replace(params.active.evaluation, batch_size=1))
    return [
        LoadedModel(
            name=f"{name} ({short(lineage.digest)})",
            answerer=load_answerer(folder, profile, samples, [], answer_format=subject.answer_format, attempt=0),
        )
        for name, (folder, lineage) in folders.items()
    ]


if __name__ == "__main__":
    main()
