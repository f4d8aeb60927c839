"""Fixtures that more than one folder uses."""

import gc
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from stages.data.conversation import Conversation
from tests.damage import quick

LONG = tuple(
    f"tests/{folder}/" for folder in ("evaluation", "families", "memory", "mixture", "models", "tools", "training")
)
"""Folders of tests that train or load models."""


def pytest_configure() -> None:
    """Tests send signals to what they start and to themselves; a process in the background is born to ignore two."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("quick", quick(50))
    settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files begin first: at the end, processes that share the tests have small ones left to even out."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return item.get_closest_marker("pipeline") is None, not item.nodeid.startswith(LONG)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Everything is imported by now. What stages collect in this process is then their own, and not torch's modules."""
    gc.freeze()


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Restores logging and the handler of SIGTERM, which stages run in this process change."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(), logging.getLogger("stages")]
    states = [(logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, states, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
    signal.signal(signal.SIGTERM, on_sigterm)


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen2-VL of about 0.25 million random weights. Not to be written to."""
    from tests.tiny_families import save_tiny_family

    # A seed of which no completion in the tests has an image's token.
    return save_tiny_family("qwen2_vl", tmp_path_factory.mktemp("models") / "vlm", seed=1)


@pytest.fixture(scope="session")
def tiny_dense() -> tuple[Any, Any]:
    """A Qwen2 of random weights and its tokenizer. Not to be changed."""
    from tests.tiny import tiny_text_model

    return tiny_text_model()


@pytest.fixture(scope="session")
def tiny_mixture() -> tuple[Any, Any]:
    """A Qwen2Moe of four experts, with the same tokenizer."""
    from tests.tiny import tiny_text_model

    return tiny_text_model(num_experts=4)


@pytest.fixture(scope="session")
def answered() -> list[Conversation]:
    from tests.tiny import table_conversation

    return [table_conversation(index) for index in range(8)]


@pytest.fixture(scope="session")
def probes(answered: list[Conversation]) -> list[Conversation]:
    return answered[:2]
