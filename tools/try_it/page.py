"""The page: Gradio's components around a form and the models that it asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from stages.core.errors import OutOfMemory, UserError
from stages.kit.data.images import FORMATS
from stages.kit.memory_use.out_of_memory import recognised_out_of_memory
from tools.try_it.asking import Field, Form, LoadedModel, answer

SUFFIXES = [f".{name.lower()}" for name in (*FORMATS, "JPG", "TIF")]
MAX_UPLOAD = "100mb"


def make_page(title: str, form: Form, models: Sequence[LoadedModel]) -> gr.Blocks:
    columns = 3 if form.draws == "picture" else 2
    """Components a model."""

    def ask(*given: str | None) -> list[Any]:
        try:
            question = form.question(*(each or "" for each in given))
            with recognised_out_of_memory():
                answers = [answer(model, question) for model in models]
        except (UserError, OutOfMemory) as error:
            return [gr.Textbox(value=error.message, visible=True), *[None] * columns * len(models)]
        outputs: list[Any] = [gr.Textbox(value="", visible=False)]
        for model, text in zip(models, answers, strict=True):
            shown = form.shown(question, text, model.answerer)
            outputs += [*([shown.picture] if form.draws == "picture" else []), shown.text, text]
        return outputs

    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.Markdown(f"# {title}")
        given = [component(field) for field in form.fields]
        button = gr.Button("Ask", variant="primary")
        outputs: list[Any] = [gr.Textbox(label="Cannot be asked", visible=False, interactive=False)]
        with gr.Row():
            for model in models:
                with gr.Column():
                    gr.Markdown(f"### {model.name}")
                    if form.draws == "picture":
                        outputs.append(
                            gr.Image(label="Boxes", format="png", interactive=False, buttons=["fullscreen", "download"])
                        )
                    outputs.append(gr.Markdown())
                    outputs.append(gr.Textbox(label="Answer, word for word", interactive=False))
        started = [button.click]
        started += [
            each.upload if field.kind == "picture" else each.submit
            for field, each in zip(form.fields, given, strict=True)
            if field.kind != "text"
        ]
        gr.on(started, ask, given, outputs, api_visibility="private")
    return page


def component(field: Field) -> Any:
    # A plain file: gr.Image would open it before `parse_image` has looked at its size.
    if field.kind == "picture":
        return gr.File(label=field.label, file_types=SUFFIXES)
    return gr.Textbox(label=field.label, lines=1 if field.kind == "line" else 6, max_lines=12)


def serve(page: gr.Blocks, port: int | None) -> str:
    """Start the page on loopback in a thread of its own; returns its address. Raises UserError for a port in use."""
    theme = gr.themes.Base(font="sans-serif", font_mono="monospace")  # others fetch theirs from Google
    try:
        _, url, _ = page.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=False,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            run_history=False,
            prevent_thread_lock=True,
            quiet=True,
            footer_links=[],
            max_file_size=MAX_UPLOAD,
            theme=theme,
            # A web page elsewhere whose name leads to 127.0.0.1 is another host to the browser, and is refused here.
            app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])]},
        )
    except OSError as error:
        raise UserError(f"the page cannot be opened: {error}; choose another one: PORT=7900") from None
    return str(url)
