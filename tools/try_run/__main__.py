"""Open a page that asks a trained model and its base, or an export and its model.

Reads   the model that `evaluate` scores and its certificate, the base that it was trained from, the prepared data
Writes  nothing; uploads are in a temporary folder until the end
Run     make try RUN=r4-joint

Completions are those of `predict` and `evaluate`: the same models, questions and settings, one question at a time. The
page is on loopback only and loads nothing from elsewhere. It needs gradio (make setup EXTRAS=try).
"""

from __future__ import annotations

import os
import tempfile
import threading
import webbrowser
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stages.core.environment import pinned_instructions
from stages.core.errors import OutOfMemory, UserError, configure_logging
from stages.core.lineage import short
from stages.core.params import load_params
from stages.core.signals import handling, interrupt
from stages.core.tasks import load_task
from stages.exporting.certificate import exported_model
from stages.models.certificate import certified_model, made_model
from stages.models.folders import read_config
from stages.planning.memory_use import recognised_out_of_memory
from tools.try_run.forms import FORMS, Form, answer_format_of

if TYPE_CHECKING:
    from stages.core.params.schema import Params
    from tools.try_run.page import LoadedModel


@click.command(help=__doc__)
@click.argument("name", metavar="RUN")
@click.option("--alone", is_flag=True, help="Without the other model, which takes as much memory again.")
@click.option("--port", type=click.IntRange(min=1, max=65535), help="Of the page.  [default: one from 7860 on]")
def main(name: str, alone: bool, port: int | None) -> None:
    configure_logging(f"try {name}")
    if find_spec("gradio") is None:
        raise UserError("gradio is not installed; install it with: make setup EXTRAS=try")
    params = load_params()
    # torch reads them when it is imported
    os.environ |= pinned_instructions(os.environ, native=params.active.memory.native)
    task = params.subject(name).task
    form = FORMS.get(task, Form)(params, name)
    with handling(interrupt), tempfile.TemporaryDirectory() as scratch:
        # Gradio reads these when it is imported: no telemetry, and uploads only here.
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": scratch}
        from tools.try_run.page import make_page, serve

        try:
            with recognised_out_of_memory():
                models = load_models(params, name, alone=alone)
        except OutOfMemory as error:  # there is no launcher to start it again
            raise UserError(f"{error.message}; without the other model: make try RUN={name} ALONE=1") from error
        url = serve(make_page(f"{name}, {task}", form, models), port)
        opened = webbrowser.open(url)
        click.echo(f"{'opened' if opened else 'no browser here; open this in one:'} {url} (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def load_models(params: Params, name: str, *, alone: bool) -> list[LoadedModel]:
    """The run's model, ready to complete one question at a time; unless it is to be alone, after a recipe's base or an
    export's merged model.

    Raises UserError if a model's files are not as recorded.
    """
    from stages.evaluation.generate import load_generator
    from stages.evaluation.llama_cpp import load_exported
    from tools.try_run.page import LoadedModel

    folders = {}
    if name in params.recipes and not alone:
        folders[params.root(name)] = made_model(params.root(name))
    if name in params.exports and not alone:
        folders[params.recipe_name(name)] = certified_model(params, params.recipe_name(name))
    folders[name] = exported_model(params, name)[:2] if name in params.exports else certified_model(params, name)
    samples = load_task(params.subject(name).task, "samples")
    profile = replace(params.active, evaluation=replace(params.active.evaluation, batch_size=1))
    options: dict[str, Any] = {"answer_format": answer_format_of(params, name), "batch_size": 1}
    models = []
    for model, (folder, lineage) in folders.items():
        is_export = model in params.exports
        load = partial(load_exported, params, model) if is_export else partial(load_generator, folder, profile)
        config = read_config(Path("data/runs") / params.recipe_name(model) / "merged" if is_export else folder)
        models.append(
            LoadedModel(
                name=f"{model} ({short(lineage.digest)})",
                generator=load(samples, **options)[0],
                context_length=config.get("text_config", config)["max_position_embeddings"],
            )
        )
    return models


if __name__ == "__main__":
    main()
