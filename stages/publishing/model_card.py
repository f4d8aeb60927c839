"""The model card: how good a published model is, where it comes from, and how to use and to check it.

Every figure is one of the task's comparison, from the same files as its report. Nothing is in the card that these, the
lineage, the plan and the records do not say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from stages.core.families import family_of
from stages.core.lineage import Lineage, lineage_lines, short
from stages.core.params.schema import ExportParams, Params
from stages.core.provenance import Provenance
from stages.data.conversation import Conversation
from stages.data.splits import read_origin
from stages.publishing.check import MODEL_CARD_FILE
from stages.reporting.compare import Comparison, Contender
from stages.reporting.runs import EXAMPLE_KINDS, Run
from stages.reporting.sections import (
    comparison_table,
    cost_table,
    design_words,
    memory_table,
    origin_warnings,
    plan_settings,
    quantization_table,
    trainable_table,
)
from stages.reporting.tables import Table, escape_markdown, markdown

TEMPLATE = Path(__file__).with_name("model_card.md")


@dataclass(frozen=True, kw_only=True)
class Ingredient:
    """A base or a dataset that a model was made from."""

    name: str
    kind: str
    """base or data."""
    place: str
    """`hub:OWNER/NAME` or `folder:PATH`."""
    revision: str | None
    """Commit on the hub; None for a folder."""
    licence: str | None
    """From params.yaml; None if it has none."""

    @property
    def repository(self) -> str | None:
        """Its name on the hub; None for a folder."""
        return self.place.removeprefix("hub:") if self.revision else None

    @property
    def words(self) -> str:
        return f"{self.repository} at {short(self.revision)} on the hub" if self.revision else self.place


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A run to be published, with its comparison, ingredients and records."""

    comparison: Comparison
    contender: Contender
    """The run among those that it is compared with."""
    trained: Run
    """The run of the recipe that trained it: itself, or of an export its recipe's."""
    export: ExportParams | None
    """None for a merged model."""
    model: Lineage
    model_dir: Path
    evidence: Mapping[str, Path]
    """The files of its proof, by their names in the published folder."""
    ingredients: tuple[Ingredient, ...]
    """Bases and data of the model and of all that it was made from."""
    evaluated_on: tuple[Ingredient, ...]
    config: Mapping[str, Any]
    """config.json of the model."""
    question: Conversation
    """The first validation sample with an image, or else the first, as a prompt."""
    trained_dir: Path | None
    """The folder of the trained weights, with an adapter; None without one, and for an export."""
    records: tuple[Provenance, ...]
    """Records of the stages that made it, in the order in which they ended."""

    @property
    def run(self) -> Run:
        return self.contender.runs[0]

    @property
    def max_new_tokens(self) -> int:
        """Length limit of the completions that were scored."""
        assert self.trained.plan is not None
        settings = self.record(self.contender.stage).params[f"profiles.{self.trained.plan.profile}.evaluation"]
        return int(settings["max_new_tokens"])

    @property
    def licence(self) -> str | None:
        """The licence of all its bases; None if one is not known, or they differ."""
        licences = {each.licence for each in self.ingredients if each.kind == "base"}
        return next(iter(licences)) if len(licences) == 1 else None

    def record(self, stage: str) -> Provenance:
        """The record of a stage, e.g. train@r4-joint."""
        return next(record for record in self.records if record.stage == stage)


def write_card(publication: Publication, folder: Path) -> None:
    """Write README.md."""
    comparison, run, trained = publication.comparison, publication.run, publication.trained
    assert trained.plan is not None
    card = ModelCard.from_template(
        _metadata(publication),
        template_path=str(TEMPLATE),
        publication=publication,
        run=run,
        plan=trained.plan,
        report=comparison.report,
        words=escape_markdown,
        markdown=markdown,
        table=comparison_table(comparison),
        insights=[each for each in comparison.insights if run.name in (each.ours, each.theirs)],
        design=[*design_words(comparison), *origin_warnings(comparison.all_runs)],
        examples={kind: run.examples[kind] for kind in EXAMPLE_KINDS if run.examples[kind]},
        settings=Table.of(("Setting", "Value"), plan_settings(trained.plan).items()),
        trained=trainable_table([trained]),
        ingredients=Table.of(
            ("Kind", "Name", "From", "Licence"),
            [(each.kind, each.name, each.words, each.licence or "not known") for each in publication.ingredients],
        ),
        lineage="\n".join(lineage_lines(publication.model)),
        cost=cost_table([trained]),
        memory=memory_table([trained, *([run] if publication.export else [])]),
        quantization=quantization_table([trained], comparison.report.primary),
        messages=json.dumps(_template_messages(publication.question), ensure_ascii=False, indent=4),
        max_new_tokens=publication.max_new_tokens,
        adapter="trained/adapter" if publication.trained_dir else None,
        full_weights=next((path.relative_to(folder).as_posix() for path in folder.glob("trained/*.safetensors")), None),
        names=json.dumps([f"image-{number}.jpg" for number, _ in enumerate(publication.question.images, start=1)]),
        model_class=(publication.config.get("architectures") or ["AutoModel"])[0],
    )
    card.save(folder / MODEL_CARD_FILE)


def ingredients_of(
    model: Lineage, trained_on: Iterable[str], prepared_dir: Path, params: Params
) -> tuple[Ingredient, ...]:
    """Every base at an end of the model's lineage, and every dataset that it, or what it was made from, was trained on.

    trained_on: names of datasets. prepared_dir: of the one that the model was evaluated on; its sources are the
    resolved ones, those of others are taken from params.yaml.
    """
    sources = {("base", root.name): _source_text(root) for root in model.tree() if not root.parents}
    for name in trained_on:
        if name == prepared_dir.name:
            sources |= {("data", part): source for part, source in _resolved(prepared_dir, trained=True).items()}
        else:
            dataset = params.dataset(name)
            mixed = [part for part, samples in (dataset.mix or {}).items() if samples != 0]
            for part in mixed or [name]:
                sources.setdefault(("data", part), params.dataset(part).source)
    return tuple(_ingredient(kind, name, source, params) for (kind, name), source in sources.items())


def evaluated_on(prepared_dir: Path, params: Params) -> tuple[Ingredient, ...]:
    """The dataset, or those that it is a mix of: it validates on all of them."""
    return tuple(_ingredient("data", *each, params) for each in _resolved(prepared_dir, trained=False).items())


def _source_text(root: Lineage) -> str:
    if "hub" in root.source:
        return f"hub:{root.source['hub']}@{root.source['revision']}"
    return f"folder:{root.source['folder']}"


def _ingredient(kind: str, name: str, source: str, params: Params) -> Ingredient:
    place, revision = source, None
    if source.startswith("hub:"):
        place, _, revision = source.partition("@")
    return Ingredient(name=name, kind=kind, place=place, revision=revision, licence=params.license_of(place))


def _resolved(prepared_dir: Path, *, trained: bool) -> dict[str, str]:
    """The source of a dataset by its name, or of those that it is a mix of. trained: only those that it trains on."""
    origin = read_origin(prepared_dir)
    parts = {name: part.source for name, part in origin.parts.items() if part.asked != 0 or not trained}
    return parts or {prepared_dir.name: origin.source}


def _metadata(publication: Publication) -> ModelCardData:
    report, run = publication.comparison.report, publication.run
    hub: dict[str, list[str]] = {"base": [], "data": []}
    for each in publication.ingredients:
        hub[each.kind] += [each.repository] if each.repository else []
    data, family = publication.evaluated_on, family_of(publication.config["model_type"])
    task = "text-generation" if family.vision is None else "image-text-to-text"  # in the hub's words
    on_data = [metric for metric in report.metrics if not metric.guard]
    figures = [(metric, publication.contender.metric(metric.key)) for metric in on_data]
    assert publication.trained.plan is not None
    # A single dataset of the hub has its place there, all others the name here.
    known = data[0] if len(data) == 1 and data[0].repository else None
    return ModelCardData(
        license=publication.licence,
        base_model=hub["base"] or None,
        datasets=hub["data"] or None,
        library_name="gguf" if publication.export and publication.export.format == "gguf" else "transformers",
        pipeline_tag=task,
        tags=["bakeoff", report.task],
        model_name=run.name,
        eval_results=[
            EvalResult(
                task_type=task,
                task_name=report.title,
                dataset_type=str(known.repository) if known else data[0].place,
                dataset_name=Path(publication.trained.plan.data_dir).name,
                dataset_revision=known.revision if known else None,
                dataset_split=str(run.metrics.get("split", "val")),
                metric_type=metric.key,
                metric_name=metric.heading,
                metric_value=value,
            )
            for metric, value in figures
            if isinstance(value, int | float)
        ],
    )


def _template_messages(question: Conversation) -> list[dict[str, Any]]:
    """The messages for a chat template: without the kit's own keys, and without images each content as one text, since
    the templates of text models know no parts."""

    def plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not question.images:
            return "".join(part["text"] for part in parts)
        return [{key: value for key, value in part.items() if key != "shortenable"} for part in parts]

    return [{**message, "content": plain(message["content"])} for message in question.messages]
