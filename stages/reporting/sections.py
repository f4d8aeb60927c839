"""The tables and sentences of a comparison that the terminal, the markdown file, the page and the model card share."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain
from math import isclose
from typing import Any

from rich.console import Console
from rich.text import Text

from stages.core.errors import join_truncated, pluralize
from stages.core.families import unlisted_words
from stages.core.lineage import short
from stages.core.params.schema import PARTS, LoraParams
from stages.core.provenance import Provenance
from stages.core.records import shown
from stages.evaluation.statistics import LEVEL
from stages.planning.plan import Plan
from stages.reporting.compare import Comparison, Contender, Metric, export_pairs, p_words
from stages.reporting.evidence import FEWEST_TO_SHARE, POWER, too_few
from stages.reporting.runs import REBATCHED, Run
from stages.reporting.tables import (
    ABSENT,
    Cell,
    Column,
    Row,
    Table,
    escape_markdown,
    in_parts,
    markdown,
    terminal_table,
)

MOST_CHANGED = 5
"""Samples of an export that a report shows with their changed completions."""
TEXT_WIDTH = 120
"""Characters; the width of table.txt."""
_NOT_SETTINGS = {"name", "model_type", "skip_too_long", "trainable", "features_bytes"}
_MEMORY_KINDS = {
    "cpu_allocated": "tensors on the CPU",
    "cuda_allocated": "tensors on the GPU",
}
_DONE = {
    "train": "trained",
    "merge": "merged",
    "evaluate": "evaluated",
    "baseline": "evaluated",
    "exported": "evaluated",
}
"""Participle by stage."""


def report_tables(comparison: Comparison) -> dict[str, Table]:
    """The tables of a report that have any rows, by name, in the order of the page."""
    runs = comparison.runs
    differing, shared = settings_tables({run.name: plan_settings(run.plan) for run in runs if run.plan})
    tables = {
        "models": comparison_table(comparison),
        "evidence": evidence_table(comparison),
        "differing": differing,
        "shared": shared,
        "trainable": trainable_table(runs),
        "costs": cost_table(runs),
        "quantization": quantization_table(runs, comparison.report.primary),
        "exports": exports_table(comparison),
        "changed": changed_table(comparison),
        "memory": memory_table(runs),
        "origins": origins_table(runs),
    }
    return {name: table for name, table in tables.items() if table.rows}


def comparison_table(comparison: Comparison) -> Table:
    """A row a model; those not run are there too, empty, with the command that runs them.

    A metric with an interval of its own has a second column for it; the primary one's is at the end of the table.
    """
    metrics, primary = comparison.report.metrics, comparison.report.primary
    scores = [score for contender in comparison.evaluated for score in contender.scores.items()]
    with_interval = {key for key, score in scores if score and score.interval and key != primary.key}
    columns = [Column("model", "Model")]
    for metric in metrics:
        column = Column(metric.key, metric.heading, metric.format)
        columns += [column, replace(column, heading="95% interval")] if metric.key in with_interval else [column]
    columns.append(Column(primary.key, "95% interval", primary.format))
    if comparison.over_seeds:
        columns += [Column("seeds", "Seeds", "d"), Column("between_seeds", "Between seeds", ".3f")]
    rows = []
    for contender in comparison.contenders:
        cells: list[Cell] = [contender.name]
        for metric in metrics:
            score = contender.scores.get(metric.key)
            interval = [score.interval if score else None]
            cells += [contender.metric(metric.key), *(interval if metric.key in with_interval else [])]
        ranked, best = contender.score if contender.runs else None, contender.name in comparison.leaders
        cells.append(ranked.interval if ranked else None)
        if comparison.over_seeds:
            cells += [len(contender.runs) or None, ranked.between_seeds if ranked else None]
        mark = "best" if comparison.conclusive else comparison.report.extreme
        cells.append(contender.role if not best else mark if len(comparison.leaders) == 1 else "tie")
        rows.append(Row(cells=tuple(cells), emphasised=best, note=contender.note))
    return Table(columns=(*columns, Column("role", "")), rows=tuple(rows), title="The models")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, the headline and the insights, as text that no name can turn into markup."""
    table = comparison_table(comparison)
    for part in in_parts(table, console.width):
        console.print()
        console.print(terminal_table(part))
    for name, note in table.notes:
        console.print(Text(f"{name}: {note}", style="dim"), soft_wrap=True)
    console.print()
    console.print(Text(comparison.headline, style="bold"), soft_wrap=True)
    for insight in comparison.insights:
        console.print(Text(f"  {insight.topic}: {insight.words}"), soft_wrap=True)
    if (costs := quantization_table(comparison.runs, comparison.report.primary)).rows:
        console.print()
        console.print(Text(costs.lead, style="dim"), soft_wrap=True)
        for part in in_parts(costs, console.width):
            console.print(terminal_table(part))
        console.print()
    for line in (fairness(comparison), *origin_warnings(comparison.all_runs)):
        console.print(Text(line), soft_wrap=True)
    for line in design_words(comparison):
        console.print(Text(line, style="dim"), soft_wrap=True)


def comparison_text(comparison: Comparison) -> str:
    """The terminal's output without colours, TEXT_WIDTH wide."""
    console = Console(file=io.StringIO(), width=TEXT_WIDTH, color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as capture:
        print_comparison(comparison, console)
    return capture.get()


def comparison_markdown(comparison: Comparison) -> str:
    tables = report_tables(comparison)
    insights = "\n".join(
        f"- {escape_markdown(insight.topic)}: {escape_markdown(insight.words)}" for insight in comparison.insights
    )
    fair = escape_markdown(" ".join((fairness(comparison), *origin_warnings(comparison.all_runs))))
    design = escape_markdown(" ".join(design_words(comparison)))
    text = (
        f"# {escape_markdown(comparison.report.title)}\n\n{escape_markdown(comparison.headline)}\n\n"
        f"{markdown(tables['models'])}\n{insights}\n\n{fair}\n\n{design}\n"
    )
    for name, table in tables.items():
        if name != "models":
            lead = f"{escape_markdown(table.lead)}\n\n" if table.lead else ""
            text += f"\n## {escape_markdown(table.title)}\n\n{lead}{markdown(table)}"
    return text


def flat_metrics(comparison: Comparison) -> dict[str, float | str]:
    """Values for `dvc metrics`: the best model, and of each model the metrics with an interval."""
    flat: dict[str, float | str] = {"best": comparison.best.name, "evidence_enough": comparison.conclusive}
    for contender in comparison.evaluated:
        for key, score in contender.scores.items():
            if score and (score.interval or key == comparison.report.primary.key):
                flat[f"{contender.name}.{key}"] = score.mean
            if score and score.interval:
                flat[f"{contender.name}.{key}_interval"] = f"[{score.interval.low:.3f}, {score.interval.high:.3f}]"
    return flat


def flat_costs(comparison: Comparison) -> dict[str, float | str]:
    """Costs of each model's training for `dvc metrics`: memory in GiB, predicted and measured, and minutes."""
    flat: dict[str, float | str] = {}
    for run in comparison.runs:
        if run.training:
            sizes = {kind: run.metrics.get(f"memory_{kind}_gib") for kind in ("predicted", "measured")}
            flat |= {f"{run.name}.{kind}_gib": size for kind, size in sizes.items() if size is not None}
            flat[f"{run.name}.train_minutes"] = round(run.training.train_seconds / 60, 2)
    return flat


def evidence_table(comparison: Comparison) -> Table:
    """A row for each question that is decided."""
    columns = (
        Column("question", "Question"),
        Column("difference", "Difference", "+.3f"),
        Column("difference", "95% interval", "+.3f"),
        Column("relative", "Relative", "+.1%"),
        Column("p", "p"),
        Column("corrected_p", "Corrected p"),
        Column("ahead", "Samples ahead", "d"),
        Column("behind", "Behind", "d"),
        Column("detectable", f"Smallest shown in {POWER:.0%}", ".3f"),
    )
    rows: list[list[Cell]] = []
    for insight in comparison.insights:
        if gap := insight.difference:
            p_values = (p_words(gap.p_value), p_words(gap.adjusted_p))
            cells = (gap.mean, gap.interval, gap.relative, *p_values, gap.ahead, gap.behind)
            rows.append([insight.topic, *cells, gap.detectable])
    lead = (
        "The interval and p belong to a single question; corrected p takes into account that all of them were asked. "
        "Ahead and behind are the samples on which every model of the first beats, or loses to, every model of the "
        "second; every model of an export, the one that it was made from."
    )
    return Table.of(columns, rows, title="The evidence in figures", lead=lead)


def design_words(comparison: Comparison) -> list[str]:
    """The limits that samples, seeds, split and engines set to the claims of the report, a sentence or two each."""
    number, unit = comparison.samples_text, "group" if comparison.counts[1] else "sample"
    samples = f"{number}; intervals are {LEVEL:.0%}, paired by {unit}."
    limits = [*_run_words(comparison.all_runs), *_batch_words(comparison), *comparison.notes]
    if too_few(*comparison.counts):
        return [f"{number}: too few for any interval or verdict.", *limits]
    families = [insight.difference.family for insight in comparison.insights if insight.difference]
    if families and comparison.over_seeds:
        samples += (
            f" Of such reports, with {families[0]} questions each, at most one in twenty calls anything better, worse "
            "or as good that is not."
        )
    elif families:
        samples += f" p is corrected for {pluralize(families[0], 'question')}."
    return [samples, *_alike_words(comparison), *_power_words(comparison), *_seed_words(comparison), *limits]


def _alike_words(comparison: Comparison) -> Iterator[str]:
    intervals = [(each.name, each.score.interval) for each in comparison.evaluated]
    if alike := [name for name, interval in intervals if interval and isclose(interval.low, interval.high)]:
        names = ", ".join(alike)
        yield f"All samples of {names} score alike: an interval without width is no evidence about other samples."


def _power_words(comparison: Comparison) -> Iterator[str]:
    primary = [insight for insight in comparison.insights if insight.metric.key == comparison.report.primary.key]
    if shown := [gap.detectable for insight in primary if (gap := insight.difference) and gap.detectable]:
        low, high = f"{min(shown):.3f}", f"{max(shown):.3f}"
        size = low if low == high else f"{low} to {high}, depending on the pair,"
        yield (
            f"Roughly, a true difference in {comparison.report.primary_words} of {size} is shown by {POWER:.0%} of "
            "such reports; a smaller one by fewer."
        )


def _seed_words(comparison: Comparison) -> Iterator[str]:
    trainings = [len(each.runs) for each in comparison.evaluated if each.baseline and not each.left_out]
    if not trainings:
        return
    if comparison.over_seeds and min(trainings) < FEWEST_TO_SHARE:
        yield "Two seeds hardly show how much seeds vary: from three of each on, recipes share what they know of it."
    elif comparison.over_seeds:
        yield (
            "The recipes are assumed to vary between seeds about as much as one another, and none less than its own "
            "trainings do."
        )
    else:
        yield (
            "Each recipe was trained once: this compares these models, not the recipes, which give other models under "
            f"other seeds. For the recipes: dvc exp run --queue -S 'seed=42,43,44' compare@{comparison.report.task}, "
            f"then dvc queue start, then make compare TASK={comparison.report.task}"
        )


def _run_words(runs: Sequence[Run]) -> Iterator[str]:
    for model_type in sorted({run.plan.model_type for run in runs if run.plan and run.plan.model_type}):
        if words := unlisted_words(model_type):
            yield f"{words}."
    if splits := {str(run.metrics["split"]) for run in runs if "split" in run.metrics}:
        reason = ", which settings are chosen by: no result to report." if "selection" in splits else "."
        yield f"Scored on the split {', '.join(sorted(splits))}{reason}"
    by_engine = _grouped((str(run.metrics.get("engine", "transformers")), run.name) for run in runs)
    if len(by_engine) > 1:
        engines = "; ".join(f"{engine}: {', '.join(names)}" for engine, names in by_engine.items())
        yield f"Completions are not all from one engine, and differences may come from the engines ({engines})."
    elif "transformers" not in by_engine:
        yield f"Completions are from {next(iter(by_engine))}, which was checked against transformers."


def _batch_words(comparison: Comparison) -> Iterator[str]:
    """The sizes of the batches, and what another one changed."""
    runs, key = comparison.all_runs, comparison.report.primary.key
    again = [run for run in runs if f"{REBATCHED}{key}" in run.metrics]
    if not again:
        return
    by_size = _grouped((str(size), run.name) for run in runs if (size := run.metrics.get("batch_size")))
    sizes = "; ".join(f"{size}: {', '.join(names)}" for size, names in by_size.items())
    if len(by_size) > 1:
        yield (
            f"Completions were generated in batches of several sizes ({sizes}), which may explain differences: set "
            "evaluation.batch_size in the profile."
        )
    noise = max(abs(float(run.metrics[f"{REBATCHED}{key}"]) - float(run.metrics[key])) for run in again)
    changed = ", ".join(f"{float(run.metrics[f'{REBATCHED}changed']):.1%} of {run.name}'s" for run in again)
    yield (
        f"In batches of half the size, {changed} completions are others, and {comparison.report.primary_words} changes "
        f"by up to {noise:.3f}: smaller differences are what another batch size gives."
    )
    matters = [gap.matters for each in comparison.insights if (gap := each.difference) and gap.matters]
    if matters and matters[0] < noise:
        yield f"compare.matters, {matters[0]:g}, is less than that."


def fairness(comparison: Comparison) -> str:
    """The settings in which the recipes differ: all that a difference between their results can come from."""
    recipes = {run.name: plan_settings(run.plan) for run in comparison.runs if run.plan}
    if len(recipes) < 2:
        return "No two recipes have been evaluated."
    differing, shared = settings_tables(recipes)
    names = ", ".join(str(row.cells[0]) for row in differing.rows)
    if not names:
        return "The recipes differ in no setting."
    return f"The recipes differ in {names}; their other {len(shared.rows)} settings are the same."


def plan_settings(plan: Plan) -> dict[str, str]:
    """Every setting of a plan by the path that params.yaml has in a recipe or in `memory`, without what is derived, and
    without an adapter's settings that are the defaults."""
    settings = flattened({key: value for key, value in asdict(plan).items() if key not in _NOT_SETTINGS})
    usual = [(f"recipe.lora.{field.name}", field.default) for field in fields(LoraParams)]
    return {
        re.sub(r"^(recipe|memory)\.", "", path): _setting_text(value)
        for path, value in settings
        if (path, value) not in usual
    }


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted path, value); an empty mapping is a value."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _setting_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format(value, "g")
    return ABSENT if value is None or value == {} else str(value)


def settings_tables(by_run: Mapping[str, Mapping[str, str]]) -> tuple[Table, Table]:
    """(settings that differ between the runs, a row a setting and a column a run; settings that all share)."""
    differing, shared = [], []
    for path in dict.fromkeys(path for settings in by_run.values() for path in settings):
        values = [settings.get(path, ABSENT) for settings in by_run.values()]
        if len(set(values)) == 1:
            shared.append((path, values[0]))
            continue
        # A tie goes to the value seen first, which Counter keeps in order.
        usual = Counter(values).most_common(1)[0][0]
        marked = frozenset(column for column, value in enumerate(values, start=1) if value != usual)
        differing.append(Row(cells=(path, *values), marked=marked))
    of_runs = Table(
        columns=tuple(Column(heading, heading) for heading in ("Setting", *by_run)),
        rows=tuple(differing),
        title="Settings that differ",
        lead="A value is marked if it is not the most common of its row.",
    )
    return of_runs, Table.of(("Setting", "Value"), shared, title="Settings that all recipes share")


def trainable_table(runs: Sequence[Run]) -> Table:
    """Trained parameters by part, and their share of all; no row for a base, which trains none."""
    counts = {run.name: run.training.trainable for run in runs if run.training}
    parts = [part for part in PARTS if any(count.get(part) for count in counts.values())]  # text models have one only
    columns = (
        Column("model", "Model"),
        *(Column(part, part, ",") for part in parts),
        Column("total", "Trained", ","),
        Column("all", "All parameters", ","),
        Column("share", "Share", ".2%"),
    )
    rows = []
    for name, count in counts.items():
        total, everything = count.get("total"), count.get("all")
        share = total / everything if total is not None and everything else None
        rows.append((name, *(count.get(part) for part in parts), total, everything, share))
    return Table.of(columns, rows, title="Trained parameters")


def cost_table(runs: Sequence[Run]) -> Table:
    """Steps, time, memory and energy of training, and the speed of evaluation."""
    columns = (
        Column("model", "Model"),
        Column("num_steps", "Steps", ","),
        Column("kept_step", "Kept step", ","),
        Column("skipped_steps", "Skipped steps", ","),
        Column("train_seconds", "Training time", "seconds"),
        Column("samples_per_second", "Training samples/s", ".1f"),
        Column("peak_memory_bytes", "Peak memory", "bytes"),
        Column("memory_error", "Predicted, off by", "+.1%"),
        Column("memory_kind", "Memory of"),
        Column("gpu_utilization", "GPU busy", ".0%"),
        Column("gpu_watts", "Power, W", ",.0f"),
        Column("gpu_kwh", "Energy, kWh", ".3g"),
        Column("final_loss", "Final loss", ".4f"),
        Column("evaluation_samples_per_second", "Evaluation samples/s", ".1f"),
    )
    rows = []
    for run in runs:
        values: dict[str, Any] = {
            **(asdict(run.training) if run.training else {}),
            "memory_error": run.metrics.get("memory_error"),
            "evaluation_samples_per_second": run.metrics.get("samples_per_second"),
        }
        values["memory_kind"] = _MEMORY_KINDS.get(values.get("memory_kind", ""), values.get("memory_kind"))
        rows.append({"model": run.name, **values})
    rare = ("kept_step", "skipped_steps", "gpu_utilization", "gpu_watts", "gpu_kwh")
    shown = [each for each in columns if each.key not in rare or any(row.get(each.key) for row in rows)]
    return Table.of(shown, ([row.get(column.key) for column in shown] for row in rows), title="Time and memory")


def quantization_table(runs: Sequence[Run], metric: Metric) -> Table:
    """The cost of the merge for each model that was trained on quantized weights, by one of the task's metrics."""
    columns = (
        Column("model", "Model"),
        Column("samples", "Samples", ","),
        Column("trained", f"{metric.heading} as trained", metric.format),
        Column("merged", "Merged", metric.format),
        Column("same_completions", "Same completions", ","),
        Column("logit_deviation", "Logits off by", ".1%"),
    )
    rows = []
    for run in runs:
        if run.certificate and (cost := run.certificate.quantization_cost):
            figures = cost.trained.get(metric.key), cost.merged.get(metric.key)
            rows.append((run.name, cost.samples, *figures, cost.same_completions, cost.logit_deviation))
    lead = (
        "Adapters trained on weights in 4 bits are merged into the unquantized ones. Both models completed the same "
        "validation samples."
    )
    return Table.of(columns, rows, title="Merged out of 4 bits", lead=lead)


def _exports(comparison: Comparison) -> Iterator[tuple[Contender, list[tuple[str, str, str]]]]:
    """The exports that were scored, each with (sample, completion of its model, its own), if its model was scored."""
    by_name = {contender.name: contender for contender in comparison.contenders}
    for contender in comparison.evaluated:
        if contender.export_of:
            pairs = export_pairs(contender, by_name[contender.export_of])
            of_seeds = (zip(own.sample_ids, model.completions, own.completions, strict=True) for own, model in pairs)
            yield contender, list(chain.from_iterable(of_seeds))


def exports_table(comparison: Comparison) -> Table:
    """A row for each export that was scored: its size and speed, and what it shares with its model."""
    verdicts = {each.ours: each.difference.verdict for each in comparison.insights if each.difference}
    columns = (
        Column("model", "Export"),
        Column("export_of", "Of"),
        Column("size", "Size", "bytes"),
        Column("tokens", "Tokens/s", ",.1f"),
        Column("same", "Same completions", ","),
        Column("completions", "Completions", ","),
        Column("verdict", "Against its model"),
    )
    rows = []
    for export, pairs in _exports(comparison):
        same = sum(ours == theirs for _, theirs, ours in pairs) if pairs else None
        figures = map(export.metric, ("size_bytes", "tokens_per_second"))
        rows.append((export.name, export.export_of, *figures, same, len(pairs) or None, verdicts.get(export.name)))
    return Table.of(columns, rows, title="Exports", lead="Each export was scored by what serves it.")


def changed_table(comparison: Comparison) -> Table:
    """The first samples of each export with another completion than its model's."""
    headings = ("Export", "Sample", "Completion of its model", "Of the export")
    rows = [
        (export.name, sample, shown(theirs), shown(ours))
        for export, pairs in _exports(comparison)
        for sample, theirs, ours in [pair for pair in pairs if pair[1] != pair[2]][:MOST_CHANGED]
    ]
    lead = f"At most {MOST_CHANGED} of each export."
    return Table.of(headings, rows, title="Completions that an export changed", lead=lead)


def memory_table(runs: Sequence[Run]) -> Table:
    """Memory of each stage before it loaded its model, after, at its peak, and what that left; as they ran."""
    columns = (
        Column("model", "Model"),
        Column("stage", "Stage"),
        Column("free", "Free before", "bytes"),
        Column("before_load", "Before loading", "bytes"),
        Column("after_load", "After loading", "bytes"),
        Column("peak", "Peak", "bytes"),
        Column("left", "Left for the work", "bytes"),
        Column("memory_kind", "Memory of"),
    )
    rows = [
        (
            run.name,
            memory.stage if memory.name == run.name else f"{memory.stage} {memory.name}",
            memory.free_before_bytes,
            memory.used_before_bytes,
            memory.used_loaded_bytes,
            memory.peak_bytes,
            memory.free_loaded_bytes,
            f"tensors on {pluralize(memory.gpus, 'GPU')}" if memory.gpus else "the whole process, on the CPU",
        )
        for run in runs
        for memory in run.memory
    ]
    lead = (
        "Each stage is a process of its own: before it loads a model it has nothing on a GPU, and on a CPU only "
        "Python, its libraries and the samples, whatever ran before it. What is free before and left after is read "
        "from the device, so that it includes other processes."
    )
    return Table.of(columns, rows, title="Memory by stage", lead=lead)


def origins_table(runs: Sequence[Run]) -> Table:
    """A row for each run with records: that of its training, or else of its evaluation."""
    columns = (
        Column("model", "Model"),
        Column("commit", "Commit"),
        Column("ran_in", "Ran in"),
        Column("lock", "Packages"),
        Column("device", "Device"),
        Column("seed", "Seed", "d"),
        Column("base", "Base"),
        Column("data", "Data"),
        Column("started", "Started (UTC)"),
        Column("seconds", "Took", "seconds"),
    )
    rows = {}
    for name, record in [(run.name, record) for run in runs for record in run.provenance]:
        if _stage(record) in ("train", "baseline"):
            inputs = {path: short(digest) for path, digest in record.inputs.items()}
            bases = (record.plan["base_dir"],) if record.plan else ("data/bases/", "data/builds/")
            rows[name] = (
                name,
                _commit(record) + (f" + {len(record.changed)} changed" if record.changed else ""),
                record.image or record.engine,
                short(record.lock) if record.lock else None,
                record.device,
                record.plan["seed"] if record.plan else None,
                next((digest for path, digest in inputs.items() if path.startswith(bases)), None),
                next((digest for path, digest in inputs.items() if path.startswith("data/prepared/")), None),
                record.started.replace("T", " ").removesuffix("+00:00"),
                record.seconds,
            )
    lead = (
        "The record of each model's training, or of its evaluation if it was not trained. Digests are of contents; "
        "data/provenance has the rest."
    )
    return Table.of(columns, rows.values(), title="Where it comes from", lead=lead)


def origin_warnings(runs: Sequence[Run]) -> list[str]:
    """Differences in code, devices and packages between runs, which may explain differences of their scores."""
    records = [(run.name, record) for run in runs for record in run.provenance]
    # Without params.yaml: a record has the settings that its stage reads.
    changed = _grouped((name, path) for name, record in records for path in record.changed if path != "params.yaml")
    warnings = [
        f"{name} was made with changes that no commit has: {join_truncated(sorted(files))}."
        for name, files in changed.items()
    ]
    if commits := _differing((_commit(record), name) for name, record in records):
        codes = _grouped((_stage(record), record.code) for _, record in records)
        differs = any(len(of_stage) > 1 for of_stage in codes.values())
        code = "and so does the code that made them" if differs else "though the code that made them is the same"
        warnings.append(f"The commits of the runs differ, {code}: {commits}.")
    # Compared by stage: a model may well be trained on other devices than it is evaluated on.
    for done in dict.fromkeys(_DONE.values()):
        alike = [(record.device, name) for name, record in records if _DONE.get(_stage(record)) == done]
        if devices := _differing(alike):
            warnings.append(f"Not all were {done} on the same device: {devices}.")
    if locks := _differing((short(record.lock) if record.lock else "not known", name) for name, record in records):
        warnings.append(f"The locked packages of the runs differ: {locks}.")
    return warnings


def _stage(record: Provenance) -> str:
    return record.stage.partition("@")[0]


def _commit(record: Provenance) -> str:
    return short(record.commit) if record.commit else "not known"


def _differing(facts: Iterable[tuple[str, str]]) -> str:
    """`one (r1, r2), other (r3)` of pairs (fact, run) if the fact is not the same for all, else ""."""
    runs = _grouped(facts)
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in runs.items()) if len(runs) > 1 else ""


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The second of the pairs by the first, each once, in order."""
    groups: dict[str, list[str]] = {}
    for first, second in dict.fromkeys(pairs):
        groups.setdefault(first, []).append(second)
    return groups
