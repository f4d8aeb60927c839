"""docs/gpu/DEVICE.md: what was measured on one device, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stages.core.errors import bytes_text
from stages.kit.reporting.tables import Cell, Column, Row, Table, escape_markdown, markdown, seconds_text
from tools.gpu.pieces import STEPS, Device, Piece, Step
from tools.gpu.results import Result, Results

FORMULA = (
    "Share of peak is model FLOP utilisation: the arithmetic that a step needs, over its time and the device's dense "
    "16-bit peak. A matrix of n weights on T tokens counts 2nT forward, 2nT for its input's gradient where one is "
    "needed, 2nT for its own where it is trained; attention over L tokens of width d counts 4L²d a layer, half where "
    "causal, twice backward. What checkpointing computes again does not count, nor does dequantization."
)
KINDS = ("matmul", "attention", "dequantization", "elementwise", "loss (Triton)", "optimizer", "copies", "other")


def page(device: Device, results: Results, pieces: Sequence[Piece]) -> str:
    found = [results.by_piece[piece.key] for piece in pieces if piece.key in results.by_piece]
    lines = [f"# {device.name}", "", *_origin(device, results, found, len(pieces))]
    for step in STEPS:
        of_step = [(piece.name, results.by_piece.get(piece.key)) for piece in pieces if piece.step == step]
        there = [(name, result) for name, result in of_step if result is not None]
        if there:
            heading, section = SECTIONS[step]
            lines += ["", f"## {heading}", "", *section(there)]
    problems = [result for result in found if result.problem]
    if problems:
        lines += ["", "## What did not work", ""]
        lines += [f"- {escape_markdown(result.piece)}: {escape_markdown(result.problem)}" for result in problems]
    missing = [piece.key for piece in pieces if piece.key not in results.by_piece]
    if missing:
        lines += ["", "## Not measured yet", "", *(f"- {escape_markdown(key)}" for key in missing)]
    return "\n".join(lines) + "\n"


def _origin(device: Device, results: Results, found: Sequence[Result], num_pieces: int) -> Iterator[str]:
    command = "make gpu" if device.kind == "cuda" else "make gpu ARGS=--dry-run"
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    days = sorted({result.date[:10] for result in found})
    commits = ", ".join(dict.fromkeys(f"`{result.commit}`" for result in found if result.commit))
    yield f"Measured by `{command}`: {len(found)} of {num_pieces} pieces, in {_total(found)}."
    if found:
        yield ""
        yield f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, commit {commits or 'unknown'}; {versions}."


def _total(found: Sequence[Result]) -> str:
    return seconds_text(sum(result.seconds for result in found))


Named = Sequence[tuple[str, Result]]


def _facts(named: Named) -> list[str]:
    data = named[0][1].data
    if not data:
        return []
    peak = data["peak_tflops"]
    rows: dict[str, Cell] = {
        "Device": f"{data['name']}, compute capability {data['capability']}",
        "Memory": f"{bytes_text(data['memory_bytes'])}, a CUDA context takes {bytes_text(data['context_bytes'])}",
        "Driver": data["driver"],
        "CUDA, cuDNN": f"{data['cuda']}, {data['cudnn']}" if data["cuda"] else None,
        "Python": f"{data['python']} on {data['system']}",
        "Peak, dense 16-bit": f"{peak:g} TFLOP/s ({data['peak_source']})" if peak else "unknown: not in the table",
        **data["probes"],
    }
    return _table((Column("what", "What"), Column("found", "Found")), list(rows.items()))


def _recipes(named: Named) -> list[str]:
    columns = (
        *(Column("recipe", "Recipe"), Column("state", "Trains, merges, answers"), Column("loss", "Loss", ".3f")),
        Column("kernels", "Loss by"),
        *(Column("peak", "Peak memory", "bytes"), Column("error", "Plan against it", "+.1%")),
        *(Column("deviation", "Merge deviates", ".1%"), Column("train", "Training", "seconds")),
        Column("all", "All stages", "seconds"),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, result in named:
        data = result.data
        if data:
            last = data["trainings"][-1]
            peaks = [(each["predicted_bytes"], each["peak_bytes"]) for each in data["trainings"]]
            worst = max((predicted / peak - 1 for predicted, peak in peaks), key=abs)
            kernels = ", ".join(sorted({each["loss_kernels"] for each in data["trainings"]}))
            figures = (last["loss"], kernels, max(peak for _, peak in peaks), worst, data["logit_deviation"])
            rows.append((name, "yes", *figures, data["seconds"]["train"], sum(data["seconds"].values())))
        else:
            rows.append((name, result.status, *(None,) * 7))
    said = (
        "With the tiny bases, few steps. Peak and plan are allocated bytes, of the training that the plan missed most. "
        "A merge deviates by a share of what training changed. Times are with the start of every process."
    )
    return [said, "", *_table(columns, rows)]


def _repeats(named: Named) -> list[str]:
    verdicts = (
        ("twice", "Same bytes twice"),
        ("resumed", "Same bytes after a kill"),
        ("recognised", "End of memory recognised"),
    )
    words = {True: "yes", False: "NO", None: None}
    rows = [
        (name, *(words[result.data.get(key)] if result.data else result.status for key, _ in verdicts))
        for name, result in named
    ]
    return _table((Column("piece", "Training"), *(Column(key, heading) for key, heading in verdicts)), rows)


def _memory(named: Named) -> list[str]:
    data = named[0][1].data
    amounts = ("allocated", "reserved", "total")
    columns = (
        *(Column("setting", "Setting"), Column("layers", "Layers", "d"), Column("measured", "Measured, all", "bytes")),
        *(Column(amount, f"Predicted {amount}", "+.1%") for amount in amounts),
        Column("problem", "Problem"),
    )
    rows = [
        (
            *(row["setting"], row.get("layers"), row.get("measured_bytes")),
            *(row.get("errors", {}).get(amount) for amount in amounts),
            row["problem"] or None,
        )
        for row in data.get("rows", ())
    ]
    said = "One optimizer step against its prediction. `make calibrate` writes the constants that follow from it."
    return [said, "", *_table(columns, rows)]


def _speed(named: Named) -> list[str]:
    columns = (
        *(Column("setting", "Setting"), Column("samples", "Samples a step", "d"), Column("step", "Step", ".3f")),
        *(Column("tokens", "Tokens/s", ",.0f"), Column("tflops", "TFLOP/s", ".1f")),
        *(Column("share", "Share of peak", ".1%"), Column("idle", "GPU idle", ".0%")),
        *(Column("launches", "Launches", ",d"), Column("peak", "Peak memory", "bytes"), Column("attn", "Attention")),
    )
    keys = (
        *("samples", "step_s", "tokens_per_s", "tflops_per_s", "share_of_peak", "idle_share"),
        *("launches", "peak_bytes", "attn"),
    )
    rows = [(name, *(result.data.get(key) for key in keys)) for name, result in named]
    lines = [
        f"Random weights, full samples; steps in seconds, the median of some. {FORMULA}",
        *(
            "",
            *_table(columns, rows),
            "",
            "Where the time of a step goes, by kind of kernel, of all kernels' time:",
            "",
        ),
    ]
    split = [
        (name, *(result.data["spent_s"].get(kind, 0.0) / sum(result.data["spent_s"].values()) for kind in KINDS))
        for name, result in named
        if result.data.get("spent_s")
    ]
    return lines + _table((Column("setting", "Setting"), *(Column(kind, kind, ".0%") for kind in KINDS)), split)


def _answers(named: Named) -> list[str]:
    columns = (
        *(Column("batch", "Batch"), Column("prompt", "Prompt", ",d"), Column("new", "Answer", ",d")),
        *(Column("rate", "Samples/s", ".2f"), Column("first", "First token, s", ".3f")),
        *(Column("further", "Each further, s", ".4f"), Column("peak", "Peak memory", "bytes")),
    )
    keys = ("prompt", "new_tokens", "samples_per_s", "first_token_s", "further_token_s", "peak_bytes")
    rows = [(name, *(result.data.get(key) for key in keys)) for name, result in named]
    return ["Random weights; prompt and answer in tokens, all answers of full length.", "", *_table(columns, rows)]


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[str]:
    table = Table(columns=tuple(columns), rows=tuple(Row(cells=tuple(cells)) for cells in rows))
    return markdown(table).splitlines()


SECTIONS: dict[Step, tuple[str, Callable[[Named], list[str]]]] = {
    "facts": ("Device and software", _facts),
    "recipes": ("Recipes, all the way", _recipes),
    "repeats": ("The same bytes", _repeats),
    "memory": ("Memory, predicted and measured", _memory),
    "speed": ("Speed of training", _speed),
    "answers": ("Speed of evaluation", _answers),
}
assert tuple(SECTIONS) == STEPS
