"""docs/gpu/DEVICE.md: what was measured on one device, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.core.errors import bytes_text
from stages.kit.reporting.tables import Cell, Column, Row, Table, escape_markdown, markdown, seconds_text
from tools.gpu.device import Device
from tools.gpu.memory import comparisons
from tools.gpu.pieces import FACTS, Piece, Step
from tools.gpu.results import Results


@dataclass(frozen=True)
class Section:
    """A table with a line for each piece of a step. Keys of columns are those of the piece's data."""

    heading: str
    text: str
    columns: tuple[Column, ...]


FORMULA = (
    "Share of peak is model FLOP utilisation: the arithmetic that a step needs, over its time and the device's dense "
    "16-bit peak. A matrix of n weights on T tokens counts 2nT forward, 2nT for its input's gradient where one is "
    "needed, 2nT for its own where it is trained; attention over L tokens of width d counts 4L²d a layer, half where "
    "causal, twice backward. What checkpointing computes again does not count, nor does dequantization."
)
SECTIONS: dict[Step, Section] = {
    "recipes": Section(
        "Recipes, all the way",
        "With the tiny bases, few steps. Peak and plan are allocated bytes, of the training that the plan missed most. "
        "A merge deviates by a share of what training changed. Times are with the start of every process.",
        (
            *(Column("answers", "Trains, merges, answers", "d"), Column("loss", "Loss", ".3f")),
            *(Column("loss_kernels", "Loss by"), Column("peak_bytes", "Peak memory", "bytes")),
            *(Column("error", "Plan against it", "+.1%"), Column("logit_deviation", "Merge deviates", ".1%")),
            *(Column("train_s", "Training", "seconds"), Column("all_s", "All stages", "seconds")),
        ),
    ),
    "repeats": Section(
        "The same bytes",
        "A training done twice; killed after its first checkpoint, to go on from there; and run out of memory.",
        (
            *(Column("twice", "Same bytes twice"), Column("resumed", "Same bytes after a kill")),
            Column("recognised", "End of memory recognised"),
        ),
    ),
    "memory": Section(
        "Memory, predicted and measured",
        "One optimizer step against its prediction: scaled up from a few layers, as a plan has it, and exact, from all "
        "layers. `make calibrate` writes the constants that follow from it.",
        (
            *(Column("layers", "Layers", "d"), Column("measured", "Measured, all", "bytes")),
            *(Column(amount, f"Predicted {amount}", "+.1%") for amount in ("allocated", "reserved", "total")),
            *(Column(f"exact {amount}", f"Exact {amount}", "+.1%") for amount in ("allocated", "reserved", "total")),
            Column("retries", "Retries", "d"),
        ),
    ),
    "speed": Section(
        "Speed of training",
        f"Random weights, full samples; steps in seconds, the median of some. {FORMULA}",
        (
            *(Column("samples", "Samples a step", "d"), Column("step_s", "Step", ".3f")),
            *(Column("tokens_per_s", "Tokens/s", ",.0f"), Column("tflops_per_s", "TFLOP/s", ".1f")),
            *(Column("share_of_peak", "Share of peak", ".1%"), Column("idle_share", "GPU idle", ".0%")),
            *(Column("launches", "Launches", ",d"), Column("peak_bytes", "Peak memory", "bytes")),
            Column("attn", "Attention"),
        ),
    ),
    "answers": Section(
        "Speed of evaluation",
        "Random weights; prompt and answer in tokens, all answers of full length.",
        (
            *(Column("prompt", "Prompt", ",d"), Column("new_tokens", "Answer", ",d")),
            *(Column("samples_per_s", "Samples/s", ".2f"), Column("first_token_s", "First token, s", ".3f")),
            *(Column("further_token_s", "Each further, s", ".4f"), Column("peak_bytes", "Peak memory", "bytes")),
        ),
    ),
}


def page(device: Device, results: Results, pieces: Sequence[Piece]) -> str:
    found = [results.by_piece[piece.key] for piece in pieces if piece.key in results.by_piece]
    command = "make gpu" if device.kind == "cuda" else "make gpu ARGS=--dry-run"
    total = seconds_text(sum(result.seconds for result in found))
    lines = [f"# {device.name}", "", f"Measured by `{command}`: {len(found)} of {len(pieces)} pieces, in {total}."]
    if found:
        versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
        days = sorted({result.date[:10] for result in found})
        commits = ", ".join(dict.fromkeys(f"`{result.commit}`" for result in found if result.commit))
        lines += ["", f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, commit {commits or 'unknown'}; {versions}."]
    if facts := results.data(FACTS.key):
        lines += ["", "## Device and software", "", *_table("What", [Column("found", "Found")], _facts(facts).items())]
    for step, section in SECTIONS.items():
        rows = _rows(step, results, pieces)
        if rows:
            cells = {name: row if isinstance(row, str) else _cells(section.columns, row) for name, row in rows.items()}
            lines += ["", f"## {section.heading}", "", section.text]
            lines += ["", *_table("Piece", section.columns, cells.items())]
        spent = {name: row["spent"] for name, row in rows.items() if not isinstance(row, str) and row.get("spent")}
        if spent:
            lines += ["", "Where the time of a step goes, by kind of kernel, of all kernels' time:", ""]
            columns = [Column(kind, kind, ".0%") for kind in next(iter(spent.values()))]
            lines += _table("Piece", columns, [(name, list(shares.values())) for name, shares in spent.items()])
    problems = [f"- {escape_markdown(f'{result.piece}: {result.problem}')}" for result in found if result.problem]
    missing = [f"- {escape_markdown(piece.key)}" for piece in pieces if piece.key not in results.by_piece]
    for heading, entries in (("What did not work", problems), ("Not measured yet", missing)):
        if entries:
            lines += ["", f"## {heading}", "", *entries]
    return "\n".join(lines) + "\n"


def _rows(step: Step, results: Results, pieces: Iterable[Piece]) -> dict[str, Mapping[str, Any] | str]:
    """By piece its data, or its status where there is none."""
    found = {
        piece.name: results.by_piece[piece.key]
        for piece in pieces
        if piece.key in results.by_piece and piece.step == step
    }
    compared = comparisons(results) if step == "memory" else {}
    return {name: compared.get(name) or result.data or result.status for name, result in found.items()}


def _cells(columns: Sequence[Column], data: Mapping[str, Any]) -> list[Cell]:
    words = {True: "yes", False: "NO"}
    values = (data.get(column.key) for column in columns)
    return [words[value] if isinstance(value, bool) else value for value in values]


def _facts(facts: Mapping[str, Any]) -> dict[str, list[Cell]]:
    peak = facts["peak_tflops"]
    workspace = f"{facts['workspaces']} of {bytes_text(facts['workspace_bytes'])}"
    rows: dict[str, Cell] = {
        "Device": f"{facts['name']}, compute capability {'.'.join(map(str, facts['capability']))}",
        "Memory": f"{bytes_text(facts['memory_bytes'])}, a CUDA context takes {bytes_text(facts['context_bytes'])}",
        "Workspaces of cuBLAS": workspace if facts["workspaces"] else None,
        "Driver": facts["driver"],
        "CUDA, cuDNN": f"{facts['cuda']}, {facts['cudnn']}" if facts["cuda"] else None,
        "Python": f"{facts['python']} on {facts['system']}",
        "Peak, dense 16-bit": f"{peak:g} TFLOP/s ({facts['peak_source']})" if peak else "unknown: not in the table",
        **facts["probes"],
    }
    return {name: [cell] for name, cell in rows.items()}


def _table(heading: str, columns: Sequence[Column], rows: Iterable[tuple[str, Sequence[Cell] | str]]) -> list[str]:
    """rows: a name with its cells, or with a word in place of them."""
    filled = (
        (name, *([cells, *[None] * (len(columns) - 1)] if isinstance(cells, str) else cells)) for name, cells in rows
    )
    table = Table(columns=(Column("name", heading), *columns), rows=tuple(Row(cells=cells) for cells in filled))
    return markdown(table).splitlines()
