"""Questions as a second engine is asked them, and our own model's view of the answers that it gave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from stages.core.lineage import combined_digest, file_digest
from stages.kit.data.conversation import Conversation
from stages.kit.data.images import ImageRecord
from stages.kit.models.prompts import Processor, encode, rendered, shortened, tokenizer_of

REQUEST = "request.json"
ANSWERS = "answers.json"
PROGRESS = "progress"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the engine returned for one prompt."""

    prompt: list[int]
    """Token ids, each picture widened to its tokens."""
    tokens: list[int]
    """Of the answer, with the token that ended it."""
    log_probs: list[float]
    """Of each of these tokens."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    version: str
    """The engine's."""
    answers: list[Answer]
    seconds: float
    """That it took to answer."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Our own model's view of an answer: it reads the tokens that the engine wrote."""

    prompt: list[int]
    log_probs: torch.Tensor
    """(T,) fp32, of the engine's tokens."""
    margins: torch.Tensor
    """(T,) How much likelier than the engine's token the likeliest other one is; negative where the engine's is it."""


def write_request(
    folder: Path,
    processor: Processor,
    questions: Sequence[Conversation],
    *,
    engine: dict[str, Any],
    max_new_tokens: int,
    end_tokens: set[int],
    room: int | None,
    pixels_at_once: int,
) -> None:
    """Write what the worker reads: the prompts with one placeholder a picture, and the pictures as files.

    room: tokens that a question may have. pixels_at_once: of the pictures that the worker holds in memory.
    """
    prompts = []
    for number, question in enumerate(questions):
        text = rendered(processor, shortened(processor, question, room))
        names = [f"{number}-{place}.png" for place in range(len(question.images))]
        for name, picture in zip(names, question.images, strict=True):
            (picture.open_image() if isinstance(picture, ImageRecord) else picture).save(
                folder / name, compress_level=1
            )
        ids = tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"]
        prompts.append({"ids": ids, "pictures": names})
    request = {
        "engine": engine,
        "max_tokens": max_new_tokens,
        "end_tokens": sorted(end_tokens),
        "pixels_at_once": pixels_at_once,
        "prompts": prompts,
    }
    (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")


def request_digest(folder: Path, count: int) -> str:
    """Digest of a request as if it had only its first `count` prompts; the same wherever the model's folder lies, and
    however much there may be at once.
    """
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    del request["engine"]["model"], request["pixels_at_once"]
    for name in ("limit_mm_per_prompt", "max_num_seqs"):
        request["engine"].pop(name, None)
    request["prompts"] = request["prompts"][:count]
    digests = {name: file_digest(folder / name) for prompt in request["prompts"] for name in prompt["pictures"]}
    return combined_digest(digests | {REQUEST: hashlib.sha256(json.dumps(request).encode()).hexdigest()})


def read_answers(folder: Path) -> Answers:
    return TypeAdapter(Answers).validate_json((folder / ANSWERS).read_text(encoding="utf-8"))


@torch.inference_mode()
def view(
    model: PreTrainedModel, processor: Processor, question: Conversation, tokens: Sequence[int], *, room: int | None
) -> View:
    """Our model's view of an answer of these tokens to a question; they are read at once, without padding."""
    inputs = encode(processor, [question], padding_side="left", max_length=room)
    prompt = inputs["input_ids"][0].tolist()
    answer = torch.tensor([list(tokens)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], dim=1)
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    # The logits that an answer's token was chosen by are those of the token before it.
    logits = model(**inputs, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1].float().cpu()
    log_probs = logits.log_softmax(dim=-1)  # (T, vocabulary)
    chosen = log_probs.gather(1, answer.T)
    others = log_probs.scatter(1, answer.T, -torch.inf).amax(dim=1)
    return View(prompt=prompt, log_probs=chosen[:, 0], margins=others - chosen[:, 0])
