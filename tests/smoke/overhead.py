"""Measures what a container adds to each stage, against a plain process.

Run     .venv/bin/python -m tests.smoke.overhead [ROUNDS]      (after make image TARGET=cpu; about a minute a round)

Every stage is run by both engines in turn, in a copy of this checkout with few steps; the figures are medians.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.smoke.conftest import ENGINE, copy_of_checkout, environment

STAGES = (
    ("base", "vlm"),
    ("prepare", "nutrition-tables"),
    ("plan", "r1-llm-only"),
    ("train", "r1-llm-only"),
    ("merge", "r1-llm-only"),
    ("evaluate", "r1-llm-only"),
    ("compare", "detection"),
)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        workspace = copy_of_checkout(Path(folder))
        for index in range(rounds):
            for stage, name in STAGES:
                for engine in sorted(("process", ENGINE), reverse=index % 2 == 0):
                    seconds.setdefault((stage, engine), []).append(run(workspace, engine, stage, name))
    print(f"{'stage':10}{'process':>10}{ENGINE:>10}{'ratio':>8}   (seconds, medians of {rounds})")
    for stage, _ in STAGES:
        plain, contained = (statistics.median(seconds[stage, engine]) for engine in ("process", ENGINE))
        print(f"{stage:10}{plain:10.2f}{contained:10.2f}{contained / plain:8.2f}")


def run(workspace: Path, engine: str, stage: str, name: str) -> float:
    """Seconds that docker/run takes for one stage."""
    started = time.monotonic()
    subprocess.run(
        ["docker/run", stage, name],
        cwd=workspace,
        env=environment(BAKEOFF_ENGINE=engine),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.monotonic() - started


if __name__ == "__main__":
    main()
