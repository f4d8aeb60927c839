"""The page: Gradio's components around a form and the models that it asks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from stages.core.errors import OutOfMemory, UserError
from stages.data.conversation import Conversation, message
from stages.data.images import FORMATS
from stages.planning.memory_use import recognised_out_of_memory
from tools.try_run.forms import Form, following

if TYPE_CHECKING:
    from stages.evaluation.generate import Completion, TextGenerator
    from stages.evaluation.llama_cpp import LlamaCpp

SUFFIXES = [f".{name.lower()}" for name in (*FORMATS, "JPG", "TIF")]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    name: str
    generator: TextGenerator | LlamaCpp
    context_length: int
    """Most tokens of a prompt and its completion that the model takes."""


def complete(model: LoadedModel, question: Conversation) -> Completion:
    """Raises UserError for a question that is too long for the model."""
    from stages.models.prompts import encode

    generator = model.generator
    settings, longest = generator.settings, model.context_length
    inputs = encode(generator.processor, [question], padding_side="left", max_length=settings.room)
    tokens = inputs["input_ids"].shape[1]
    if tokens + settings.max_new_tokens > longest:
        raise UserError(
            f"too long: {tokens:,} tokens, and {settings.max_new_tokens:,} to generate; the model takes {longest:,}"
        )
    return generator.completions([question])[0]


def make_page(title: str, form: Form, models: Sequence[LoadedModel]) -> gr.Blocks:
    def ask(*values: Any) -> list[Any]:
        given, dialogues = values[: len(form.fields)], values[len(form.fields) :]
        try:
            asked = form.question(*(each or "" for each in given))
            questions = [following(asked, turns_of(each)) for each in dialogues] or [asked] * len(models)
            with recognised_out_of_memory():
                completions = [complete(*each) for each in zip(models, questions, strict=True)]
        except (UserError, OutOfMemory) as error:
            kept = dialogues or [None] * len(outputs)
            return [gr.Textbox(value=error.message, visible=True), *kept, *[""] * len(models)]
        results: list[Any] = [gr.Textbox(value="", visible=False)]
        for model, question, text in zip(models, questions, completions, strict=True):
            if form.output == "dialogue":
                results.append(dialogue_of([*question.messages, message("assistant", text)]))
                continue
            image, markdown = form.shown(question, text, model.generator)
            results += [*([image] if form.output == "image" else []), markdown, text]
        return [*results, *(cut_words(*each) for each in zip(models, completions, strict=True))]

    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.Markdown(f"# {title}")
        inputs = [input_component(*field) for field in form.fields]
        button = gr.Button("Ask", variant="primary")
        problem = gr.Textbox(label="Cannot be asked", visible=False, interactive=False)
        outputs, notes = [], []
        with gr.Row():
            for model in models:
                with gr.Column():
                    gr.Markdown(f"### {model.name}")
                    outputs += output_components(form)
                    notes.append(gr.Markdown())
        triggers = [
            button.click,
            *(
                component.upload if kind == "image" else component.submit
                for (kind, _), component in zip(form.fields, inputs, strict=True)
                if kind != "text"
            ),
        ]
        dialogues = outputs if form.output == "dialogue" else []
        gr.on(triggers, ask, [*inputs, *dialogues], [problem, *outputs, *notes], api_visibility="private")
    return page


def cut_words(model: LoadedModel, completion: Completion) -> str:
    """A note on a completion that was cut; empty for others."""
    return f"Cut at max_new_tokens, {model.generator.settings.max_new_tokens:,}." if completion.is_cut else ""


def input_component(kind: str, label: str) -> Any:
    # A plain file: gr.Image would decode it before `parse_image` has checked its size.
    if kind == "image":
        return gr.File(label=label, file_types=SUFFIXES)
    return gr.Textbox(label=label, lines=1 if kind == "line" else 6, max_lines=12)


def output_components(form: Form) -> list[Any]:
    """Components for one model's completions."""
    if form.output == "dialogue":
        return [gr.Chatbot(label="Conversation", render_markdown=False, buttons=["copy_all"])]
    image = {"format": "png", "interactive": False, "buttons": ["fullscreen", "download"]}
    return [
        *([gr.Image(label="Boxes", **image)] if form.output == "image" else []),
        gr.Markdown(),
        gr.Textbox(label="Completion, word for word", interactive=False),
    ]


def dialogue_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A Chatbot's messages, escaped: it would render HTML in them, and fetch images from elsewhere."""
    turns = ((each["role"], each["content"][0]["text"]) for each in messages)
    return [{"role": role, "content": html.escape(text)} for role, text in turns if role != "system"]


def turns_of(dialogue: Sequence[Any] | None) -> list[tuple[str, str]]:
    """(role, text) of a Chatbot's messages, as it returns them."""
    return [(each["role"], html.unescape(each["content"][0]["text"])) for each in dialogue or ()]


def serve(page: gr.Blocks, port: int | None) -> str:
    """Start the page on loopback in a thread of its own; returns its address. Raises UserError for a port in use."""
    theme = gr.themes.Base(font="sans-serif", font_mono="monospace")  # other themes fetch fonts from Google
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
            max_file_size="100mb",
            theme=theme,
            # Refuses a web page elsewhere with a name that resolves to 127.0.0.1.
            app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])]},
        )
    except OSError as error:
        raise UserError(f"the page cannot be opened: {error}; choose another port: PORT=7900") from None
    return str(url)
