"""Will a recipe fit a GPU? Answered before anything is fetched, without weights, GPU or network; nothing is written.

Reads   params.yaml; the base's geometry; the base's tokenizer and the prepared data, where they are there
Run     make plan RECIPE=r1-llm-only PROFILE=qwen2-vl-7b-48gb GPU_GB=24

With --all it answers for every recipe that the profile can train, for GPUs of several sizes. It ends with the command
that runs the recipe so. --json prints the same as JSON, with the fields of tools/plan/recipe_memory.py.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from stages.core.errors import UserError, bytes_text, configure_logging
from stages.core.params import load_params
from stages.core.params.schema import Params
from stages.core.records import shown
from stages.kit.memory.fit import advice
from stages.kit.planning.disk import comparison_text
from stages.kit.reporting.tables import terminal_table
from tools.plan.available_inputs import available_base, trainable_recipes
from tools.plan.drawing import budget_table, matrix_table
from tools.plan.recipe_memory import RecipeMemory

if TYPE_CHECKING:
    from tools.plan.preview import Previews

GPU_SIZES = (16.0, 24.0, 40.0, 48.0, 80.0)
"""In GB, as cards are sold."""


def gpu_sizes(text: str) -> tuple[float, ...]:
    """Sizes of GPUs, separated by blanks or commas: `24`, `24 48`, `24GB,48GB`."""
    return tuple(gpu_size(size) for size in re.split(r"\s*,\s*|\s+(?=\d)", text.strip()))


def gpu_size(value: float | str) -> float:
    """In GB: 24, "24", "24GB", "24 GiB"; a card sold as 24 GB has about 24 GiB. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", str(value), re.IGNORECASE)
    if not found or not 1 <= float(found[1]) < 2**20:
        raise UserError(f"{shown(value)} is no size of a GPU; expected GB as the card is sold by, e.g. 24 or 24GB")
    return float(found[1])


@click.command(help=__doc__)
@click.argument("recipe", required=False)
@click.option("--profile", help="A profile of params.yaml.  [default: the active one]")
@click.option("--gpu-gb", "asked", type=gpu_sizes, metavar="SIZES", multiple=True, help="Size of another GPU, in GB.")
@click.option("--all", "compare_sizes", is_flag=True, help="Every recipe, or the one given, on GPUs of several sizes.")
@click.option("--exact", is_flag=True, help="Look at every layer of the model, not at a few: takes longer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    recipe: str | None,
    profile: str | None,
    asked: Sequence[tuple[float, ...]],
    compare_sizes: bool,
    exact: bool,
    as_json: bool,
) -> None:
    sizes = [size for several in asked for size in several]
    if not compare_sizes and len(sizes) > 1:
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
    if compare_sizes or sizes:
        refuse_cpu(params)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a folder's name, in a terminal that has no letters for it

    from tools.plan.preview import Previews

    previews = Previews(params, in_file=in_file.profile, exact=exact)
    if compare_sizes:
        answers = [previews.recipe_memory(name, size) for name in names for size in sizes or GPU_SIZES]
    else:
        answers = [previews.recipe_memory(names[0], sizes[0] if sizes else params.active.device.memory_gb)]
    if as_json:
        click.echo(json.dumps(to_jsonable_python(answers if compare_sizes else answers[0]), indent=2))
    elif compare_sizes:
        show_matrix(previews, answers, Console(highlight=False))
    else:
        show_recipe(previews, answers[0], Console(highlight=False))


def refuse_cpu(params: Params) -> None:
    if params.active.device.kind == "cpu":
        others = [name for name, profile in params.profiles.items() if profile.device.kind == "cuda"]
        raise UserError(
            f"profile {params.profile} runs on a CPU, of which the size of a GPU says nothing; choose another with "
            f"--profile (make: PROFILE=): {', '.join(others) or 'there is none'}"
        )


def show_recipe(previews: Previews, answer: RecipeMemory, console: Console) -> None:
    judged = previews.judged(answer.recipe, answer.memory_gb)
    gpu = "" if answer.memory_gb is None else f", {answer.memory_gb:g} GB a GPU"
    facts = {
        "recipe": f"{answer.recipe}, profile {answer.profile}{gpu}",
        "base": answer.base,
        "settings": ", ".join(f"{setting} {value}" for setting, value in answer.settings.items()),
        "batch": answer.batch,
        "disk": f"{answer.disk}; {bytes_text(shutil.disk_usage('.').free)} free here",
    }
    print_facts(facts, console)
    console.print(budget_table(judged.fit.prediction, judged.fit.capacity_bytes))
    console.print()
    if answer.cheapest is not None:
        for line in advice(judged.cheapest, previews.preview(answer.recipe).predict):
            console.print(Text(line))
    console.print(Text(evaluation_text(answer)))
    for before, verdict in answer.after.items():
        console.print(Text(f"before it   {before} is trained: {verdict}"))
    if answer.command is not None:
        console.print(Text(f"run it by   {answer.command}"), soft_wrap=True)


def evaluation_text(answer: RecipeMemory) -> str:
    gib, verdict, fitting = answer.memory.evaluation_gib, answer.memory.evaluation_verdict, answer.evaluation_batch_size
    if verdict != "does not fit":
        return f"evaluation  {gib:.2f} GiB, {fitting} at once: {verdict}"
    smaller = "nor does a batch of 1" if fitting is None else f"it halves its batch to {fitting}"
    return f"evaluation  {gib:.2f} GiB: {verdict}; {smaller}"


def show_matrix(previews: Previews, answers: Sequence[RecipeMemory], console: Console) -> None:
    disks = {answer.recipe: answer.disk for answer in answers}
    bases = {previews.params.root(name): disk.merged_bytes for name, disk in disks.items()}  # in its precision
    batches = dict.fromkeys(answer.batch for answer in answers)
    facts = {"profile": answers[0].profile, "batch": "; ".join(batches), "disk": comparison_text(disks, bases)}
    print_facts(facts, console)
    print_matrix(answers, console)
    console.print(Text("With the cheapest settings that fit; where none do, those that take the least."))
    for line in ways_to_run(previews, answers):
        console.print(Text(line), soft_wrap=True)


def ways_to_run(previews: Previews, answers: Sequence[RecipeMemory]) -> Iterator[str]:
    """The command on the smallest size that does: of one recipe, or of the comparison of each task they belong to."""
    sizes = sorted(answer.memory_gb or 0 for answer in answers)
    names = dict.fromkeys(answer.recipe for answer in answers)
    alone = len(names) == 1
    for subject in names if alone else dict.fromkeys(previews.params.recipe(name).task for name in names):
        command_on = previews.recipe_command if alone else previews.comparison_command
        commands = ((size, command_on(subject, size)) for size in sizes)
        found = (f"{subject} on {size:g} GB: {command}" for size, command in commands if command)
        yield next(found, f"{subject}: none of these sizes runs it whole")


def print_matrix(answers: Sequence[RecipeMemory], console: Console) -> None:
    """In one table, or in as many as the terminal's width asks for."""
    table, sizes = terminal_table(matrix_table(answers)), list(dict.fromkeys(answer.memory_gb for answer in answers))
    if len(sizes) > 1 and Measurement.get(console, console.options.update(width=1000), table).maximum > console.width:
        for part in (sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]):
            print_matrix([answer for answer in answers if answer.memory_gb in part], console)
    else:
        console.print(table)
        console.print()


def print_facts(facts: Mapping[str, str], console: Console) -> None:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for name, fact in facts.items():
        grid.add_row(Text(name), Text(fact, overflow="fold"))
    console.print(grid)
    console.print()


if __name__ == "__main__":
    main()
