"""vLLM as the engine of an evaluation: it generates completions, certified to be those of our own model.

The worker, a process in vLLM's environment, reads the questions from a folder and writes its completions there. After
it has ended, our own model completes the first questions too, and computes the log-probabilities of vLLM's tokens.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from signal import SIGKILL
from threading import Thread

import pydantic
import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from stages.core.errors import OutOfMemory, UserError, listed, pluralize
from stages.core.params.schema import ProfileParams, TemplateOptions
from stages.core.records import STRICT_OR_NAN, StageFile
from stages.core.signals import end_with_parent
from stages.data.conversation import Conversation
from stages.data.images import ImageRecord
from stages.evaluation.generate import Ending, TextGenerator, warn_of_cuts
from stages.evaluation.vllm.environment import WORKER, Installed, engine_options, installed
from stages.models.prompts import Processor, encode, end_tokens, load_processor, rendered, shortened, tokenizer_of
from stages.planning.memory_use import says_out_of_memory

log = logging.getLogger("stages")

CERTIFICATE_FILE = "vllm.json"
SAMPLES = 32
"""Questions that both engines complete for the certificate."""
PIXELS_AT_ONCE = 500_000_000
"""Pixels of the images that the worker holds before memory ran out; three bytes each."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limits of the difference of log-probabilities, in nats, between vLLM and our own model."""

    mean: float
    """Mean over all tokens."""
    largest: float
    """Largest of any token."""
    close: float
    """A token is a close choice if another one is at most this much likelier."""


TOLERANCE = {
    "fp32": Tolerance(mean=1e-4, largest=1e-3, close=2e-3),
    "fp16": Tolerance(mean=1e-2, largest=0.1, close=0.2),
    # transformers differs from itself as much if the work is split otherwise.
    "bf16": Tolerance(mean=0.05, largest=1.0, close=1.0),
}
"""Limits for each precision."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT_OR_NAN)
class EngineCertificate(StageFile):
    """vLLM generates the completions of a run's own model."""

    run: str
    engine: str
    """Name and version."""
    model: str
    """Digest of the model's folder."""
    device: str
    """The device of both: cpu, or the GPU's name."""
    precision: str
    images: int
    """Most images in a question."""
    tolerance: Tolerance
    samples: int
    tokens: int
    """In all completions."""
    log_prob_deviation: float
    """Largest of any token."""
    mean_deviation: float
    """Mean over all tokens."""
    same_completions: int
    """Samples that our own model completes word for word alike."""

    def __str__(self) -> str:
        return (
            f"{self.same_completions} of {pluralize(self.samples, 'completion')} are the same; log-probabilities of "
            f"{pluralize(self.tokens, 'token')} are off by {self.mean_deviation:.1e} on average (at most "
            f"{self.tolerance.mean:g}) and by up to {self.log_prob_deviation:.1e} (at most {self.tolerance.largest:g})"
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """vLLM's completion of one prompt."""

    prompt: list[int]
    """Token ids, each image widened to its tokens."""
    tokens: list[int]
    """Token ids of the completion, the end token included."""
    log_probs: list[float]
    """Log-probability of each of these tokens."""

    def until(self, length: int) -> Completion:
        return replace(self, tokens=self.tokens[:length], log_probs=self.log_probs[:length])


@dataclass(frozen=True, kw_only=True)
class WorkerResult:
    version: str
    """Version of vLLM."""
    completions: list[Completion]
    seconds: float
    """Time that vLLM took for all completions."""


@dataclass(frozen=True, kw_only=True)
class VllmEngine:
    """vLLM for one model."""

    name: str
    model_dir: Path
    model_digest: str
    profile: ProfileParams
    questions: Sequence[Conversation]
    template_options: TemplateOptions = field(default_factory=dict)
    """A baseline's; a trained model's template has its own."""
    attempt: int = 0
    """Number of earlier attempts that ran out of memory."""

    @property
    def images(self) -> int:
        """Most images in a question."""
        return max(len(question.images) for question in self.questions)

    def generate(self, parent: Path) -> WorkerResult:
        """The completions of all questions, by a worker that has ended when this returns.

        parent: folder for the files that are exchanged with it. Raises UserError with the end of its output if it
        fails, OutOfMemory if memory ran out.
        """
        environment = installed(self.profile.device.kind)
        for left in parent.glob(".vllm-*"):  # by an evaluation that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=".vllm-", dir=parent) as folder_name:
            folder = Path(folder_name).absolute()
            self.write_request(folder)
            log.info("vLLM completes %d questions", len(self.questions))
            code, output = _run_worker(environment, folder)
            if code:
                # The kernel kills a process that takes more memory than there is.
                kind = OutOfMemory if code == -SIGKILL or says_out_of_memory(output) else UserError
                reason = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise kind(f"vLLM ended with {reason}; its output ends in:\n{output}")
            result = TypeAdapter(WorkerResult).validate_json((folder / "completions.json").read_text(encoding="utf-8"))
        log.info("vLLM %s took %.1f s", result.version, result.seconds)
        return result

    def write_request(self, folder: Path) -> None:
        """Write the worker's input: the prompts with one placeholder per image, and the images as files."""
        processor = load_processor(self.model_dir, self.profile.images, self.template_options)
        prompts = []
        for number, question in enumerate(self.questions):
            names = [f"{number}-{place}.png" for place in range(len(question.images))]
            for name, image in zip(names, question.images, strict=True):
                opened = image.open_image() if isinstance(image, ImageRecord) else image
                opened.save(folder / name, compress_level=1)
            text = rendered(processor, shortened(processor, question, self.profile.evaluation.room))
            ids = tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"]
            prompts.append({"ids": ids, "images": names})
        options = engine_options(self.name, self.model_dir, self.profile, images=self.images, attempt=self.attempt)
        request = {
            "engine": options,
            "max_tokens": self.profile.evaluation.max_new_tokens,
            "end_tokens": sorted(end_tokens(tokenizer_of(processor))),
            "pixels_at_once": PIXELS_AT_ONCE >> self.attempt,
            "prompts": prompts,
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")

    def certify(self, result: WorkerResult, generator: TextGenerator) -> tuple[EngineCertificate, list[str]]:
        """The certificate, and the text of each completion up to where our own model would end it.

        Raises UserError if completions differ from our own model's by more than rounding explains, or if vLLM ended one
        early.
        """
        limit, tolerance = self.profile.evaluation.max_new_tokens, TOLERANCE[self.profile.memory.precision]
        ending = Ending.of(tokenizer_of(generator.processor), generator.samples, generator.answer_format)
        whole = [completion.until(len(ending.whole(completion.tokens))) for completion in result.completions]
        texts = [ending.completion(completion.tokens) for completion in whole]
        for question, completion, text in zip(self.questions, whole, texts, strict=True):
            if text.is_cut and len(completion.tokens) < limit:
                raise UserError(
                    f"vLLM ended the completion of {question.sample_id} after {len(completion.tokens)} tokens: it has "
                    "no room for more beside the question. Set max_length or a smaller max_new_tokens in the "
                    "profile's evaluation, or take a GPU with more memory"
                )
        warn_of_cuts(texts, limit)
        own, same_completions = generator.completions(self.questions[:SAMPLES]), 0
        unlike, deviations = [], []
        for question, completion, text, own_text in zip(self.questions, whole, texts, own, strict=False):
            room = self.profile.evaluation.room
            seen = view(generator.model, generator.processor, question, completion.tokens, room=room)
            same_completions += text == own_text
            if problem := difference(completion, seen, same_words=text == own_text, tolerance=tolerance):
                unlike.append(f"{question.sample_id}: {problem}")
            deviations.append((torch.tensor(completion.log_probs) - seen.log_probs).abs())
        engine, device = f"vLLM {result.version}", generator.model.device
        problem = f"{engine} does not generate as {self.name} does in transformers"
        if unlike:
            raise UserError(f"{problem}, in {len(unlike)} of {pluralize(len(own), 'sample')}:\n{listed(unlike, 5)}")
        off = torch.cat(deviations)
        if not off.mean() <= tolerance.mean:
            raise UserError(
                f"{problem}: log-probabilities are off by {off.mean():.2g} on average, more than rounding explains"
            )
        certificate = EngineCertificate(
            run=self.name,
            engine=engine,
            model=self.model_digest,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            precision=self.profile.memory.precision,
            images=self.images,
            tolerance=tolerance,
            samples=len(own),
            tokens=len(off),
            log_prob_deviation=off.max().item(),
            mean_deviation=off.mean().item(),
            same_completions=same_completions,
        )
        log.info("%s generates as %s does in transformers: %s", engine, self.name, certificate)
        return certificate, [*texts]


def _run_worker(environment: Installed, folder: Path) -> tuple[int, str]:
    """The worker's exit code and the end of its output; neither it nor a process that it started is left running."""
    lines: deque[str] = deque(maxlen=50)
    child = subprocess.Popen(
        [str(environment.python), str(WORKER), "generate", str(folder)],
        env=environment.variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl-C reaches it once, through this process
        preexec_fn=end_with_parent(),
    )

    def read() -> None:
        for line in map(str.rstrip, child.stdout or ()):
            if line.startswith("completions "):
                log.info(line)
            elif line:
                print(line, file=sys.stderr)
                lines.append(line)

    # The pipe may stay open after the worker: a process that a dead worker started holds it.
    (reader := Thread(target=read)).start()
    try:
        code = child.wait()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, SIGKILL)
        child.wait()
        reader.join()
    return code, "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class View:
    """A completion of vLLM's as our own model reads it."""

    prompt: list[int]
    log_probs: torch.Tensor
    """(T,) fp32, of vLLM's tokens."""
    margins: torch.Tensor
    """(T,) How much likelier the likeliest other token is; negative if vLLM's token is the likeliest."""


@torch.inference_mode()
def view(
    model: PreTrainedModel, processor: Processor, question: Conversation, tokens: Sequence[int], *, room: int | None
) -> View:
    """One forward pass over a question and T tokens of a completion, without padding.

    Raises UserError for an image's token in the completion, which a pass over all of it takes for an image.
    """
    if getattr(processor, "image_token_id", None) in tokens:
        raise UserError(
            f"the completion of {question.sample_id} has an image's token in it, and cannot be certified: set the "
            "profile's evaluation.engine: transformers"
        )
    inputs = encode(processor, [question], padding_side="left", max_length=room)
    prompt = inputs["input_ids"][0].tolist()
    completion = torch.tensor([list(tokens)])  # (1, T)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], completion], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(completion)], dim=1)
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    # The logits of a position are those of the next token.
    logits = model(**inputs, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1].float().cpu()
    log_probs = logits.log_softmax(dim=-1)  # (T, vocabulary)
    chosen = log_probs.gather(1, completion.T)
    others = log_probs.scatter(1, completion.T, -torch.inf).amax(dim=1)
    return View(prompt=prompt, log_probs=chosen[:, 0], margins=others - chosen[:, 0])


def difference(theirs: Completion, view: View, *, same_words: bool, tolerance: Tolerance) -> str:
    """The differences of a completion that rounding does not explain; "" for none.

    view: our model's, of vLLM's tokens. same_words: whether our own completion has the same words.
    """
    if theirs.prompt != view.prompt:
        pairs = enumerate(zip_longest(theirs.prompt, view.prompt), start=1)
        place, (their, our) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        return f"reads another prompt: its token {place} is {their}, not {our}"
    off = (torch.tensor(theirs.log_probs) - view.log_probs).abs()
    another = (view.margins > tolerance.close).nonzero()
    problems = []
    if len(another):
        problems.append(f"token {int(another[0]) + 1} of the completion is another")
    elif not same_words and not bool((view.margins.abs() <= tolerance.close).any()):
        problems.append("the completion is another, and no token of it was a close choice")
    if not bool((off <= tolerance.largest).all()):  # a NaN is unlike too
        problems.append(f"log-probabilities off by {off.max():.2g}")
    return "; ".join(problems)
