"""Show a dataset as models will see it, before anything is trained. Nothing of it is changed.

Reads   a dataset of params.yaml's active profile; or SOURCE, a folder or hub:OWNER/NAME@REVISION of images with boxes
        or of conversations
Writes  .bakeoff/data/NAME.html for images with boxes: twelve of them, and the same figures
Run     make data DATASET=visempar RECIPE=amr-mtup          one of both is enough
        make data SOURCE=/path/to/photographs

The end is one training sample in the recipe's own form, the tokens that count in its loss coloured. For a folder all
categories are shown, and the entry for params.yaml; a dataset is shown as params.yaml has it.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import click
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from ruamel.yaml import YAML

from stages.core.atomic import atomic_write
from stages.core.errors import UserError, configure_logging, join_truncated, listed, pluralize
from stages.core.params import load_params
from stages.core.params.schema import DataParams, DatasetParams, Params
from stages.core.records import cut, nearest
from stages.core.tasks import load_task
from stages.data.prepared import counted, folded, prepare
from stages.data.sources import Place
from stages.reporting.page import inline_image
from stages.tasks.detection.samples import DetectionRecord
from stages.tasks.detection.scoring.drawing import TRUTH_COLOUR, draw_boxes
from stages.tasks.detection.sources.rows import DataForm, Reader
from tools.data.conversations import conversations
from tools.plan import available_inputs, trainable_recipes

SHOWN = 12
"""Images on the page."""
MEASURED = 64
"""Training samples to compute the share of tokens in the loss of."""
PAGE_DIR = Path(".bakeoff/data")

Lines = list[tuple[str, str]]
"""Names of figures, and the figures."""


@click.command(help=__doc__)
@click.argument("source", required=False)
@click.option("--dataset", help="A dataset of params.yaml; the recipe's, if not given; with SOURCE, a name to propose.")
@click.option("--profile", help="A profile of params.yaml.  [default: the active one]")
@click.option("--recipe", help="The recipe that gives a sample's form; the first of the dataset's, if not given.")
@click.option("--format", "form", type=click.Choice(get_args(DataForm)), help="Of the folder, if it is ambiguous.")
def main(
    source: str | None, dataset: str | None, profile: str | None, recipe: str | None, form: DataForm | None
) -> None:
    configure_logging("data")
    params = load_params(changes=[f"profile={profile}"] if profile else [])
    name, chosen, forms = chosen_dataset(params, source, dataset, recipe, form)
    stats, splits = read_dataset(params, name, chosen)
    whole = not stats["splits"]["train"]["invalid_rows"]
    reader = proposed_reader(form, splits, whole=whole) if source is not None and chosen.task == "detection" else None
    if reader is not None:
        splits = {split: [replace(each, **reader.fields()) for each in records] for split, records in splits.items()}
    lines = [("source", chosen.source), *([("form", forms)] if forms else []), *figures(stats, splits)]
    if chosen.task == "detection":
        lines += image_figures(stats, splits)
    try:
        shown, sample = as_trained(params, name, chosen.task, recipe, splits)
    except UserError as error:  # as of images, if the profile's base is a text model: the folder may be for another
        if source is None or recipe is not None:
            raise
        shown, sample = [("tokens", f"not counted: {error.message}")], ""
    lines += shown
    invalid = [each for split in stats["splits"].values() for each in split["invalid"]]
    problems = folded((place_of(each), each["problem"]) for each in invalid)
    for what, figure in lines:
        click.echo(printable(f"{what:<24}  {figure}"))
    if problems:
        click.echo(printable(f"\n{pluralize(len(invalid), 'problem')}; such samples stop a run, or are left out:"))
        click.echo(printable(listed(problems)))
    records = [record for some in splits.values() for record in some]
    if chosen.task == "detection":
        click.echo(f"\nimages with their boxes   {publish_page(name, lines, problems, records)}")
    if sample:
        click.echo(f"\n{sample}")
    if source is not None:
        click.echo(
            f"\nBelow `datasets` of a profile in params.yaml:\n\n{proposal(name, chosen, reader)}",
            nl=False,
        )


def chosen_dataset(
    params: Params, source: str | None, dataset: str | None, recipe: str | None, form: DataForm | None
) -> tuple[str, DatasetParams, str]:
    """The dataset of this name or the recipe's, or one of a folder's conversations or of all categories of its images,
    with the name to propose; and the forms of the conversations, empty if they are not known."""
    if source is None:
        name = params.recipe(recipe).data if recipe and not dataset else dataset
        if name is None or form is not None:
            raise click.UsageError(
                "name a recipe (make: RECIPE=), a folder (SOURCE=, with FORMAT= if images are ambiguous), or a "
                f"dataset (DATASET=): {', '.join(params.active.datasets) or 'there is none'}"
            )
        return name, params.dataset(name), ""
    reader = {"format": form, "category": None, "empty_images": True}
    source = source if source.startswith(("folder:", "hub:")) else f"folder:{source}"
    if source.startswith("folder:") and not Path(source.removeprefix("folder:")).exists():
        raise UserError(f"there is no folder {source.removeprefix('folder:')}")
    chosen, forms = DatasetParams(task="detection", source=source, reader=reader), ""
    if form is None:
        chosen, forms = conversations(source) or (chosen, forms)
    known = [name for name, each in params.active.datasets.items() if each.task == chosen.task]
    return dataset or next(iter(known), "data"), chosen, forms


def read_dataset(params: Params, name: str, chosen: DatasetParams) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The content of stats.json and the records of each split, invalid samples left out."""
    sources, samples = load_task(chosen.task, "sources"), load_task(chosen.task, "samples")
    with tempfile.TemporaryDirectory() as folder:
        parts = {part: params.dataset(part) for part in chosen.mix or ()}
        for part, dataset in {**parts, name: chosen}.items():
            here, data = params.dataset_path(part), DataParams(skip_invalid=True)
            stats = prepare(sources, dataset, data, Path(folder) / part, path=here)
        return stats, {split: samples.read_split(Path(folder) / name, split) for split in stats["splits"]}


def place_of(invalid: Mapping[str, Any]) -> Place:
    """The place of an invalid sample of stats.json."""
    unit, number = next((key, value) for key, value in invalid.items() if key not in ("file", "problem"))
    return Place(invalid["file"], number, unit)


def figures(stats: Mapping[str, Any], splits: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
    """Counts of each split."""
    if stats["validation"]:
        yield "validation", stats["validation"]
    for split, records in splits.items():
        counts = stats["splits"][split]
        more = f"; {counts['leaked_rows']:,} left out, in another split too" if counts["leaked_rows"] else ""
        yield f"{split}: samples", f"{len(records):,}; {pluralize(counts['invalid_rows'], 'invalid one')}{more}"
    if fields := stats.get("unread_fields"):
        yield "fields not read", counted(fields)
    if near := stats.get("near_duplicates"):
        yield "near-duplicates", f"{pluralize(len(near), 'sample')}: {join_truncated(near, 3)}"


def image_figures(
    stats: Mapping[str, Any], splits: Mapping[str, Sequence[DetectionRecord]]
) -> Iterator[tuple[str, str]]:
    """Sizes, boxes an image, and categories of each split."""
    for split, records in splits.items():
        counts = stats["splits"][split]
        yield f"{split}: without a box", pluralize(counts["empty_images"], "image")
        areas = sorted(records, key=lambda record: record.width * record.height)
        sizes = (f"{record.width} x {record.height}" for record in (areas[0], areas[len(areas) // 2], areas[-1]))
        yield f"{split}: smallest, median, largest", ", ".join(sizes)
        if repeated := counts.get("repeated_boxes"):
            yield f"{split}: repeated boxes", f"{repeated:,}, the same category and place in one image"
        yield f"{split}: boxes an image", ", ".join(f"{boxes}: {n:,}" for boxes, n in counts["boxes_per_image"].items())
        for label, count in Counter(label for record in records for _, label in record.targets()).most_common():
            images = sum(any(label == each for _, each in record.targets()) for record in records)
            boxes = "1 box" if count == 1 else f"{count:,} boxes"
            yield f"{split}: {cut(label)}", f"{boxes} in {pluralize(images, 'image')}"


def as_trained(
    params: Params, dataset: str, task: str, wanted: str | None, splits: Mapping[str, Sequence[Any]]
) -> tuple[Lines, str]:
    """Figures of the samples' tokens, and one training sample as a recipe's training sees it; neither if the
    recipe's processor is not fetched yet.

    wanted: the recipe; None for the first that trains on the dataset, or else the first of its task.
    """
    using = [name for name in trainable_recipes(params) if params.recipe(name).task == task]
    if wanted is not None and wanted not in using:
        there = f"; there are: {', '.join(using)}" if using else ""
        raise UserError(
            f"no recipe of {task} in profile {params.profile} is called {wanted!r}{nearest(wanted, using)}{there}"
        )
    mixes = [mix for mix, each in params.active.datasets.items() if (each.mix or {}).get(dataset, 0) != 0]
    of_dataset = [name for data in (dataset, *mixes) for name in using if params.recipe(name).data == data]
    name = wanted or next(iter([*of_dataset, *using]), None)
    inputs = available_inputs(params, name) if name else None
    if name is None or inputs is None or not inputs.has_tokenizer:
        return [("tokens", f"not counted: the base of profile {params.profile} is not fetched yet")], ""
    # Slow to import.
    from stages.models.load import load_config
    from stages.models.prompts import count_tokens, load_processor, samples_for, tokenizer_of
    from stages.training.batches import IGNORED, ConversationCollator

    recipe, samples = params.recipe(name), load_task(task, "samples")
    processor = load_processor(inputs.config_dir, params.active.images)
    converse = partial(
        samples_for(samples, load_config(inputs.config_dir).model_type, processor).conversation,
        answered=True,
        answer_format=recipe.answer_format,
    )
    lines, limit = [], recipe.max_length
    for split, records in splits.items():
        lengths = sorted(count_tokens(processor, converse(record)) for record in records)
        beyond = f"{sum(length > limit for length in lengths):,} are longer than the {limit} of {name}"
        half = lengths[len(lengths) // 2]
        lines.append((f"{split}: tokens", f"{lengths[0]} to {lengths[-1]}, half of them at most {half}; {beyond}"))
    records = [
        record
        for record in splits["train"][:MEASURED]
        if count_tokens(processor, converse(record), max_length=limit) <= limit
    ]
    if not records:
        return lines, ""
    experts = [0] * len(records) if recipe.loss == "router-labels" else None  # any recipe: every token counts
    collate = ConversationCollator(processor, records, converse, loss=recipe.loss, max_length=limit, experts=experts)
    counted, total = 0, 0
    for number in range(len(records)):
        row = collate.padded_batch([{"sample": number}])
        counted, total = counted + int((row["labels"] != IGNORED).sum()), total + row["labels"].numel()
    share = f"{counted / total:.0%} of the tokens of {pluralize(len(records), 'sample')} count in the loss of {name}"
    lines.append(("train: in the loss", f"{share} ({recipe.loss})"))
    return lines, coloured(tokenizer_of(processor), collate.padded_batch([{"sample": 0}]), name)


def printable(text: str) -> str:
    """Texts of a dataset are shown, and do not command the terminal. Line ends stay."""
    return "".join(char if char.isprintable() or char in "\n\u200c\u200d" else repr(char)[1:-1] for char in text)


def coloured(tokenizer: Any, row: Mapping[str, Any], recipe: str) -> str:
    """A batch of one sample as text. What counts in the loss is green and between brackets, which stay where there are
    no colours. A token that repeats, as an image's does, is written once."""
    from stages.training.batches import IGNORED

    shown = f"one training sample as {recipe} sees it, what counts in the loss in \u27e6 \u27e7:\n\n"
    pairs = zip(row["input_ids"][0].tolist(), row["labels"][0].tolist(), strict=True)
    for counts, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        text = tokenizer.decode([token for token, _ in run])
        text = re.sub(r"(<[^<>\s]+>)\1{3,}", lambda match: f"{match[1]} x {len(match[0]) // len(match[1])} ", text)
        shown += click.style(f"\u27e6{printable(text)}\u27e7", fg="green") if counts else printable(text)
    return shown


def publish_page(name: str, lines: Lines, problems: Sequence[str], records: Sequence[DetectionRecord]) -> Path:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    # Examples, always the same ones: one of each label first, and one without a box.
    ordered = sorted(records, key=lambda record: record.sha256)
    firsts: dict[str | None, DetectionRecord] = {}
    for record in ordered:
        labels: list[str | None] = [label for _, label in record.targets()]
        for label in labels or [None]:
            firsts.setdefault(label, record)
    shown = {id(record): record for record in (*firsts.values(), *ordered)}
    images = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example.png"
        for record in list(shown.values())[:SHOWN]:
            draw_boxes(record, record.targets(), TRUTH_COLOUR).save(path)
            images[printable(record.image_id)] = inline_image(path)
    page = environment.get_template("page.html").render(
        name=name, lines=lines, problems=[printable(problem) for problem in problems[:100]], images=images
    )
    path = PAGE_DIR / f"{name}.html"
    atomic_write(page, path)
    return path


def proposed_reader(form: DataForm | None, splits: Mapping[str, Sequence[DetectionRecord]], *, whole: bool) -> Reader:
    """Asks for every category that there is to train on; for every one at all unless the training split is `whole`."""
    records = [record for some in splits.values() for record in some]
    categories = tuple(sorted({name for each in (splits["train"] if whole else records) for name in each.categories}))
    empty = any(set(categories).isdisjoint(record.categories) for record in records)
    reader = Reader(format=form, category=categories, empty_images=empty)
    return replace(reader, prompt=reader.question())


def proposal(name: str, dataset: DatasetParams, asked: Reader | None) -> str:
    """The entry of params.yaml."""
    entry: dict[str, Any] = {"task": dataset.task, "source": dataset.source}
    if splits := dataset.splits.patterns():
        entry["splits"] = {split: list(patterns) for split, patterns in splits.items()}
    if asked is not None:
        entry["reader"] = {
            **({"format": asked.format} if asked.format else {}),
            "category": list(asked.categories()),
            "prompt": asked.prompt,
            **({"empty_images": True} if asked.empty_images else {}),
        }
    out, yaml = io.StringIO(), YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 10_000
    yaml.dump({name: entry}, out)
    return "".join(f"      {line}\n" for line in out.getvalue().splitlines())


if __name__ == "__main__":
    main()
