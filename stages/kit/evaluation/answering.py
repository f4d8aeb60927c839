"""A model that is loaded and ready to answer, as evaluation and prediction ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedModel

from stages.core.errors import UserError
from stages.core.params.schema import EvaluationParams, ProfileParams
from stages.kit.data.conversation import Conversation
from stages.kit.evaluation.generation import generate_answers
from stages.kit.memory_use.memory_log import MemoryLog
from stages.kit.models.load import see_only
from stages.kit.models.processors import Processor, load_processor
from stages.kit.models.trained import load_certified
from stages.kit.planning.ladder import lowered_batch_size


@dataclass(frozen=True, kw_only=True)
class Answerer:
    model: PreTrainedModel
    processor: Processor
    complete: Callable[[str], bool] | None
    """Says of an answer so far that nothing is to follow."""
    batch_size: int
    """As used, which is less than the settings' where memory ran out."""
    settings: EvaluationParams
    memory: MemoryLog

    def answers(self, ask: Callable[[int], Conversation], count: int) -> list[str]:
        """The answer to each of `count` unanswered conversations, in order (generation.py)."""
        return generate_answers(
            self.model,
            self.processor,
            ask,
            count,
            batch_size=self.batch_size,
            max_new_tokens=self.settings.max_new_tokens,
            max_length=self.settings.max_length,
            complete=self.complete,
        )


def halved(batch_size: int, attempt: int) -> int:
    """Raises UserError where the batch cannot be halved so often."""
    lowered = lowered_batch_size(batch_size, attempt)
    if lowered is None:
        raise UserError(f"a batch of {batch_size} cannot be halved {attempt} times")
    return lowered


def load_answerer(
    model_dir: Path, profile: ProfileParams, samples: ModuleType, *, target: str | None, attempt: int
) -> Answerer:
    """The model of a folder on one device of the profile, its batch halved `attempt` times.

    samples: of the task that it is to answer for, in the form `target`.
    Raises UserError where the batch cannot be halved so often, and for a model or a target that is not the task's.
    """
    settings, device = profile.evaluation, profile.device.one()
    batch_size = halved(settings.batch_size, attempt)
    see_only(device)
    memory = MemoryLog(device)
    memory_params = profile.memory
    model = load_certified(model_dir, device=device, precision=memory_params.precision, attn=memory_params.attn).eval()
    memory.loaded()
    samples.check(model.config.model_type, target)
    return Answerer(
        model=model,
        processor=load_processor(model_dir, profile.images),
        complete=samples.completion(target),
        batch_size=batch_size,
        settings=settings,
        memory=memory,
    )
