"""Will a recipe fit a GPU? Said before anything is fetched: without weights, GPU or network, and nothing is written.

Reads   params.yaml; the base's geometry; the base's tokenizer and the prepared data, where they are there
Run     make plan RECIPE=r1-llm-only PROFILE=qwen2-vl-7b-48gb GPU_GB=24

With --all it says so of every recipe that the profile can train, for GPUs of several sizes.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import click
import transformers
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from stages.kit.at_hand import BaseAtHand, base_at_hand, data_at_hand, trainable_recipes
from stages.kit.disk import DiskUse, comparison_text, disk_use
from stages.kit.errors import UserError, bytes_text
from stages.kit.logs import configure_logging
from stages.kit.memory.budget import MatrixCell, budget_table, matrix_table
from stages.kit.memory.fit import Fit, advice, cheapest_fit, fit_of, sharded_advice, sharded_fit
from stages.kit.memory.foresight import Foresight
from stages.kit.memory.ladder import settings
from stages.kit.memory.prediction import Prediction
from stages.kit.memory.stand_in import stand_in_batch, stand_in_processor
from stages.kit.models.load import load_config
from stages.kit.models.mixture.merge import mixture_config
from stages.kit.models.processors import load_processor
from stages.kit.params.load import load_params
from stages.kit.params.schema import Params
from stages.kit.plan import Plan, resolve_plan
from stages.kit.reporting.tables import terminal_table
from stages.kit.training.collators import ConversationCollator
from stages.kit.training.rehearsal import largest_batch
from stages.tasks import load_task

GPU_SIZES = (16.0, 24.0, 40.0, 48.0, 80.0)
"""In GB, as cards are sold."""


@click.command(help=__doc__)
@click.argument("recipe", required=False)
@click.option("--profile", help="A profile of params.yaml.  [default: the active one]")
@click.option("--gpu-gb", "gpu_sizes", type=click.FloatRange(min=1), multiple=True, help="The GPU's size, not its own.")
@click.option("--all", "compare_sizes", is_flag=True, help="Every recipe, or the one given, on GPUs of several sizes.")
@click.option("--exact", is_flag=True, help="Look at every layer of the model, not at a few: takes longer.")
def main(recipe: str | None, profile: str | None, gpu_sizes: Sequence[float], compare_sizes: bool, exact: bool) -> None:
    if not compare_sizes and (recipe is None or len(gpu_sizes) > 1):
        raise click.UsageError("name one recipe and at most one --gpu-gb, or take --all")
    configure_logging("fit", facts=False)
    transformers.logging.set_verbosity_error()  # it warns of the stand-in's tokens
    params = load_params()
    params = params.on(profile) if profile else params
    if compare_sizes or gpu_sizes:
        refuse_cpu(params)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a folder's name, in a terminal that has no letters for it
    console = Console(highlight=False)
    if compare_sizes:
        show_matrix(
            params, [recipe] if recipe else trainable_recipes(params), gpu_sizes or GPU_SIZES, console, exact=exact
        )
    else:
        assert recipe is not None
        memory_gb = gpu_sizes[0] if gpu_sizes else params.active.device.memory_gb
        show_recipe(look_ahead(params, recipe, exact=exact, made={}), memory_gb, console)


def refuse_cpu(params: Params) -> None:
    if params.active.device.kind == "cpu":
        others = [name for name, profile in params.profiles.items() if profile.device.kind == "cuda"]
        raise UserError(
            f"profile {params.profile} runs on a CPU, of which the size of a GPU says nothing; choose another with "
            f"--profile (make: PROFILE=): {', '.join(others) or 'there is none'}"
        )


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A recipe's plan, and what to foresee it with."""

    plan: Plan
    base: BaseAtHand
    foresight: Foresight
    disk: DiskUse
    batch: str
    """Where the batch came from that the prediction is for, in words."""

    def foresee(self, plan: Plan) -> Prediction:
        with Console(stderr=True).status(f"{plan.recipe}: {said(plan)}", spinner="line"):
            return self.foresight(plan)

    def fit(self, memory_gb: float | None) -> Fit:
        return fit_of(self.plan, self.foresee, self.foresight.capacity_bytes(memory_gb))


def look_ahead(params: Params, name: str, *, exact: bool, made: dict[str, Prediction]) -> Outlook:
    """made: the predictions of this profile so far."""
    recipe = params.recipe(name)
    base, data_dir = base_at_hand(params, name), data_at_hand(params, recipe.data)
    config = load_config(base.config_dir)
    if base.build is not None:
        config = mixture_config(config, experts=len(base.build.experts), top_k=base.build.top_k)
    samples = load_task(recipe.task, "samples")
    samples.check(config.model_type, recipe.target)
    if base.processor_dir is not None and data_dir is not None:
        records = samples.read_split(data_dir, "train")
        plan = resolve_plan(params, name, train_samples=len(records))
        processor = load_processor(base.processor_dir, plan.images)
        collator = ConversationCollator.of_plan(plan, processor, records, samples)
        foresight = Foresight(config=config, processor=processor, batch_of=partial(largest_batch, collator))
        batch = f"the largest samples of {data_dir}"
    else:
        plan = resolve_plan(params, name, train_samples=recipe.effective_batch)
        max_pixels = plan.images.max_pixels if plan.images else None
        foresight = Foresight(
            config=config,
            processor=stand_in_processor(config, plan.images),
            batch_of=partial(stand_in_batch, config, max_length=plan.max_length, max_pixels=max_pixels),
        )
        missing = "data" if data_dir is None else "tokenizer"
        limits = f"max_length {plan.max_length}" + (f" and max_pixels {max_pixels}" if max_pixels else "")
        batch = f"no {missing} yet: the worst within {limits}"
    foresight = replace(foresight, exact=exact, made=made)
    plan = replace(plan, base_dir=str(base.config_dir))  # that of a recipe which continues another is not made yet
    plan = foresight.counted(plan)
    return Outlook(plan=plan, base=base, foresight=foresight, disk=disk_use(plan, params), batch=batch)


def show_recipe(outlook: Outlook, memory_gb: float | None, console: Console) -> None:
    plan, fit = outlook.plan, outlook.fit(memory_gb)
    gpu = "" if memory_gb is None else f", {memory_gb:g} GB a GPU"
    facts = {
        "recipe": f"{plan.recipe}, profile {plan.profile}{gpu}",
        "base": outlook.base.source,
        "settings": said(plan),
        "batch": outlook.batch,
        "disk": f"{outlook.disk}; {bytes_text(shutil.disk_usage('.').free)} free here",
    }
    print_facts(facts, console)
    console.print(budget_table(fit.prediction, fit.capacity_bytes))
    if fit.verdict in (None, "fits"):
        return
    cheapest = cheapest_fit(fit, outlook.foresee)
    console.print(Text(f"\n{advice(cheapest)}"))
    if cheapest.verdict == "does not fit" and (sharded := sharded_fit(cheapest, outlook.foresee)) is not None:
        console.print(Text(sharded_advice(sharded)))
    if cheapest.verdict != "does not fit":
        here = f"profiles.{plan.profile}"
        changes = f"-S profile={plan.profile} -S {here}.device.memory_gb={memory_gb:g} -S {here}.memory.fit=auto"
        console.print(Text(f"take that by: dvc exp run {changes} train@{plan.recipe}"), soft_wrap=True)


def show_matrix(params: Params, names: Sequence[str], sizes: Sequence[float], console: Console, *, exact: bool) -> None:
    made: dict[str, Prediction] = {}
    rows: dict[str, dict[float, MatrixCell]] = {}
    batches: dict[str, None] = {}
    disks: dict[str, DiskUse] = {}
    bases: dict[str, int] = {}
    for name in names:
        outlook = look_ahead(params, name, exact=exact, made=made)
        rows[name] = {size: matrix_cell(outlook, size) for size in sizes}
        batches[outlook.batch] = None
        disks[name] = outlook.disk
        bases[params.root(name)] = outlook.disk.merged_bytes  # in the precision of the profile
    facts = {"profile": params.profile, "batch": "; ".join(batches), "disk": comparison_text(disks, bases)}
    print_facts(facts, console)
    print_matrix(rows, sizes, console)
    console.print(Text("With the cheapest settings that fit; where none do, those that take the least."))


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


def matrix_cell(outlook: Outlook, memory_gb: float) -> MatrixCell:
    fit = cheapest_fit(outlook.fit(memory_gb), outlook.foresee)
    assert fit.verdict is not None
    before, after = settings(outlook.plan), settings(fit.plan)
    # The accumulation follows from the micro-batch.
    changed = [f"{name} {after[name]}" for name in after if after[name] != before[name] and name != "grad_accumulation"]
    return MatrixCell(
        verdict=fit.verdict,
        predicted_bytes=fit.prediction.total_bytes,
        setting="" if fit.verdict == "does not fit" else ",\n".join(changed),
    )


def print_facts(facts: Mapping[str, str], console: Console) -> None:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for name, fact in facts.items():
        grid.add_row(Text(name), Text(fact, overflow="fold"))
    console.print(grid)
    console.print()


def said(plan: Plan) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings(plan).items())


if __name__ == "__main__":
    main()
