"""The page: Gradio's components around a form and the models that it asks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from stages.core.errors import OutOfMemory, UserError
from stages.kit.data.images import FORMATS
from stages.kit.memory_use import recognised_out_of_memory
from tools.try_it.asking import Field, Form, LoadedModel, answer, following, said

SUFFIXES = [f".{name.lower()}" for name in (*FORMATS, "JPG", "TIF")]
MAX_UPLOAD = "100mb"


def make_page(title: str, form: Form, models: Sequence[LoadedModel]) -> gr.Blocks:
    def ask(*values: Any) -> list[Any]:
        given, talks = values[: len(form.fields)], values[len(form.fields) :]
        try:
            asked = form.question(*(each or "" for each in given))
            questions = [following(asked, turns_of(talk)) for talk in talks] or [asked] * len(models)
            with recognised_out_of_memory():
                answers = [answer(*each) for each in zip(models, questions, strict=True)]
        except (UserError, OutOfMemory) as error:
            kept = talks or [None] * sum(map(len, columns))
            return [gr.Textbox(value=error.message, visible=True), *kept]
        outputs: list[Any] = [gr.Textbox(value="", visible=False)]
        for model, question, text in zip(models, questions, answers, strict=True):
            if form.draws == "talk":
                outputs.append(talk_of([*question.messages, said("assistant", text)]))
                continue
            shown = form.shown(question, text, model.answerer)
            outputs += [*([shown.picture] if form.draws == "picture" else []), shown.text, text]
        return outputs

    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.Markdown(f"# {title}")
        given = [component(field) for field in form.fields]
        button = gr.Button("Ask", variant="primary")
        problem = gr.Textbox(label="Cannot be asked", visible=False, interactive=False)
        columns = []
        with gr.Row():
            for model in models:
                with gr.Column():
                    gr.Markdown(f"### {model.name}")
                    columns.append(answer_components(form))
        answered = [each for column in columns for each in column]
        started = [button.click]
        started += [
            each.upload if field.kind == "picture" else each.submit
            for field, each in zip(form.fields, given, strict=True)
            if field.kind != "text"
        ]
        talks = answered if form.draws == "talk" else []
        gr.on(started, ask, [*given, *talks], [problem, *answered], api_visibility="private")
    return page


def answer_components(form: Form) -> list[Any]:
    """What shows a model's answers."""
    if form.draws == "talk":
        return [gr.Chatbot(label="Conversation", render_markdown=False, buttons=["copy_all"])]
    picture = {"format": "png", "interactive": False, "buttons": ["fullscreen", "download"]}
    return [
        *([gr.Image(label="Boxes", **picture)] if form.draws == "picture" else []),
        gr.Markdown(),
        gr.Textbox(label="Answer, word for word", interactive=False),
    ]


def talk_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A Chatbot's messages. It would read HTML in them, pictures from elsewhere too."""
    turns = ((message["role"], message["content"][0]["text"]) for message in messages)
    return [{"role": role, "content": html.escape(text)} for role, text in turns if role != "system"]


def turns_of(talk: Sequence[Any] | None) -> list[tuple[str, str]]:
    """What `talk_of` showed, as a Chatbot gives it back: (role, text)."""
    return [(message["role"], html.unescape(message["content"][0]["text"])) for message in talk or ()]


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
