"""The comparison as one HTML file that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from stages.core.errors import UserError
from stages.kit.data.images import DECODING_ERRORS
from stages.kit.reporting import plots
from stages.kit.reporting.comparison import Comparison, Contender, interval_words
from stages.kit.reporting.evidence import EVIDENCE, design_words, evidence_table
from stages.kit.reporting.origins import origin_warnings, origins_table
from stages.kit.reporting.runs import Run
from stages.kit.reporting.settings import (
    MEMORY_OF_STAGES,
    QUANTIZATION_COST,
    cost_table,
    memory_table,
    plan_settings,
    quantization_table,
    split_settings,
    trainable_table,
)
from stages.kit.reporting.tables import Table, cell_text
from stages.kit.reporting.task_report import Metric

TEMPLATE = "page.html"
MAX_PICTURE_WIDTH = 512
"""Pixels; wider pictures are scaled down, since a page holds dozens."""
MAX_PNG_BYTES = 60_000
"""Larger pictures are stored as JPEG, which photographs shrink in tenfold."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    svg: Markup
    caption: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    source: str
    """A data: URI."""
    width: int
    height: int
    description: str


@dataclass(frozen=True, kw_only=True)
class Gallery:
    name: str
    groups: tuple[tuple[str, tuple[Picture, ...]], ...]
    """(best, worst or random; its pictures)."""


def render_page(comparison: Comparison, table: Table, *, profile: str) -> str:
    """The whole page; names and texts are escaped, whatever they hold.

    table: the one that the terminal shows.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["cell_text"] = cell_text
    environment.filters["typeset"] = typeset
    runs = comparison.runs
    trained = [run for run in runs if run.plan]
    colours = contender_colours(comparison.contenders)
    differing, outstanding, shared = split_settings({run.name: plan_settings(run.plan) for run in trained if run.plan})
    return environment.get_template(TEMPLATE).render(
        comparison=comparison,
        report=comparison.report,
        task=comparison.report.task,
        profile=profile,
        table=table,
        palette=plots.PALETTE,
        colours=colours,
        scores=_scores(comparison, colours),
        differences=_differences(comparison),
        curves=_curves(comparison, runs, colours),
        galleries=[_gallery(run) for run in runs if any(run.pictures.values())],
        differing=differing,
        outstanding=outstanding,
        shared=shared,
        trainable=trainable_table(trained),
        costs=cost_table(runs),
        quantization=quantization_table(runs, comparison.report.primary),
        quantization_cost=QUANTIZATION_COST,
        memory=memory_table(runs),
        memory_of_stages=MEMORY_OF_STAGES,
        origins=origins_table(runs),
        origin_warnings=origin_warnings(comparison.all_runs),
        evidence=evidence_table(comparison),
        evidence_lead=EVIDENCE,
        design=design_words(comparison),
    )


def contender_colours(contenders: Sequence[Contender]) -> dict[str, str]:
    """Palette names: grey for baselines, and for each recipe its own, whether or not others were run."""
    colours, recipes = {}, 0
    for contender in contenders:
        colours[contender.name] = "series-0" if contender.baseline is None else plots.series_colour(recipes)
        recipes += contender.baseline is not None
    return colours


def typeset(words: str) -> str:
    """Figures kept on one line, the minus sign of print, and a capital where no name comes first."""
    whole = re.sub(r"\[[^\]]*\]", lambda interval: interval.group().replace(" ", "\N{NO-BREAK SPACE}"), words)
    capital = re.sub(r"^no(?=t? )", "No", whole)
    return re.sub(r"(?<![\w.-])-(?=\d)", "\N{MINUS SIGN}", capital)


def inline_picture(path: Path, description: str) -> Picture:
    """A picture file as a data: URI, scaled down and stored as JPEG where it is large."""
    with Image.open(path) as image:
        width, height = image.size
        small = width <= MAX_PICTURE_WIDTH and path.stat().st_size <= MAX_PNG_BYTES
        if small and image.format == "PNG":
            return Picture(
                source=_data_uri("image/png", path.read_bytes()),
                width=width,
                height=height,
                description=description,
            )
        scale = min(1.0, MAX_PICTURE_WIDTH / width)
        size = round(width * scale), round(height * scale)
        stored = io.BytesIO()
        # Without chroma subsampling: it would smear the thin red and green outlines.
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(stored, "JPEG", quality=85, subsampling=0)
    return Picture(
        source=_data_uri("image/jpeg", stored.getvalue()),
        width=size[0],
        height=size[1],
        description=description,
    )


def _data_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def _drawing(figure: Figure, name: str, caption: str, description: str) -> Drawing:
    return Drawing(svg=Markup(plots.svg(figure, name=name, title=description)), caption=caption)


def _scores(comparison: Comparison, colours: dict[str, str]) -> Drawing:
    primary = comparison.report.primary
    rows = [
        plots.IntervalRow(
            label=contender.name,
            value=contender.score.mean,
            interval=contender.score.interval,
            text=f"{contender.score.mean:.3f}{interval_words(contender.score.interval)}",
            colour=colours[contender.name],
            dots=contender.score.by_training if comparison.over_seeds else (),
        )
        for contender in comparison.evaluated
    ]
    said = "; ".join(f"{row.label} {row.text}" for row in rows)
    return _drawing(
        plots.plot_intervals(rows, primary.heading),
        "scores",
        f"{primary.heading} of each recipe, the mean over its seeds, with its 95% interval; a dot is one training."
        if comparison.over_seeds
        else f"{primary.heading} of each model with its 95% interval.",
        f"{primary.heading} and 95% interval: {said}",
    )


def _differences(comparison: Comparison) -> list[Drawing]:
    """A forest plot for each metric that insights with an answer are about, the primary one first."""
    drawings = [_differences_in(metric, comparison) for metric in comparison.report.measured]
    return [drawing for drawing in drawings if drawing]


def _differences_in(metric: Metric, comparison: Comparison) -> Drawing | None:
    primary = metric.key == comparison.report.primary.key
    colour_of = {"better": "better", "worse": "worse"}
    rows = [
        plots.IntervalRow(
            label=insight.topic,
            value=insight.difference.mean,
            interval=insight.difference.interval,
            text=typeset(f"{insight.difference.mean:+.3f}{interval_words(insight.difference.interval, sign='+')}"),
            colour=colour_of.get(insight.difference.verdict, "muted"),
        )
        for insight in comparison.insights
        if insight.difference and insight.metric.key == metric.key
    ]
    if not rows:
        return None
    words = comparison.report.primary_words if primary else metric.heading
    ahead = "Right" if metric.higher_is_better else "Left"
    return _drawing(
        plots.plot_intervals(rows, f"difference in {words}, paired by sample", reference=0.0),
        "differences" if primary else f"differences-{metric.key}",
        f"Each difference with its own 95% interval. {ahead} of the dashed line the first of the pair is ahead. "
        "Colour marks what the evidence shows, the number of questions counted.",
        "Paired differences: " + "; ".join(f"{row.label} {row.text}" for row in rows),
    )


def _curves(comparison: Comparison, runs: Sequence[Run], colours: dict[str, str]) -> list[Drawing]:
    report = comparison.report
    losses = {run.name: run.loss for run in runs if run.loss is not None}
    scores = {run.name: run.columns[report.score] for run in runs}
    drawings = [
        _drawing(
            plots.plot_scores(scores, colours, report.score_heading),
            "distribution",
            f"How many samples reach a given {report.score_heading}. The higher a curve, the better.",
            f"Share of samples by {report.score_heading} reached, one curve for each of {', '.join(scores)}",
        )
    ]
    if losses:
        drawings.append(
            _drawing(
                plots.plot_losses(losses, colours),
                "loss",
                "Training loss as logged (faint) and smoothed. Losses of different masking do not compare.",
                f"Training loss by optimizer step, one curve for each of {', '.join(losses)}",
            )
        )
    return drawings


def _run_picture(run: Run, path: Path) -> Picture:
    try:
        return inline_picture(path, f"{run.name}, {path.stem.replace('-', ' ')}")
    except DECODING_ERRORS as error:
        raise UserError(f"{path} is damaged: {error}; rebuild it with: dvc repro -f -s {run.stage}") from None


def _gallery(run: Run) -> Gallery:
    return Gallery(
        name=run.name,
        groups=tuple(
            (
                kind,
                tuple(_run_picture(run, path) for path in paths),
            )
            for kind, paths in run.pictures.items()
            if paths
        ),
    )
