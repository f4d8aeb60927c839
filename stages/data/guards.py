"""Guards: conversations that nobody trains on, to show what a training loses elsewhere."""

from __future__ import annotations

from pathlib import Path

from stages.core.errors import UserError
from stages.core.records import obtain, rebuild
from stages.data.conversation import Conversation, message
from stages.data.parquet import read_rows
from stages.data.splits import IMAGE_COLUMN

GUARDS_DIR = Path("data/guards")
GUARD = "guard_"
"""Begins the names of metrics that are perplexities on guards, and of their columns."""
GUARDS_FILE = "guards.parquet"
"""A run's likelihoods of the rows of guards: `guard`, `id`, `nats` (negative log-likelihood) and `tokens`."""


def read_guard(name: str) -> list[Conversation]:
    """The rows of a prepared guard, in order. Raises UserError if it is not prepared, is damaged or has images."""
    path, stage = GUARDS_DIR / name / "val.parquet", f"guard@{name}"
    if not path.is_file():
        raise UserError(f"no prepared guard at {path}; {obtain(stage)}")
    rows = list(read_rows(path, fix=f"rebuild it with: {rebuild(stage)}"))
    if shown := next((row["id"] for row in rows if row.get(IMAGE_COLUMN)), None):
        raise UserError(f"guards.{name} has images, first in {shown}; leave such conversations out of it")
    return [
        Conversation(
            sample_id=row["id"],
            messages=[message(each["role"], each["content"]) for each in row["messages"]],
            unlearnt=row.get("unlearnt", ()),
        )
        for row in rows
    ]
