"""Exports in an evaluation. llama.cpp runs a GGUF file, which completes as it will where it is deployed.

`xllamacpp` runs llama.cpp's own server in this process, on loopback. Prompts are token ids of our own template, many in
one request, which the server takes in order: two runs batch alike. Decoding is greedy. Likelihoods are of llama.cpp's C
API, one text after the other.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import Request, urlopen

import torch

from stages.core.params.schema import EvaluationParams, Params
from stages.data.conversation import Conversation
from stages.evaluation.generate import (
    Completion,
    Ending,
    Progress,
    TextGenerator,
    load_generator,
    warn_of_cuts,
)
from stages.evaluation.likelihood import AnswerLikelihood, finite
from stages.evaluation.llama_api import log_probs
from stages.exporting.certificate import require_llama_cpp
from stages.models.folders import GGUF_FILE
from stages.models.prompts import Processor, encode, load_processor, tokenizer_of
from stages.planning.memory_use import MemoryLog


@dataclass(kw_only=True)
class LlamaCpp:
    """A GGUF file in llama.cpp, with what it takes to complete questions of a task, as a `TextGenerator` does."""

    path: Path
    processor: Processor
    """The merged model's: its tokenizer and template make the prompts."""
    model_samples: ModuleType
    """Module of the task."""
    answer_format: str | None
    batch_size: int
    """Sequences at once."""
    settings: EvaluationParams
    server: Any = field(init=False, default=None)
    """llama.cpp's, from `reserve`."""
    room: int = field(init=False, default=0)
    """Tokens that each sequence of that server has room for."""

    @property
    def engine(self) -> str:
        """Name and version."""
        return f"llama.cpp, xllamacpp {version('xllamacpp')}"

    def reserve(self, questions: Sequence[Conversation]) -> None:
        """Start a server with room for these unanswered conversations, unless the present one has it."""
        import xllamacpp

        longest = max((len(self._ids(question)[0]) for question in questions), default=0)
        if self.room >= (needed := longest + self.settings.max_new_tokens):
            return
        self.server = None  # the last one's memory is free before the next takes its own
        self.room = max(needed, 256)
        params = xllamacpp.CommonParams()
        params.model.path = str(self.path)
        params.n_parallel, params.n_ctx = self.batch_size, self.batch_size * self.room
        params.kv_unified = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.n_gpu_layers = 0
        params.verbosity, params.ui, params.warmup = -1, False, False
        self.server = xllamacpp.Server(params)

    def completions(self, questions: Sequence[Conversation]) -> list[Completion]:
        """The completion of each of these unanswered conversations, in order."""
        ending = Ending.of(tokenizer_of(self.processor), self.model_samples, self.answer_format)
        completions, limit = [], self.settings.max_new_tokens
        for tokens in self.tokens(questions):
            completion = ending.completion(ending.whole(tokens))
            completion.is_cut &= len(tokens) >= limit  # a file may have further end tokens
            completions.append(completion)
        warn_of_cuts(completions, limit)
        return completions

    def tokens(self, questions: Sequence[Conversation]) -> list[list[int]]:
        """Token ids of each completion, the end of its turn included, as far as llama.cpp generated it. Not streamed: a
        stream leaves out tokens that end within a character."""
        self.reserve(questions)
        prompts, limit = [self._ids(question)[0] for question in questions], self.settings.max_new_tokens
        request = {"n_predict": limit, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        progress, generated = Progress("completions %d/%d  %.1f samples/s", len(prompts)), list[list[int]]()
        at_once, url = self.batch_size * 8, f"{self.server.listening_address}/completion"
        for first in range(0, len(prompts), at_once):
            events = _post(url, request | {"prompt": prompts[first : first + at_once]})
            events = events if isinstance(events, list) else [events]  # of a single prompt
            generated += [event["tokens"] for event in sorted(events, key=lambda event: event["index"])]
            progress(len(generated))
        return generated

    def likelihoods(self, conversations: Sequence[Conversation]) -> list[AnswerLikelihood]:
        """Likelihood of the answers in each answered conversation, in order."""
        encoded = [self._ids(conversation, mark_answers=True) for conversation in conversations]
        if not encoded:
            return []
        self.server, self.room = None, 0  # its memory is free before the file is loaded again
        progress, likelihoods = Progress("scored %d/%d completions  %.1f/s", len(encoded)), list[AnswerLikelihood]()
        for values in log_probs(self.path, encoded):
            likelihoods.append(AnswerLikelihood(sum(values), len(values)))
            progress(len(likelihoods))
        return finite(likelihoods)

    def routing(self, conversations: Sequence[Conversation]) -> None:
        """llama.cpp does not report it."""

    def _ids(self, conversation: Conversation, *, mark_answers: bool = False) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and the places of those of its answers that are to be learnt."""
        room = self.settings.max_length if mark_answers else self.settings.room
        inputs = encode(
            self.processor, [conversation], padding_side="right", max_length=room, mark_answers=mark_answers
        )
        marked = inputs.get("answers", torch.zeros_like(inputs["input_ids"]))
        return inputs["input_ids"][0].tolist(), marked[0].nonzero()[:, 0].tolist()


def load_exported(
    params: Params, name: str, samples: ModuleType, questions: Sequence[Conversation] = (), **options: Any
) -> tuple[TextGenerator | LlamaCpp, MemoryLog]:
    """An export, ready to generate by what will serve it, and the memory that loading took.

    samples: of the task. questions: to have room for from the start. options: answer_format and batch_size of a
    generator. Raises UserError if llama.cpp is not installed.
    """
    folder, merged_dir = Path("data/exports") / name, Path("data/runs") / params.exports[name].recipe / "merged"
    if params.exports[name].format != "gguf":
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # int8 warns at each product that it casts its input
        return load_generator(folder, params.active, samples, **options)
    require_llama_cpp()
    memory = MemoryLog(())
    generator = LlamaCpp(
        path=folder / GGUF_FILE,
        processor=load_processor(merged_dir, None),
        model_samples=samples,
        settings=params.active.evaluation,
        **options,
    )
    generator.reserve(questions)
    memory.loaded()
    return generator, memory


def _post(url: str, content: dict[str, Any]) -> Any:
    assert url.startswith("http://127.0.0.1:"), url
    request = Request(url, data=json.dumps(content).encode(), headers={"Content-Type": "application/json"})
    with urlopen(request) as response:
        return json.load(response)
