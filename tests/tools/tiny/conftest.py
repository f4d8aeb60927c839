"""Fixtures of the tiny bases' tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _other_tests_keep_their_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
