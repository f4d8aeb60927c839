"""The model card: what a published model is, how good, made of what, and how to use and to check it.

Every figure is one of the task's comparison, from the same files as its report. Nothing is in the card that these, the
lineage, the plan and the records do not say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import yaml_dump  # type: ignore[attr-defined]

from stages.core.lineage import Lineage
from stages.core.provenance import Provenance
from stages.kit.data.conversation import Conversation
from stages.kit.families import PROMPT_OPTIONS, family_of
from stages.kit.publishing.origins import Source, lineage_lines
from stages.kit.reporting.compare import Comparison, Contender
from stages.kit.reporting.runs import Run
from stages.kit.reporting.sections import (
    MEMORY_OF_STAGES,
    QUANTIZATION_COST,
    comparison_table,
    cost_table,
    design_words,
    memory_table,
    origin_warnings,
    plan_settings,
    quantization_table,
    trainable_table,
)
from stages.kit.reporting.tables import Column, Row, Table, escape_markdown, markdown

CARD_FILE = "README.md"
RESULTS_DIR = ".eval_results"
PICTURES_DIR = "examples"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE = Path(__file__).with_name("card.md")


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A run to be published, and all that is known of it."""

    comparison: Comparison
    contender: Contender
    """The run among those that it is compared with."""
    model: Lineage
    sources: tuple[Source, ...]
    """Of it and of all that it was made from."""
    evaluated_on: tuple[Source, ...]
    config: Mapping[str, Any]
    """config.json of the model."""
    question: Conversation
    """The first of the validation samples that shows a picture, or else the first, as the model is asked."""
    adapter: str | None
    """Folder of the adapter below the published one; None for a model that was trained in full."""
    records: tuple[Provenance, ...]
    """Of the stages that made it, in the order of their end."""

    @property
    def run(self) -> Run:
        assert self.contender.run is not None
        return self.contender.run

    @property
    def pipeline_tag(self) -> str:
        sees = family_of(self.config["model_type"]).vision is not None
        return "image-text-to-text" if sees else "text-generation"

    @property
    def max_new_tokens(self) -> int:
        """Of an answer, as the model was scored."""
        assert self.run.plan is not None
        settings = self.record("evaluate").params[f"profiles.{self.run.plan.profile}.evaluation"]
        return int(settings["max_new_tokens"])

    def licence(self, kind: str) -> str | None:
        """The one licence of all its bases, or of all its data; None where one is not known, or they differ."""
        found = {source.licence for source in self.sources if source.kind == kind}
        return next(iter(found)) if len(found) == 1 else None

    def record(self, stage: str) -> Provenance:
        """The run's own record of a stage, e.g. train."""
        return next(record for record in self.records if record.stage == f"{stage}@{self.run.name}")


def write_card(publication: Publication, folder: Path) -> None:
    """README.md, with the pictures that the folder has."""
    comparison, run = publication.comparison, publication.run
    pictures = {
        kind: [path.name for path in paths if (folder / PICTURES_DIR / path.name).is_file()]
        for kind, paths in run.examples.items()
    }
    mine = [each for each in comparison.insights if run.name in (each.ours, each.theirs)]
    card = ModelCard.from_template(
        _metadata(publication),
        template_path=str(TEMPLATE),
        publication=publication,
        run=run,
        report=comparison.report,
        words=escape_markdown,
        headline=comparison.headline,
        table=markdown(comparison_table(comparison)),
        insights=[f"{each.topic}: {each.words}" for each in mine],
        design=[*design_words(comparison), *origin_warnings(comparison.all_runs)],
        meanings=[(metric.heading, metric.meaning) for metric in comparison.report.metrics],
        pictures={kind: names for kind, names in pictures.items() if names},
        settings=_settings(run),
        trained=markdown(trainable_table([run])),
        sources=_sources_table(publication.sources),
        lineage="\n".join(lineage_lines(publication.model)),
        cost=markdown(cost_table([run])),
        memory=markdown(memory_table([run])),
        memory_lead=MEMORY_OF_STAGES,
        quantization=markdown(table) if (table := quantization_table([run], comparison.report.primary)).rows else "",
        quantization_lead=QUANTIZATION_COST,
        messages=json.dumps(_as_asked(publication.question), ensure_ascii=False, indent=4),
        prompt_options=_prompt_options(folder),
        max_new_tokens=publication.max_new_tokens,
        full_weights=next((path.relative_to(folder).as_posix() for path in folder.glob("trained/*.safetensors")), None),
        names=json.dumps([f"picture-{number}.jpg" for number, _ in enumerate(publication.question.images, start=1)]),
        model_class=(publication.config.get("architectures") or ["AutoModel"])[0],
    )
    card.save(folder / CARD_FILE)


def write_eval_results(publication: Publication, folder: Path) -> None:
    """`.eval_results/TASK.yaml`: the primary figure, where it is of one dataset, which is on the hub; else no file."""
    primary, record = publication.comparison.report.primary, publication.record("evaluate")
    score = publication.contender.score
    entries = [
        EvalResultEntry(
            dataset_id=source.hub[0],
            dataset_revision=source.hub[1],
            task_id=publication.comparison.report.task,
            value=publication.contender.figure(primary.key),
            date=record.ended,
            notes=f"{primary.heading}, 95% interval {score.interval.low:.3f} to {score.interval.high:.3f}"
            if score.interval
            else primary.heading,
        )
        for source in publication.evaluated_on
        if source.hub and len(publication.evaluated_on) == 1
    ]
    if entries:
        path = folder / RESULTS_DIR / f"{publication.comparison.report.task}.yaml"
        path.parent.mkdir()
        path.write_text(yaml_dump(eval_result_entries_to_yaml(entries), sort_keys=False), encoding="utf-8")


def _metadata(publication: Publication) -> ModelCardData:
    report, run = publication.comparison.report, publication.run
    hub: dict[str, list[str]] = {"base": [], "data": []}
    for each in publication.sources:
        hub[each.kind] += [each.hub[0]] if each.hub else []
    data = publication.evaluated_on
    figures = [(metric, publication.contender.figure(metric.key)) for metric in report.metrics]
    # One dataset of the hub is named as the hub names it, all else by its name here.
    known = data[0].hub if len(data) == 1 else None
    return ModelCardData(
        license=publication.licence("base"),
        base_model=hub["base"] or None,
        datasets=hub["data"] or None,
        library_name="transformers",
        pipeline_tag=publication.pipeline_tag,
        tags=["bakeoff", report.task],
        model_name=run.name,
        eval_results=[
            EvalResult(
                task_type=publication.pipeline_tag,
                task_name=report.title,
                dataset_type=known[0] if known else data[0].place,
                dataset_name=known[0] if known else ", ".join(each.name for each in data),
                dataset_revision=known[1] if known else None,
                dataset_split=str(run.metrics.get("split", "val")),
                metric_type=metric.key,
                metric_name=metric.heading,
                metric_value=value,
            )
            for metric, value in figures
            if isinstance(value, int | float)
        ],
    )


def _settings(run: Run) -> str:
    assert run.plan is not None
    rows = tuple(Row(cells=pair) for pair in plan_settings(run.plan).items())
    return markdown(Table(columns=(Column("setting", "Setting"), Column("value", "Value")), rows=rows))


def _sources_table(sources: Sequence[Source]) -> str:
    columns = (Column("what", "What"), Column("name", "Name"), Column("source", "From"), Column("licence", "Licence"))
    rows = tuple(Row(cells=(each.kind, each.name, each.words, each.licence or "not known")) for each in sources)
    return markdown(Table(columns=columns, rows=rows))


def _prompt_options(folder: Path) -> str:
    """Arguments of apply_chat_template, of those with which it was asked that the model's template knows."""
    path = folder / CHAT_TEMPLATE_FILE
    template = path.read_text(encoding="utf-8") if path.is_file() else ""
    return "".join(f", {name}={value!r}" for name, value in PROMPT_OPTIONS.items() if name in template)


def _as_asked(question: Conversation) -> list[dict[str, Any]]:
    """The messages as a chat template takes them: without what only shortening needs, and where there are no pictures
    each content as one text, as the templates of text models know no parts."""

    def plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not question.images:
            return "".join(part["text"] for part in parts)
        return [{key: value for key, value in part.items() if key != "shortenable"} for part in parts]

    return [{**message, "content": plain(message["content"])} for message in question.messages]
