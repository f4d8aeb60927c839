"""Fixtures of the tests that predict memory."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick_collection() -> Iterator[None]:
    """A Trainer looks through every object of the process for garbage, twice a run: a quarter of a second each."""
    import torch  # noqa: F401 - what is imported later would still be looked through
    import trl  # noqa: F401

    gc.freeze()
    yield
    gc.unfreeze()
