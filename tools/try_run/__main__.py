"""Open a page that asks a trained model and its base: about a photograph, a sentence, a question.

Reads   the model that `evaluate` scores and its certificate, the base that it was trained from, the prepared data
Writes  nothing; uploads are in a temporary folder until the end
Run     make try RUN=r4-joint

Answers are those of `predict` and `evaluate`: the same models, questions and settings, one question at a time. The page
is on loopback only and loads nothing from elsewhere. It needs gradio (make setup EXTRAS=try).
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import webbrowser
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from stages.core.environment import pinned_instructions
from stages.core.errors import OutOfMemory, UserError, configure_logging
from stages.core.lineage import short
from stages.core.params import load_params
from stages.core.tasks import load_task
from stages.kit.models.certificate import base_model, certified_model
from stages.kit.planning.memory_use import recognised_out_of_memory
from stages.kit.planning.plan import read_plan
from tools.try_run.forms import FORMS, Form, Run

if TYPE_CHECKING:
    from tools.try_run.page import LoadedModel


@click.command(help=__doc__)
@click.argument("name", metavar="RUN")
@click.option("--alone", is_flag=True, help="Without the base, which takes as much memory again.")
@click.option("--port", type=click.IntRange(min=1, max=65535), help="Of the page.  [default: one from 7860 on]")
def main(name: str, alone: bool, port: int | None) -> None:
    configure_logging(f"try {name}")
    if find_spec("gradio") is None:
        raise UserError("gradio is not installed; install it with: make setup EXTRAS=try")
    os.environ |= pinned_instructions(os.environ)  # torch reads them when it is imported
    run = read_run(name)
    task = run.params.subject(name).task
    form = FORMS.get(task, Form)(run)
    with tempfile.TemporaryDirectory() as scratch:
        # Gradio reads these when it is imported: no telemetry, and uploads only here.
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": scratch}
        from tools.try_run.page import make_page, serve

        try:
            with recognised_out_of_memory():
                models = load_models(run, with_base=name in run.params.recipes and not alone)
        except OutOfMemory as error:  # there is no launcher to start it again
            raise UserError(f"{error.message}; without the base: make try RUN={name} ALONE=1") from error
        url = serve(make_page(f"{name}, {task}", form, models), port)
        opened = webbrowser.open(url)
        click.echo(f"{'opened' if opened else 'no browser here; open this in one:'} {url} (Ctrl-C ends it)")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def read_run(name: str) -> Run:
    params = load_params()
    subject = params.subject(name)
    answer_format = read_plan(name).answer_format if name in params.recipes else subject.answer_format
    return Run(params=params, name=name, answer_format=answer_format)


def load_models(run: Run, *, with_base: bool) -> list[LoadedModel]:
    """The base of a recipe, if asked for, and the run's model, each ready to answer one question at a time.

    Raises UserError if a model's files are not as recorded.
    """
    from stages.kit.evaluation.answer import load_answerer
    from tools.try_run.page import LoadedModel

    params, root = run.params, run.params.root(run.name) if with_base else None
    folders = {**({root: base_model(root)} if root else {}), run.name: certified_model(params, run.name)}
    samples = load_task(params.subject(run.name).task, "samples")
    profile = replace(params.active, evaluation=replace(params.active.evaluation, batch_size=1))
    return [
        LoadedModel(
            name=f"{name} ({short(lineage.digest)})",
            answerer=load_answerer(folder, profile, samples, [], answer_format=run.answer_format, attempt=0)[0],
        )
        for name, (folder, lineage) in folders.items()
    ]


if __name__ == "__main__":
    main()
