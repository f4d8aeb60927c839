import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from stages.data.conversation import Conversation
from stages.training.trainer import RecipeTrainer
from tests.training.small import trainer_on


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy disk it takes a minute; no test takes the power away."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def build(tiny_vlm: Path, answered: Sequence[Conversation]) -> Callable[..., RecipeTrainer]:
    return partial(trainer_on, tiny_vlm, answered)
