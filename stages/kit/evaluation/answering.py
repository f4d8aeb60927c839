"""A model that is loaded and ready to answer, as evaluation and prediction ask it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.params.schema import EvaluationParams, ProfileParams
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.batches import longest_first
from stages.kit.evaluation.generation import completion_of, generate_answers, room_for_questions
from stages.kit.memory_use import MemoryLog
from stages.kit.models.load import gpus_in_use, load_config, see_only
from stages.kit.models.merge import load_certified
from stages.kit.models.prompts import Processor, encode, load_processor
from stages.kit.planning.ladder import AT_ONCE, lowered_batch_size, read_at_once
from stages.kit.planning.prediction import Prediction

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Answerer:
    model: PreTrainedModel
    processor: Processor
    complete: Callable[[str], bool] | None
    """Says of an answer so far that nothing is to follow."""
    batch_size: int
    """As used; see `batch_size_for`."""
    settings: EvaluationParams
    memory: MemoryLog

    def answers(self, questions: Sequence[Conversation]) -> list[str]:
        """The answer to each of these unanswered conversations, in order (generation.py)."""
        return generate_answers(
            self.model,
            self.processor,
            questions,
            batch_size=self.batch_size,
            max_new_tokens=self.settings.max_new_tokens,
            max_length=self.settings.max_length,
            complete=self.complete,
        )


def batch_size_for(questions: Sequence[Conversation], model_dir: Path, profile: ProfileParams, *, attempt: int) -> int:
    """The profile's batch size, or with `auto` what the device has room for, halved `attempt` times.

    model_dir: holds the model's config and processor. The same for all models of a size that answer these questions.
    Raises UserError where the batch cannot be halved so often.
    """
    batch_size = profile.evaluation.batch_size
    if batch_size == "auto":
        batch_size = _predicted_batch_size(questions, model_dir, profile)
    lowered = lowered_batch_size(batch_size, attempt)
    if lowered is None:
        raise UserError(f"a batch of {batch_size} cannot be halved {attempt} times")
    return lowered


def _predicted_batch_size(questions: Sequence[Conversation], model_dir: Path, profile: ProfileParams) -> int:
    # It imports TRL, which takes seconds.
    from stages.kit.memory.answers import Inference
    from stages.kit.memory.calibration import load_calibration
    from stages.kit.memory.fit import answers_at_once
    from stages.kit.memory.predict import capacity_bytes, predict_answers, repeated

    started, settings, memory = time.monotonic(), profile.evaluation, profile.memory
    inference = Inference(device=profile.device.one(), precision=memory.precision, attn=memory.attn)
    config, calibration = load_config(model_dir), load_calibration()
    capacity = capacity_bytes(inference.device, calibration)
    [[longest], *_] = longest_first(questions, 1)
    room = room_for_questions(settings.max_length, settings.max_new_tokens)
    processor = load_processor(model_dir, profile.images)
    question = encode(processor, [questions[longest]], padding_side="left", max_length=room)

    def predict(size: int) -> Prediction:
        batch = repeated(question, read_at_once(size))
        limits = {"batch_size": size, "max_new_tokens": settings.max_new_tokens}
        return predict_answers(inference, config, batch, calibration, **limits)

    # All of them at once, or the next larger power of two.
    batch_size = answers_at_once("auto", predict, capacity, limit=min(AT_ONCE, 2 * len(questions) - 1))
    log.info("batch size %d by predicted memory, which took %.1f s", batch_size, time.monotonic() - started)
    return batch_size


def load_answerer(
    model_dir: Path,
    profile: ProfileParams,
    samples: ModuleType,
    questions: Sequence[Conversation],
    *,
    answer_format: str | None,
    attempt: int,
) -> Answerer:
    """The model of a folder on one device of the profile, to answer these questions.

    samples: of the task that it is to answer for, in the form `answer_format`. attempt: times to halve the batch.
    Raises UserError where the batch cannot be halved so often, and for a model or an answer format that the task
    does not have.
    """
    settings, device = profile.evaluation, profile.device.one()
    batch_size = batch_size_for(questions, model_dir, profile, attempt=attempt)
    see_only(device)
    memory = MemoryLog(gpus_in_use(device))
    memory_params = profile.memory
    model = load_certified(model_dir, device=device, precision=memory_params.precision, attn=memory_params.attn).eval()
    memory.loaded()
    samples.check(model.config.model_type, answer_format)
    return Answerer(
        model=model,
        processor=load_processor(model_dir, profile.images),
        complete=completion_of(samples, answer_format),
        batch_size=batch_size,
        settings=settings,
        memory=memory,
    )
