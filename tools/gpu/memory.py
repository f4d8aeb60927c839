"""The calibration of memory predictions, as `make calibrate` does it, and with the same file of results."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tools.calibrate.children import Children
from tools.calibrate.outcomes import Session, comparisons
from tools.calibrate.settings import settings_for
from tools.calibrate.work import facts_of, measure_settings
from tools.gpu.pieces import Kind

RESULTS_DIR = Path(".bakeoff/calibration")


def calibrate(device: Kind, *, paged: bool, left_s: float) -> dict[str, Any]:
    """Measure what is not in the file yet; after `left_s` seconds nothing more starts."""
    deadline = time.monotonic() + left_s
    settings, path = settings_for(device, paged=paged), RESULTS_DIR / f"{device}.jsonl"
    children = Children(RESULTS_DIR / "logs", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    session = Session.begin(facts_of(device, children), path)
    workers = max(1, (os.cpu_count() or 1) // 4)
    measure_settings(settings, session, path, children, device=device, workers=workers, deadline=deadline)
    return report(session, [setting.name for setting in settings])


def report(session: Session, names: list[str]) -> dict[str, Any]:
    compared = {each.setting: each for each in comparisons(session)}
    rows = []
    for name, outcome in session.outcomes.items():
        row: dict[str, Any] = {"setting": name, "problem": outcome.problem}
        if name in compared:
            each = compared[name]
            row |= {
                "layers": sum(each.layers),
                "measured_bytes": each.measured["total"],
                "errors": {amount: round(each.error(amount), 4) for amount in each.measured},
            }
        rows.append(row)
    left = len([name for name in names if name not in session.outcomes])
    failed = len([each for each in session.outcomes.values() if not each.is_final])
    status = "unfinished" if left else "failed" if failed else "done"
    problem = f"{left} of {len(names)} settings are left" if left else f"{failed} settings failed" if failed else ""
    return {"status": status, "problem": problem, "rows": rows}
