"""Will a recipe fit a GPU? Said before anything is fetched: without weights, GPU or network, and nothing is written.

Reads   params.yaml; the base's geometry; the base's tokenizer and the prepared data, where they are there
Run     make plan RECIPE=r1-llm-only PROFILE=qwen2-vl-7b-48gb GPU_GB=24

With --all it says so of every recipe that the profile can train, for GPUs of several sizes. It ends with the command
that runs what was asked for so. --json prints the same as JSON, with the fields of tools/plan/recipe_memory.py.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from stages.core.documents import shown
from stages.core.errors import UserError, bytes_text
from stages.core.logs import configure_logging
from stages.core.params.load import load_params
from stages.core.params.schema import Params
from stages.kit.memory.fit import advice, sharded_advice, sharded_fit
from stages.kit.planning.disk import comparison_text
from stages.kit.planning.ladder import settings
from stages.kit.reporting.tables import terminal_table
from tools.plan.available_inputs import available_base, trainable_recipes
from tools.plan.drawing import MatrixCell, budget_table, matrix_table
from tools.plan.recipe_memory import RecipeMemory

if TYPE_CHECKING:
    from tools.plan.preview import Judged, Preview, Previews

GPU_SIZES = (16.0, 24.0, 40.0, 48.0, 80.0)
"""In GB, as cards are sold."""


class Sizes(click.ParamType[tuple[float, ...]]):
    """Sizes of GPUs, separated by blanks or commas: `24`, `24 48`, `24GB,48GB`."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(gpu_size(text) for text in re.split(r"\s*,\s*|\s+(?=\d)", str(value).strip()))
        except UserError as error:
            self.fail(error.message)


def gpu_size(value: float | str) -> float:
    """In GB: 24, "24", "24GB", "24 GiB"; a card sold as 24 GB has about 24 GiB. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", str(value), re.IGNORECASE)
    if not found or not 1 <= float(found[1]) < 2**20:
        raise UserError(f"{shown(value)} is no size of a GPU; expected GB as the card is sold by, e.g. 24 or 24GB")
    return float(found[1])


@click.command(help=__doc__)
@click.argument("recipe", required=False)
@click.option("--profile", help="A profile of params.yaml.  [default: the active one]")
@click.option("--gpu-gb", "asked_sizes", type=Sizes(), multiple=True, help="The GPU's size in GB, not its own.")
@click.option("--all", "compare_sizes", is_flag=True, help="Every recipe, or the one given, on GPUs of several sizes.")
@click.option("--exact", is_flag=True, help="Look at every layer of the model, not at a few: takes longer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    recipe: str | None,
    profile: str | None,
    asked_sizes: Sequence[tuple[float, ...]],
    compare_sizes: bool,
    exact: bool,
    as_json: bool,
) -> None:
    gpu_sizes = [size for sizes in asked_sizes for size in sizes]
    if not compare_sizes and len(gpu_sizes) > 1:
        raise click.UsageError("name at most one --gpu-gb, or take --all (make: GPU_GB=24, or ALL=1)")
    configure_logging("fit", facts=False)
    in_file = load_params()
    params = in_file.on(profile) if profile else in_file
    if recipe is None and not compare_sizes:
        raise click.UsageError(
            f"name a recipe, or take --all (make: RECIPE=, or ALL=1); profile {params.profile} can train: "
            f"{', '.join(trainable_recipes(params))}"
        )
    names = [recipe] if recipe else trainable_recipes(params)
    for name in names:
        available_base(params, name)
    if compare_sizes or gpu_sizes:
        refuse_cpu(params)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a folder's name, in a terminal that has no letters for it

    from tools.plan.preview import Previews

    previews = Previews(params=params, in_file=in_file.profile, exact=exact)
    sizes = gpu_sizes or GPU_SIZES
    memory_gb = gpu_sizes[0] if gpu_sizes else params.active.device.memory_gb
    if as_json and compare_sizes:
        print_json([previews.recipe_memory(name, size) for name in names for size in sizes])
    elif as_json:
        print_json(previews.recipe_memory(names[0], memory_gb))
    elif compare_sizes:
        show_matrix(previews, names, sizes, Console(highlight=False))
    else:
        show_recipe(previews, names[0], memory_gb, Console(highlight=False))


def refuse_cpu(params: Params) -> None:
    if params.active.device.kind == "cpu":
        others = [name for name, profile in params.profiles.items() if profile.device.kind == "cuda"]
        raise UserError(
            f"profile {params.profile} runs on a CPU, of which the size of a GPU says nothing; choose another with "
            f"--profile (make: PROFILE=): {', '.join(others) or 'there is none'}"
        )


def print_json(answer: RecipeMemory | list[RecipeMemory]) -> None:
    click.echo(json.dumps(to_jsonable_python(answer), indent=2))


def show_recipe(previews: Previews, name: str, memory_gb: float | None, console: Console) -> None:
    preview, judged = previews.of(name), previews.judged(name, memory_gb)
    plan, fit = preview.plan, judged.fit
    gpu = "" if memory_gb is None else f", {memory_gb:g} GB a GPU"
    facts = {
        "recipe": f"{plan.recipe}, profile {plan.profile}{gpu}",
        "base": preview.base.source,
        "settings": ", ".join(f"{setting} {value}" for setting, value in settings(plan).items()),
        "batch": preview.batch,
        "disk": f"{preview.disk}; {bytes_text(shutil.disk_usage('.').free)} free here",
    }
    print_facts(facts, console)
    console.print(budget_table(fit.prediction, fit.capacity_bytes))
    console.print()
    if fit.verdict not in (None, "fits"):
        console.print(Text(advice(judged.cheapest)))
        if judged.verdict == "does not fit":
            print_sharded(preview, judged, console)
    console.print(Text(evaluation_said(judged)))
    for before in previews.needs(name):
        verdict = previews.judged(before, memory_gb).verdict or "unknown"
        console.print(Text(f"before it   {before} is trained: {verdict}"))
    if (command := previews.recipe_command(name, memory_gb)) is not None:
        console.print(Text(f"run it by   {command}"), soft_wrap=True)


def print_sharded(preview: Preview, judged: Judged, console: Console) -> None:
    if (sharded := sharded_fit(judged.cheapest, preview.predict)) is not None:
        console.print(Text(sharded_advice(sharded)))


def evaluation_said(judged: Judged) -> str:
    taken, fitting = judged.evaluation, judged.evaluation_batch_size
    text = f"evaluation  {taken.prediction.total_bytes / 2**30:.2f} GiB"
    if taken.verdict != "does not fit":
        return f"{text}: {taken.verdict or 'unknown'}"
    halved = "nor does a batch of 1" if fitting is None else f"it halves its batch to {fitting}"
    return f"{text}: does not fit; {halved}"


def show_matrix(previews: Previews, names: Sequence[str], sizes: Sequence[float], console: Console) -> None:
    rows = {name: {size: matrix_cell(previews.judged(name, size)) for size in sizes} for name in names}
    batches = dict.fromkeys(previews.of(name).batch for name in names)
    disks = {name: previews.of(name).disk for name in names}
    bases = {previews.params.root(name): disks[name].merged_bytes for name in names}  # in the profile's precision
    facts = {"profile": previews.params.profile, "batch": "; ".join(batches), "disk": comparison_text(disks, bases)}
    print_facts(facts, console)
    print_matrix(rows, sizes, console)
    console.print(Text("With the cheapest settings that fit; where none do, those that take the least."))
    for line in ways_to_run(previews, names, sizes):
        console.print(Text(line), soft_wrap=True)


def ways_to_run(previews: Previews, names: Sequence[str], sizes: Sequence[float]) -> Iterator[str]:
    """The command on the smallest size that does: of one recipe, or of the comparison of each task they belong to."""
    alone = len(names) == 1
    for name in names if alone else dict.fromkeys(previews.params.recipe(name).task for name in names):
        command_on = previews.recipe_command if alone else previews.comparison_command
        found = ((size, command) for size in sorted(sizes) if (command := command_on(name, size)) is not None)
        size, command = next(found, (None, None))
        yield f"{name}: none of these sizes runs it whole" if size is None else f"{name} on {size:g} GB: {command}"


def print_matrix(rows: Mapping[str, Mapping[float, MatrixCell]], sizes: Sequence[float], console: Console) -> None:
    """In one table, or in as many as the terminal's width asks for."""
    table = terminal_table(matrix_table({name: {size: cells[size] for size in sizes} for name, cells in rows.items()}))
    if len(sizes) > 1 and Measurement.get(console, console.options.update(width=1000), table).maximum > console.width:
        half = len(sizes) // 2
        print_matrix(rows, sizes[:half], console)
        print_matrix(rows, sizes[half:], console)
    else:
        console.print(table)
        console.print()


def matrix_cell(judged: Judged) -> MatrixCell:
    cheapest = judged.cheapest
    assert cheapest.verdict is not None
    before, after = settings(judged.fit.plan), settings(cheapest.plan)
    # The accumulation follows from the micro-batch.
    changed = [f"{name} {after[name]}" for name in after if after[name] != before[name] and name != "grad_accumulation"]
    return MatrixCell(
        verdict=cheapest.verdict,
        predicted_bytes=cheapest.prediction.total_bytes,
        setting="" if cheapest.verdict == "does not fit" else ",\n".join(changed),
    )


def print_facts(facts: Mapping[str, str], console: Console) -> None:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for name, fact in facts.items():
        grid.add_row(Text(name), Text(fact, overflow="fold"))
    console.print(grid)
    console.print()


if __name__ == "__main__":
    main()
