"""docs/gpu/DEVICE.md: what was measured on one device, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.core.errors import bytes_text
from stages.kit.reporting.tables import Cell, Column, Row, Table, escape_markdown, markdown, seconds_text
from tools.gpu.device import Device
from tools.gpu.kernels import KINDS
from tools.gpu.memory import AMOUNTS, comparisons
from tools.gpu.pieces import FACTS, Piece, Step
from tools.gpu.results import Results


@dataclass(frozen=True)
class Section:
    """A table with a line for each piece of a step. Keys of columns are those of the piece's data and errors."""

    step: Step
    heading: str
    text: str
    columns: tuple[Column, ...]


FORMULA = (
    "Share of peak is model FLOP utilisation: the arithmetic that a step needs, over its time and the device's dense "
    "16-bit peak. A matrix of n weights on T tokens counts 2nT forward, 2nT for its input's gradient where one is "
    "needed, 2nT for its own where it is trained; attention over L tokens of width d counts 4L²d a layer, half where "
    "causal, twice backward. What checkpointing computes again does not count, nor does dequantization."
)
SECTIONS: tuple[Section, ...] = (
    Section(
        "recipes",
        "Recipes, all the way",
        "With the tiny bases, few steps. Peak and plan are allocated bytes, of the training that the plan missed most. "
        "A merge deviates by a share of what training changed. Times are with the start of every process. Some "
        "trainings are done twice, killed after a checkpoint to go on from it, and run out of memory.",
        (
            *(Column("answers", "Trains, merges, answers", "d"), Column("loss", "Loss", ".3f")),
            *(Column("peak_bytes", "Peak memory", "bytes"), Column("error", "Plan against it", "+.1%")),
            Column("logit_deviation", "Merge deviates", ".1%"),
            *(Column("train_s", "Training", "seconds"), Column("all_s", "All stages", "seconds")),
            *(Column("twice", "Same bytes twice"), Column("resumed", "Same bytes after a kill")),
            Column("recognised", "End of memory recognised"),
        ),
    ),
    Section(
        "trainings",
        "Memory, predicted and measured",
        "One optimizer step against its prediction: scaled up from a few layers, as a plan has it, and exact, from all "
        "layers. `make calibrate` writes the constants that follow from it.",
        (
            *(Column("layers", "Layers", "d"), Column("total_bytes", "Measured, all", "bytes")),
            *(Column(amount, f"Predicted {amount}", "+.1%") for amount in AMOUNTS),
            *(Column(f"exact {amount}", f"Exact {amount}", "+.1%") for amount in AMOUNTS),
            Column("retries", "Retries", "d"),
        ),
    ),
    Section(
        "trainings",
        "Speed of training",
        f"Random weights, full samples; steps in seconds, the median of some. {FORMULA}",
        (
            *(Column("samples", "Samples a step", "d"), Column("step_s", "Step", ".3f")),
            *(Column("tokens_per_s", "Tokens/s", ",.0f"), Column("tflops_per_s", "TFLOP/s", ".1f")),
            *(Column("share_of_peak", "Share of peak", ".1%"), Column("idle_share", "GPU idle", ".0%")),
            *(Column("launches", "Launches", ",d"), Column("allocated_bytes", "Peak memory", "bytes")),
        ),
    ),
    Section(
        "trainings",
        "Where the time of a training goes",
        "By kind of kernel, of all kernels' time.",
        tuple(Column(kind, kind, ".0%") for kind, _ in KINDS),
    ),
    Section(
        "answers",
        "Speed of evaluation",
        "Random weights; prompt and answer in tokens, all answers of full length. Peak and plan are allocated bytes.",
        (
            *(Column("prompt", "Prompt", ",d"), Column("new_tokens", "Answer", ",d")),
            *(Column("samples_per_s", "Samples/s", ".2f"), Column("first_token_s", "First token, s", ".3f")),
            *(Column("further_token_s", "Each further, s", ".4f"), Column("peak_bytes", "Peak memory", "bytes")),
            Column("error", "Plan against it", "+.1%"),
        ),
    ),
)


def page(device: Device, results: Results, pieces: Sequence[Piece]) -> str:
    found = {piece: results.by_piece[piece.key] for piece in pieces if piece.key in results.by_piece}
    command = "make gpu" if device.kind == "cuda" else "make gpu ARGS=--dry-run"
    total = seconds_text(sum(result.seconds for result in found.values()))
    lines = [f"# {device.name}", "", f"Measured by `{command}`: {len(found)} of {len(pieces)} pieces, in {total}."]
    if found:
        versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
        days = sorted({result.date[:10] for result in found.values()})
        commits = ", ".join(dict.fromkeys(f"`{result.commit}`" for result in found.values() if result.commit))
        lines += ["", f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, commit {commits or 'unknown'}; {versions}."]
    if facts := results.data(FACTS.key):
        rows = [(name, [cell]) for name, cell in _facts(facts).items()]
        lines += ["", "## Device and software", "", *_table("What", [Column("found", "Found")], rows)]
    errors = comparisons(results)
    for section in SECTIONS:
        rows = [
            (piece.name, _cells(section.columns, {**result.data, **errors.get(piece.name, {})}, result.status))
            for piece, result in found.items()
            if piece.step == section.step
        ]
        if rows:
            lines += ["", f"## {section.heading}", "", section.text, "", *_table("Piece", section.columns, rows)]
    problems = [f"- {escape_markdown(f'{each.piece}: {each.problem}')}" for each in found.values() if each.problem]
    missing = [f"- {escape_markdown(piece.key)}" for piece in pieces if piece not in found]
    for heading, entries in (("What did not work", problems), ("Not measured yet", missing)):
        if entries:
            lines += ["", f"## {heading}", "", *entries]
    return "\n".join(lines) + "\n"


def _cells(columns: Sequence[Column], data: Mapping[str, Any], status: str) -> list[Cell]:
    """status: in the first column where there are no data."""
    words = {True: "yes", False: "NO"}
    values = [data.get(column.key) for column in columns] if data else [status, *[None] * (len(columns) - 1)]
    return [words[value] if isinstance(value, bool) else value for value in values]


def _facts(facts: Mapping[str, Any]) -> dict[str, Cell]:
    peak = facts["peak_tflops"]
    return {
        "Device": f"{facts['name']}, compute capability {'.'.join(map(str, facts['capability']))}",
        "Memory": f"{bytes_text(facts['memory_bytes'])}, a CUDA context takes {bytes_text(facts['context_bytes'])}",
        "Workspaces of cuBLAS": bytes_text(facts["workspaces_bytes"]) if facts["workspaces_bytes"] else None,
        "Driver": facts["driver"],
        "CUDA, cuDNN": f"{facts['cuda']}, {facts['cudnn']}" if facts["cuda"] else None,
        "Python": f"{facts['python']} on {facts['system']}",
        "Peak, dense 16-bit": f"{peak:g} TFLOP/s ({facts['peak_source']})" if peak else "unknown: not in the table",
        **facts["probes"],
    }


def _table(heading: str, columns: Sequence[Column], rows: Iterable[tuple[str, Sequence[Cell]]]) -> list[str]:
    filled = tuple(Row(cells=(name, *cells)) for name, cells in rows)
    return markdown(Table(columns=(Column("name", heading), *columns), rows=filled)).splitlines()
