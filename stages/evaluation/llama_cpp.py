"""Exports in an evaluation. llama.cpp runs a GGUF file, which completes as it will where it is deployed.

`xllamacpp` runs llama.cpp's own server in this process, on loopback. Prompts are token ids of our own template, many in
one request, which the server takes in order: two runs batch alike. Decoding is greedy.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import Request, urlopen

import torch

from stages.core.environment import usable_cores
from stages.core.errors import UserError, pluralize
from stages.core.params.schema import EvaluationParams, Params
from stages.data.conversation import Conversation
from stages.evaluation.generate import (
    Completion,
    TextGenerator,
    complete_length,
    completeness_test,
    completion_of,
    load_generator,
)
from stages.evaluation.likelihood import AnswerLikelihood
from stages.exporting.certificate import require_llama_cpp
from stages.models.folders import GGUF_FILE
from stages.models.prompts import Processor, encode, end_tokens, load_processor, tokenizer_of
from stages.planning.memory_use import MemoryLog

log = logging.getLogger(__name__)

FORCED = 1e9
"""Added to the logit of a token that is to be chosen. The log-probabilities that are reported are without it."""

UNDERFLOW = math.log(2.0**-149)
"""Stands for log-probabilities below those of llama.cpp's floats, which it does not report."""


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
    url: str = field(init=False, default="")
    """Address of a server, which lives as long as this object."""
    shape: tuple[int, int] = field(init=False, default=(0, 0))
    """Sequences at once of that server, and the tokens that each has room for."""

    @property
    def engine(self) -> str:
        """Name and version."""
        return f"llama.cpp, xllamacpp {version('xllamacpp')}"

    def reserve(self, questions: Sequence[Conversation]) -> None:
        """Load the file, with room for these unanswered conversations."""
        longest = max((len(self._ids(question)[0]) for question in questions), default=0)
        self._serve(self.batch_size, longest + self.settings.max_new_tokens)

    def completions(self, questions: Sequence[Conversation]) -> list[Completion]:
        """The completion of each of these unanswered conversations, in order."""
        tokenizer, complete = tokenizer_of(self.processor), completeness_test(self.model_samples, self.answer_format)
        ends = end_tokens(tokenizer)
        return [
            completion_of(tokenizer, tokens[: complete_length(tokenizer, tokens, ends, complete)], ends, complete)
            for tokens in self.tokens(questions)
        ]

    def tokens(self, questions: Sequence[Conversation]) -> list[list[int]]:
        """Token ids of each completion, the end of its turn included, as far as llama.cpp generated it. Not streamed: a
        stream leaves out tokens that end within a character."""
        self.reserve(questions)
        prompts, limit = [self._ids(question)[0] for question in questions], self.settings.max_new_tokens
        request = {"n_predict": limit, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        started, at_once, generated = time.monotonic(), self.batch_size * 8, list[list[int]]()
        for first in range(0, len(prompts), at_once):
            events = _post(f"{self.url}/completion", request | {"prompt": prompts[first : first + at_once]})
            events = events if isinstance(events, list) else [events]  # of a single prompt
            generated += [event["tokens"] for event in sorted(events, key=lambda event: event["index"])]
            rate = len(generated) / (time.monotonic() - started)
            log.info("completions %d/%d  %.1f samples/s", len(generated), len(prompts), rate)
        if num_cut := sum(len(tokens) >= limit for tokens in generated):
            log.warning("%s cut at max_new_tokens %d", pluralize(num_cut, "completion"), limit)
        return generated

    def likelihoods(self, conversations: Sequence[Conversation], _: int = 0) -> list[AnswerLikelihood]:
        """Likelihood of the answers in each answered conversation, in order. One token after the other, without
        batches, on what the server has read already."""
        encoded = [self._ids(conversation, mark_answers=True) for conversation in conversations]
        if encoded:
            self._serve(1, max(len(ids) for ids, _ in encoded) + 1)
        found = []
        for ids, in_answer in encoded:
            log_probs = [self._log_prob(ids[:place], ids[place]) for place in in_answer]
            found.append(AnswerLikelihood(sum(log_probs), len(log_probs)))
        return found

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

    def _serve(self, sequences: int, length: int) -> None:
        """Start a server for so many sequences at once of `length` tokens, unless the present one does."""
        import xllamacpp

        if self.shape[0] == sequences and self.shape[1] >= length:
            return
        self.shape = sequences, max(length, 256)
        params = xllamacpp.CommonParams()
        params.model.path = str(self.path)
        params.n_parallel, params.n_ctx = sequences, math.prod(self.shape)
        params.kv_unified = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = usable_cores()
        params.n_gpu_layers = 0
        params.verbosity, params.ui, params.warmup = -1, False, False
        self.server = None  # the last one's memory is free before the next takes its own
        self.server = xllamacpp.Server(params)
        self.url = self.server.listening_address

    def _log_prob(self, before: list[int], token: int) -> float:
        """Natural logarithm of a token's probability after others."""
        request = {
            "prompt": before,
            "n_predict": 1,
            "temperature": 0,
            "n_probs": 1,
            "cache_prompt": True,
            "logit_bias": [[token, FORCED]],
        }
        found = _post(f"{self.url}/completion", request).get("completion_probabilities")
        if found:
            return _log_prob_of(found[0], found[0]["top_logprobs"][0])
        # No probability is reported of a token that ends within a character: it is among those of all others.
        tokenizer = tokenizer_of(self.processor)
        whole = tokenizer.encode("a", add_special_tokens=False)[0]
        request |= {"n_probs": len(tokenizer), "logit_bias": [[whole, FORCED]]}
        (found,) = _post(f"{self.url}/completion", request)["completion_probabilities"]
        others = found["top_logprobs"]
        return next(_log_prob_of(each, others[0]) for each in others if each["id"] == token)


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


def _log_prob_of(reported: dict[str, Any], likeliest: dict[str, Any]) -> float:
    if likeliest["logprob"] is None:
        raise UserError("llama.cpp computes no number for this file: its weights overflow, or it runs them wrongly")
    return UNDERFLOW if reported["logprob"] is None else float(reported["logprob"])


def _post(url: str, content: dict[str, Any]) -> Any:
    assert url.startswith("http://127.0.0.1:"), url
    request = Request(url, data=json.dumps(content).encode(), headers={"Content-Type": "application/json"})
    with urlopen(request) as response:
        return json.load(response)
