"""Show how a folder of images with boxes is understood, before anything is trained. Nothing in it is changed.

Reads   SOURCE, a folder or hub:OWNER/NAME@REVISION; or a dataset of params.yaml's active profile
Writes  .bakeoff/data/NAME.html: twelve images with their boxes, and the same figures
Run     make data SOURCE=/path/to/photographs
        make data DATASET=nutrition-tables

For a folder all categories are shown, and the entry for params.yaml; a dataset is shown as params.yaml has it.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from ruamel.yaml import YAML

from stages.core.errors import UserError, configure_logging, listed, pluralize, printable
from stages.core.params import load_params
from stages.core.params.schema import DataParams, DatasetParams, Params
from stages.core.records import cut, publish_text
from stages.kit.reporting.page import inline_image
from stages.prepare import prepare
from stages.tasks.detection import samples
from stages.tasks.detection.samples.records import DetectionRecord, read_split
from stages.tasks.detection.scoring.drawing import TRUTH_COLOUR, draw_boxes
from stages.tasks.detection.sources.rows import DataForm, Reader
from tools.plan import available_inputs, trainable_recipes

SHOWN = 12
PAGE_DIR = Path(".bakeoff/data")

Lines = list[tuple[str, str]]
"""Names of figures, and the figures."""

log = logging.getLogger("stages")


@click.command(help=__doc__)
@click.argument("source", required=False)
@click.option("--dataset", help="A dataset of params.yaml; with SOURCE, the name to propose.")
@click.option("--format", "form", type=click.Choice(get_args(DataForm)), help="Of the folder, if it is ambiguous.")
def main(source: str | None, dataset: str | None, form: DataForm | None) -> None:
    configure_logging("data")
    params = load_params()
    known = [name for name, each in params.active.datasets.items() if each.task == "detection"]
    name = dataset or next(iter(known), "data")
    if source is None and (dataset is None or form is not None):
        raise click.UsageError(
            f"name a folder, or a dataset alone with --dataset: {', '.join(known) or 'there is none'}"
        )
    if source is None:
        chosen = params.dataset(name)
        if chosen.task != "detection" or chosen.mix:
            raise UserError(f"dataset {name} has no images with boxes of its own")
    else:
        source = source if source.startswith(("folder:", "hub:")) else f"folder:{source}"
        reader = {"format": form, "category": None, "empty_images": True}
        chosen = DatasetParams(task="detection", source=source, reader=reader)
    with tempfile.TemporaryDirectory() as folder:
        prepared_dir = Path(folder) / "prepared"
        stats = prepare(chosen, DataParams(skip_invalid=True), prepared_dir)
        splits = {split: read_split(prepared_dir, split) for split in stats["splits"]}
    lines = [("source", chosen.source), *figures(stats, splits), *token_lengths(params, name, splits)]
    problems = []
    for split in stats["splits"].values():
        for each in split["invalid"]:
            unit, number = next((key, value) for key, value in each.items() if key not in ("file", "problem"))
            problems.append(f"{each['file']}{'' if number is None else f' {unit} {number}'}: {each['problem']}")
    for what, figure in lines:
        click.echo(printable(f"{what:<24}  {figure}"))
    if problems:
        click.echo(printable(f"\n{pluralize(len(problems), 'problem')}; such samples stop a run, or are left out:"))
        click.echo(printable(listed(problems)))
    records = [record for some in splits.values() for record in some]
    click.echo(f"\nimages with their boxes   {publish_page(name, lines, problems, records)}")
    if source is not None:
        click.echo(
            f"\nBelow `datasets` of a profile in params.yaml:\n\n{proposal(name, source, form, records)}", nl=False
        )


def figures(stats: Mapping[str, Any], splits: Mapping[str, Sequence[DetectionRecord]]) -> Iterator[tuple[str, str]]:
    """Counts, sizes, boxes an image, and categories of each split."""
    if stats["validation"]:
        yield "validation", stats["validation"]
    for split, records in splits.items():
        found = stats["splits"][split]
        empty, invalid = found["empty_images"], found["invalid_rows"]
        yield f"{split}: images", f"{len(records):,}, {empty:,} without a box; {pluralize(invalid, 'invalid one')}"
        areas = sorted(records, key=lambda record: record.width * record.height)
        sizes = (f"{record.width} x {record.height}" for record in (areas[0], areas[len(areas) // 2], areas[-1]))
        yield f"{split}: smallest, median, largest", ", ".join(sizes)
        yield f"{split}: boxes an image", ", ".join(f"{boxes}: {n:,}" for boxes, n in found["boxes_per_image"].items())
        for label, count in Counter(label for record in records for _, label in record.targets()).most_common():
            images = sum(any(label == each for _, each in record.targets()) for record in records)
            boxes = "1 box" if count == 1 else f"{count:,} boxes"
            yield f"{split}: {cut(label)}", f"{boxes} in {pluralize(images, 'image')}"


def token_lengths(
    params: Params, dataset: str, splits: Mapping[str, Sequence[DetectionRecord]]
) -> Iterator[tuple[str, str]]:
    """Tokens of question, image and answer, if a recipe's processor needs no download."""
    using = [name for name in trainable_recipes(params) if params.recipe(name).task == "detection"]
    recipe = next((name for name in using if params.recipe(name).data == dataset), None) or next(iter(using), None)
    inputs = available_inputs(params, recipe) if recipe else None
    if recipe is None or inputs is None or not inputs.has_tokenizer:
        yield "tokens", f"not counted: the base of profile {params.profile} is not fetched yet"
        return
    # Slow to import.
    from stages.kit.models.folders import model_type
    from stages.kit.models.prompts import count_tokens, load_processor, samples_for

    processor, limit = load_processor(inputs.config_dir, params.active.images), params.recipe(recipe).max_length
    ask = samples_for(samples, model_type(inputs.config_dir), processor).conversation
    for split, records in splits.items():
        lengths = sorted(count_tokens(processor, ask(record, answered=True)) for record in records)
        longer = sum(length > limit for length in lengths)
        half = lengths[len(lengths) // 2]
        beyond = f"{longer:,} are longer than the {limit} of {recipe}"
        yield f"{split}: tokens", f"{lengths[0]} to {lengths[-1]}, half of them at most {half}; {beyond}"


def publish_page(name: str, lines: Lines, problems: Sequence[str], records: Sequence[DetectionRecord]) -> Path:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    # Examples, always the same ones: one of each label first, and one without a box.
    ordered = sorted(records, key=lambda record: record.sha256)
    firsts: dict[str | None, DetectionRecord] = {}
    for record in ordered:
        for _, label in record.targets() or [(None, None)]:
            firsts.setdefault(label, record)
    shown = {id(record): record for record in (*firsts.values(), *ordered)}
    images = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example.png"
        for record in list(shown.values())[:SHOWN]:
            draw_boxes(record, record.targets(), TRUTH_COLOUR).save(path)
            images.append(inline_image(path, printable(record.image_id)))
    page = environment.get_template("page.html").render(
        name=name, lines=lines, problems=[printable(problem) for problem in problems[:100]], images=images
    )
    path = PAGE_DIR / f"{name}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_text(page, path)
    return path


def proposal(name: str, source: str, form: DataForm | None, records: Sequence[DetectionRecord]) -> str:
    """The entry of params.yaml that asks for every category."""
    categories = sorted({name for record in records for name in record.categories})
    reader = {
        **({"format": form} if form else {}),
        "category": categories,
        "prompt": Reader(category=tuple(categories)).question(),
        **({} if all(record.boxes for record in records) else {"empty_images": True}),
    }
    out, yaml = io.StringIO(), YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 10_000
    yaml.dump({name: {"task": "detection", "source": source, "reader": reader}}, out)
    return "".join(f"      {line}\n" for line in out.getvalue().splitlines())


if __name__ == "__main__":
    main()
