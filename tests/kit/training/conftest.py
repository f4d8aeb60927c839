import os

import pytest


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others write much, reaching the disk takes a minute; no test takes the power away."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
