"""vLLM's OpenAI-compatible server, behind a port of this machine's loopback.

The server itself has no network, only a socket in a folder of its own. This process listens on 127.0.0.1 and passes
bytes on, once the server has answered the certified questions through its chat interface as it should.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import logging
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from stages.core.errors import UserError
from stages.kit.data.conversation import Conversation
from stages.kit.data.images import ImageRecord
from stages.kit.evaluation.vllm.certificate import difference
from stages.kit.evaluation.vllm.certify import Subject
from stages.kit.evaluation.vllm.environment import Environment
from stages.kit.families import PROMPT_OPTIONS
from stages.kit.models.prompts import encode, shortened

log = logging.getLogger("stages")

CHECKED = 4
"""Questions that the server itself is asked before anybody else may."""
ANSWER_S = 600.0
"""How long it may take for one of them."""


@contextmanager
def listening_on(port: int) -> Iterator[socket.socket]:
    """A socket bound to the loopback. Raises UserError where the port is taken."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"port {port} of 127.0.0.1: {error.strerror}; name another: PORT={port + 1}") from None
        yield listening


def serve_model(subject: Subject, environment: Environment, *, listening: socket.socket) -> None:
    """Serve until Ctrl-C. Raises UserError where the server ends by itself, or answers unlike the certificate."""
    with tempfile.TemporaryDirectory(prefix="bakeoff-vllm-") as folder_name:
        folder = Path(folder_name)
        socket_path = folder / "socket"
        arguments = ("serve", *command_line(subject.options()), "--uds", str(socket_path))
        with environment.worker(*arguments, model_dir=subject.model_dir, folder=folder) as child:
            _wait_until_ready(child, socket_path)
            check_chat(subject, socket_path)
            log.info("serving %s at http://127.0.0.1:%d/v1; Ctrl-C ends it", subject.name, listening.getsockname()[1])
            with suppress(KeyboardInterrupt):
                asyncio.run(forward(listening, socket_path, child))
                raise _ended(child)
        log.info("ended")


def command_line(options: dict[str, Any]) -> list[str]:
    """Options of `vllm serve`, from keywords of vllm.LLM."""
    options = options | {
        # Where the template tells pictures from texts, it gets both; vLLM's own guess fails on some that do.
        "chat_template_content_format": "openai" if "limit_mm_per_prompt" in options else "string",
        "default_chat_template_kwargs": PROMPT_OPTIONS,
        "disable_uvicorn_access_log": True,
        # Pictures come with the question: the server fetches none.
        "allowed_media_domains": ["pictures-are-sent-as-data.invalid"],
    }
    words = ["--allowed-origins", "[]"]  # a page of the web, open in a browser here, may not ask
    for name, value in options.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif isinstance(value, list):
            words += value
        elif value is not True:
            words.append(str(value))
    return words


def check_chat(subject: Subject, socket_path: Path) -> None:
    """Raises UserError where the server makes other prompts of the first questions than `evaluate`."""
    for question in subject.questions[:CHECKED]:
        question = shortened(subject.processor, question, subject.room)
        body = {"messages": chat_messages(question, subject), "max_tokens": 1, "return_token_ids": True}
        status, answer = request(socket_path, "POST", "/v1/chat/completions", body)
        if status != http.HTTPStatus.OK:
            raise UserError(f"vLLM refuses sample {question.sample_id}: {answer}")
        ours = encode(subject.processor, [question], padding_side="left")["input_ids"][0].tolist()
        theirs = answer["prompt_token_ids"]
        if theirs != ours:
            raise UserError(
                f"vLLM's server makes another prompt of sample {question.sample_id}: {difference(theirs, ours)}; "
                f"it is not served"
            )
    log.info("the server makes the same prompts of %d questions", len(subject.questions[:CHECKED]))


def chat_messages(question: Conversation, subject: Subject) -> list[dict[str, Any]]:
    """In OpenAI's form, with pictures as data."""
    pictures = iter(question.images)
    messages = []
    for message in question.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "image_url", "image_url": {"url": _as_data(next(pictures))}}
                if part["type"] == "image"
                else {"type": "text", "text": part["text"]}
                for part in content
            ]
            if isinstance(subject.processor, PreTrainedTokenizerBase):
                content = "".join(part["text"] for part in content)
        messages.append({"role": message["role"], "content": content})
    return messages


def _as_data(picture: Any) -> str:
    file = io.BytesIO()
    (picture.open_image() if isinstance(picture, ImageRecord) else picture).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def request(socket_path: Path, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Status and content of the server's answer. Raises OSError where none listens."""

    class Connection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(ANSWER_S)
            self.sock.connect(str(socket_path))

    connection = Connection("localhost")
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read().decode()
        return response.status, json.loads(content) if content else None
    finally:
        connection.close()


def _wait_until_ready(child: subprocess.Popen[bytes], socket_path: Path) -> None:
    while child.poll() is None:
        with suppress(OSError):
            if request(socket_path, "GET", "/health")[0] == http.HTTPStatus.OK:
                return
        time.sleep(0.5)
    raise _ended(child)


def _ended(child: subprocess.Popen[bytes]) -> UserError:
    code = child.wait()
    return UserError(f"vLLM ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}; what it said is above")


async def forward(listening: socket.socket, socket_path: Path, child: subprocess.Popen[bytes]) -> None:
    """Pass connections on until the server ends."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError):
            served = await asyncio.open_unix_connection(str(socket_path))
            await asyncio.gather(_copy(reader, served[1]), _copy(served[0], writer))

    async with await asyncio.start_server(connected, sock=listening):
        while child.poll() is None:  # noqa: ASYNC110 - a process tells nobody that it ended
            await asyncio.sleep(0.2)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while content := await reader.read(2**16):
            writer.write(content)
            await writer.drain()
    finally:
        writer.close()
