"""Set the constants of memory predictions by what `make gpu` has measured.

Reads   .bakeoff/gpu/results.jsonl, or the file that is named
Writes  stages/memory/calibration.yaml, a part of every plan: its diff is a proposal to look at and commit
Run     .venv/bin/python -m tools.calibrate
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from ruamel.yaml import YAML

from stages.core.atomic import atomic_write
from stages.core.errors import UserError
from stages.memory.calibration import SHIPPED_PATH, load_calibration

RESULTS_PATH = Path(".bakeoff/gpu/results.jsonl")
MARGIN, LEAST_LOW, LEAST_HIGH = 0.01, 0.05, 0.1
"""A bound is wider than the worst measured error by MARGIN, as other settings may differ more, and has a least value:
`make gpu` repeats one batch, while those of a training differ in size, which leaves more gaps (6.9 % were seen)."""


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=RESULTS_PATH)
def main(results: Path) -> None:
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    facts = [index for index, line in enumerate(lines) if line["job"] == "facts" and line["data"]]
    latest = lines[facts[-1] :] if facts else []
    trainings = [line["data"] for line in latest if line["job"] == "trainings" and line["data"]]
    if not trainings:
        raise UserError(f"{results} has no training after the facts of its device; measure them with: make gpu")
    device = latest[0]["data"]
    source = f"{device['name']}, {device['versions']}, {latest[-1]['date'][:10]}"
    for constant, value in (values := constants(trainings)).items():
        click.echo(f"{constant}: {value:g} ({source})")
    atomic_write(recalibrated(SHIPPED_PATH.read_text(encoding="utf-8"), values, source), SHIPPED_PATH)
    load_calibration()
    click.echo(f"wrote {SHIPPED_PATH}; look at it with: git diff")


def constants(trainings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Values for calibration.yaml from one or more trainings, each with its prediction.

    Each bound is the worst error of reserved or total bytes relative to the prediction, widened, in thousandths,
    rounded outward. The total is predicted with the context as measured, not assumed. Where the largest share of the
    peak is twice a training's, its GPU waited for operators.
    """
    # Memory in use beside torch's allocator; the median, since kernels differ by setting.
    context = round(median(each["total_bytes"] - each["reserved_bytes"] for each in trainings))
    share = max((each["share_of_peak"] or 0 for each in trainings), default=0)
    operators_us = [each["operator_us"] for each in trainings if 0 < (each["share_of_peak"] or 0) < share / 2]
    excess = []
    for each in trainings:
        reserved = each["predicted"]["reserved_bytes"]
        excess += [each["reserved_bytes"] / reserved - 1, each["total_bytes"] / (reserved + context) - 1]
    low, high = min(min(excess) - MARGIN, -LEAST_LOW), max(max(excess) + MARGIN, LEAST_HIGH)
    return {
        "context_mib": round(context / 2**20, 1),
        **({"share_of_peak": round(share, 2)} if share else {}),
        **({"operator_us": round(median(operators_us))} if operators_us else {}),
        "reserved_error_low": math.floor(round(low * 1000, 6)) / 1000,
        "reserved_error_high": math.ceil(round(high * 1000, 6)) / 1000,
    }


def recalibrated(text: str, values: Mapping[str, float], measured: str) -> str:
    """calibration.yaml with these values; comments, reasons and all else stay. measured: device, versions and day."""
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True
    content: Any = yaml.load(text)
    for name, value in values.items():
        content[name]["value"] = int(value) if value == int(value) else value
        content[name]["measured"] = measured
    out = io.StringIO()
    yaml.dump(content, out)
    return out.getvalue()


if __name__ == "__main__":
    main()
