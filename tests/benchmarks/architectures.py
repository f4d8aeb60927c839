"""Tiny random models of architectures without an entry of families, through all stages, each in a process of its own.

Reads   the architectures of tests/architectures.py; data/tiny
Writes  their rows of the table in docs/extending.md; the others stay as they are
Run     python -m tests.benchmarks.architectures [MODEL_TYPE ...]
"""

from __future__ import annotations

import re
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import ROOT

PAGE = ROOT / "docs/extending.md"
HEADINGS = ("model_type", "models", "memory", "loss", "completions", "resumed", "merge")


def row_of(model_type: str, prepared: Path) -> str:
    """The row of an architecture, with the reason where a stage fails."""
    import transformers

    from tests.architectures import (
        ARCHITECTURES,
        BASE_DIR,
        all_the_way,
        completions,
        head_deviations,
        refusal_of,
        resumes_alike,
    )

    transformers.logging.set_verbosity_error()
    name, refused = ARCHITECTURES[model_type].name, ARCHITECTURES[model_type].refused
    with TemporaryDirectory() as folder:
        workspace = shutil.copytree(prepared, Path(folder) / "workspace", symlinks=True)
        if refused:
            assert refused in (reason := refusal_of(model_type, workspace)), reason
            return f"| `{model_type}` | {name} | refused: {refused} another | | | | |"
        way = all_the_way(model_type, workspace)
        loss = max(head_deviations(workspace / BASE_DIR).values())
        together, alone = completions(workspace / BASE_DIR)
        resumed = "same bytes" if resumes_alike(workspace) else "other bytes"
    same = "the same" if together == alone else "others"
    cells = (f"`{model_type}`", name, f"{way.memory_error:+.4%}", f"{loss:.0e}", same, resumed)
    return f"| {' | '.join(cells)} | {way.logit_deviation:.0e} |"


def write_rows(rows: dict[str, str]) -> None:
    """Put these rows, by model_type, into the page's table, in alphabetical order."""
    page = PAGE.read_text(encoding="utf-8")
    heading = f"| {' | '.join(f'`{each}`' if '_' in each else each for each in HEADINGS)} |\n"
    start = page.index(heading) + len(heading) + len("|---" * len(HEADINGS) + "|\n")
    table = re.match(r"(?:\|.*\n)*", page[start:])
    assert table is not None
    known = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` .*$", table[0], flags=re.MULTILINE)}
    ordered = sorted((known | rows).items())
    text = "".join(f"{row}\n" for _, row in ordered)
    PAGE.write_text(page[:start] + text + page[start + len(table[0]) :], encoding="utf-8")


def main(chosen: list[str]) -> None:
    from tests.architectures import ARCHITECTURES, prepared_workspace

    with TemporaryDirectory() as folder:
        prepared = prepared_workspace(Path(folder) / "prepared")
        for model_type in chosen or ARCHITECTURES:
            with get_context("fork").Pool(1) as process:  # a stage leaves settings in its process
                write_rows({model_type: (row := process.apply(row_of, (model_type, prepared)))})
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
