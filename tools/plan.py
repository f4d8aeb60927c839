"""Will a recipe fit a GPU? Answered before anything is fetched, without weights, GPU or network; nothing is written.

Reads   params.yaml; the base's geometry; the base's tokenizer and the prepared data, if they are there
Run     make plan RECIPE=r1-llm-only PROFILE=qwen2-vl-7b-48gb GPU_GB=24
        make plan PROFILE=qwen2-vl-7b-48gb ALL=1        every recipe of the profile, on GPUs of several sizes

--json prints the fields of RecipeMemory; with --all, a shorter object per recipe and size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from stages.core.errors import UserError, configure_logging
from stages.core.lineage import LINEAGE_FILE, read_lineage
from stages.core.params import load_params
from stages.core.params.schema import BuildParams, Params
from stages.core.records import shown
from stages.kit.data.prepared import STATS_FILE, read_origin
from stages.kit.memory.fit import Fit, advice, cheapest_fit, fastest_fit
from stages.kit.models.folders import PUBLISHED, geometry_config_path
from stages.kit.planning.disk import DiskUse, comparison_text, disk_use
from stages.kit.planning.ladder import settings
from stages.kit.planning.prediction import MemoryRecord, gib_text, in_gib
from stages.kit.reporting.tables import Column, Row, Table, terminal_table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stages.kit.planning.plan import Plan
    from stages.plan import Preview

GPU_SIZES = (16.0, 24.0, 40.0, 48.0, 80.0)
"""Sizes of GPUs in GB, as they are sold."""


@dataclass(frozen=True, kw_only=True)
class RecipeMemory:
    """Predicted memory of a recipe; amounts in GiB, of one device, the fullest."""

    recipe: str
    profile: str
    memory_gb: float | None
    """Size of the GPU, as cards are sold; None on a CPU, whose capacity is the machine's memory."""
    base: str
    """Source of the base, e.g. `hub:OWNER/NAME@REVISION`."""
    batch: str
    """The batch that the prediction is for, in words."""
    settings: dict[str, str]
    """Settings that the ladder may change, as planned: micro_batch, grad_accumulation, gradient_checkpointing, ..."""
    memory: MemoryRecord
    """The plan's, with the fields of data/runs/RECIPE/memory.json; its verdict is "fits", "too close", "does not fit",
    or "unknown" if the profile does not give the GPU's size."""
    usable_gib: float | None
    cheapest: dict[str, Any] | None
    """The first plan down the ladder that fits; else the first that might; else the last: its changes, settings,
    verdict and total_gib. None if the plan fits as it is, or the device is unknown."""
    evaluation_batch_size: int
    disk: DiskUse
    command: str | None
    """Runs the recipe on this device; None if it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A recipe's base and data before its stages have run. Nothing is fetched."""

    source: str
    config_dir: Path
    """Holds config.json, the model's geometry."""
    has_tokenizer: bool
    build: BuildParams | None
    """The mixture of models of this geometry that the recipe starts from."""
    data_dir: Path | None
    """The prepared dataset; None if there is none, or it is another profile's."""


def root_base(params: Params, recipe: str) -> tuple[str, BuildParams | None]:
    """The base at the root of a recipe's chain of recipes, and the build on the way, if there is one."""
    kind, _, name = params.root(recipe).partition("/")
    build = params.build(name) if kind == "builds" else None
    return (build.base.removeprefix("bases/") if build else name), build


def trainable_recipes(params: Params) -> list[str]:
    """The recipes whose base and data the profile has."""
    bases, datasets = params.active.bases, params.active.datasets
    return [
        name
        for name, recipe in params.recipes.items()
        if root_base(params, name)[0] in bases and recipe.data in datasets
    ]


def available_inputs(params: Params, recipe: str) -> Inputs:
    """Raises UserError if the profile has no such base, or its geometry is not known."""
    name, build = root_base(params, recipe)
    source, folder = params.base_source(name), Path("data/bases") / name
    kind, _, where = source.partition(":")
    repo_id = where.partition("@")[0]
    has_tokenizer = True
    if not _is_built_from(folder, source):
        has_tokenizer = kind == "folder"
        geometry = PUBLISHED.get(repo_id)
        if not has_tokenizer and geometry is None:
            raise UserError(
                f"base {name} of profile {params.profile} is {repo_id}, whose geometry is not known before it is "
                f"fetched; fetch it with: dvc exp run -S profile={params.profile} base@{name}"
            )
        folder = geometry_config_path(geometry).parent if geometry and not has_tokenizer else Path(where)
    data_dir = available_data(params, params.recipe(recipe).data)
    return Inputs(source=source, config_dir=folder, has_tokenizer=has_tokenizer, build=build, data_dir=data_dir)


def config_of_base(inputs: Inputs) -> PreTrainedConfig:
    """The geometry that the recipe starts from; a mixture's, if it is built from models of config_dir."""
    from stages.kit.mixture.build import mixture_config
    from stages.kit.models.load import load_config

    config, build = load_config(inputs.config_dir), inputs.build
    return config if build is None else mixture_config(config, experts=len(build.experts), top_k=build.top_k)


def _is_built_from(folder: Path, source: str) -> bool:
    if not (folder / LINEAGE_FILE).is_file():
        return False
    found, kind = read_lineage(folder).source, source.partition(":")[0]
    revision = f"@{found['revision']}" if "revision" in found else ""
    return kind in found and same_source(f"{kind}:{found[kind]}{revision}", source)


def available_data(params: Params, name: str) -> Path | None:
    """The folder of a prepared dataset; None if there is none, or it was made from other sources than the profile's."""
    dataset, folder = params.dataset(name), Path("data/prepared") / name
    if not (folder / STATS_FILE).exists():
        return None
    found = read_origin(folder)
    if {part: taken.asked for part, taken in found.parts.items()} != (dataset.mix or {}):
        return None
    sources = [(taken.source, params.dataset(part).source) for part, taken in found.parts.items()]
    return folder if all(same_source(*each) for each in [(found.source, dataset.source), *sources]) else None


def same_source(found: str, wanted: str) -> bool:
    """Whether a resolved source is the one that a profile names, by a commit, its beginning, or a branch.

    A branch counts as the same, whatever its commit: only the hub knows.
    """
    if not wanted.startswith("hub:"):
        return found == wanted
    repo, _, revision = wanted.partition("@")
    found_repo, _, commit = found.partition("@")
    return found_repo == repo and (commit.startswith(revision) or not re.fullmatch("[0-9a-f]{7,40}", revision))


def gpu_sizes(text: str) -> tuple[float, ...]:
    """Sizes of GPUs, separated by blanks or commas: `24`, `24 48`, `24GB,48GB`."""
    return tuple(gpu_size(size) for size in re.split(r"\s*,\s*|\s+(?=\d)", text.strip()))


def gpu_size(value: float | str) -> float:
    """GB from 24, "24", "24GB" or "24 GiB"; a card sold as 24 GB has about 24 GiB. Raises UserError for other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", str(value), re.IGNORECASE)
    if not found or not 1 <= float(found[1]) < 2**20:
        raise UserError(f"{shown(value)} is no size of a GPU; expected GB as the card is sold by, e.g. 24 or 24GB")
    return float(found[1])


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions for one profile's recipes, each plan predicted once."""

    params: Params
    in_file: str
    """The profile that params.yaml itself has active."""
    options: dict[str, Any]
    """MemoryPredictor's: exact, and the predictions made so far."""

    def preview(self, recipe: str) -> tuple[Preview, Inputs]:
        import transformers

        from stages.plan import preview

        transformers.logging.set_verbosity_error()  # it warns of the stand-in's tokens
        inputs = available_inputs(self.params, recipe)
        config = config_of_base(inputs)
        has_data = inputs.has_tokenizer and inputs.data_dir is not None
        with Console(stderr=True, force_jupyter=False).status(f"{recipe}: predicting", spinner="line"):
            found = preview(self.params, recipe, config, base_dir=inputs.config_dir, has_data=has_data, **self.options)
        return found, inputs

    def fits(self, found: Preview, memory_gb: float | None) -> tuple[Fit, Fit]:
        """On a GPU of that size, the plan as the profile has it there, and the cheapest change of it that fits."""
        device = replace(found.fit.plan.device, memory_gb=memory_gb)
        fit = replace(found.fit, capacity_bytes=found.predict.capacity_bytes(device))
        if self.params.active.memory.fit == "fill":
            fit = fastest_fit(fit, found.predict)
        return fit, cheapest_fit(fit, found.predict)

    def cheapest(self, found: Preview, memory_gb: float) -> Fit:
        fit, cheapest = self.fits(found, memory_gb)
        return replace(fit, changes=()) if cheapest is fit else cheapest

    def recipe_memory(self, recipe: str, memory_gb: float | None) -> tuple[RecipeMemory, list[str]]:
        """The prediction of a recipe on a GPU of that size, and its budget and advice in lines."""
        found, inputs = self.preview(recipe)
        fit, cheapest = self.fits(found, memory_gb)
        plan = replace(fit.plan, device=replace(fit.plan.device, memory_gb=memory_gb))
        evaluation, batch_size = found.evaluation(replace(fit, plan=plan))
        lines = fit.prediction.lines(fit.capacity_bytes)
        changed: dict[str, Any] | None = None
        if fit.verdict not in (None, "fits"):
            changed = {
                "changes": cheapest.changes,
                "settings": settings(cheapest.plan),
                "verdict": cheapest.verdict,
                "total_gib": in_gib(cheapest.prediction.total_bytes),
            }
            lines.append(advice(cheapest))
        verdict = evaluation.verdict or "unknown"
        lines.append(f"evaluation  {gib_text(evaluation.prediction.total_bytes)} GiB, {batch_size} at once: {verdict}")
        batch = f"the largest samples of {inputs.data_dir}"
        if inputs.data_dir is None or not inputs.has_tokenizer:
            missing = "data" if inputs.data_dir is None else "tokenizer"
            pixels = f" and max_pixels {plan.images.max_pixels}" if plan.images else ""
            batch = f"no {missing} yet: the worst within max_length {plan.max_length}{pixels}"
        stage = "train" if batch_size == 1 and verdict == "does not fit" else "evaluate"
        answer = RecipeMemory(
            recipe=recipe,
            profile=self.params.profile,
            memory_gb=memory_gb,
            base=inputs.source,
            batch=batch,
            settings=settings(fit.plan),
            memory=fit.record(evaluation),
            usable_gib=None if fit.capacity_bytes is None else in_gib(fit.capacity_bytes),
            cheapest=changed,
            evaluation_batch_size=batch_size,
            disk=disk_use(fit.plan, self.params),
            command=None if cheapest.verdict == "does not fit" else self._command(f"{stage}@{recipe}", plan, cheapest),
        )
        return answer, lines

    def _command(self, stage: str, plan: Plan, cheapest: Fit) -> str:
        """Runs a stage in a temporary folder, so that params.yaml and the workspace stay as they are.

        `++` sets a value whether or not params.yaml has it.
        """
        profile, active = self.params.profile, self.params.active
        changes = [f"profile={profile}"] if profile != self.in_file else []
        if plan.device.memory_gb != active.device.memory_gb:
            added = "++" if active.device.memory_gb is None else ""
            changes.append(f"{added}profiles.{profile}.device.memory_gb={plan.device.memory_gb:g}")
        if active.memory.fit not in ("auto", "fill") and cheapest.changes:
            changes.append(f"++profiles.{profile}.memory.fit=auto")
        return " ".join(["dvc exp run --temp", *(f"-S {change}" for change in changes), stage])


def predictions_for(profile: str | None, *, exact: bool = False) -> Predictions:
    """profile: of params.yaml; None for the active one. exact: record every layer of the model, not a few."""
    in_file = load_params()
    params = in_file.on(profile) if profile else in_file
    return Predictions(params=params, in_file=in_file.profile, options={"exact": exact, "made": {}})


def refuse_cpu(params: Params) -> None:
    if params.active.device.kind == "cpu":
        others = [name for name, profile in params.profiles.items() if profile.device.kind == "cuda"]
        raise UserError(
            f"profile {params.profile} runs on a CPU, which has no GPU size; choose another with --profile "
            f"(make: PROFILE=): {', '.join(others) or 'there is none'}"
        )


@click.command(help=__doc__)
@click.argument("recipe", required=False)
@click.option("--profile", help="A profile of params.yaml.  [default: the active one]")
@click.option("--gpu-gb", "sizes", type=gpu_sizes, metavar="SIZES", help="Sizes of other GPUs, in GB.")
@click.option("--all", "compare_sizes", is_flag=True, help="Every recipe, or the one given, on GPUs of several sizes.")
@click.option("--exact", is_flag=True, help="Record every layer of the model, not a few: takes longer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    recipe: str | None,
    profile: str | None,
    sizes: tuple[float, ...] | None,
    compare_sizes: bool,
    exact: bool,
    as_json: bool,
) -> None:
    configure_logging("plan", facts=False)
    predictions = predictions_for(profile, exact=exact)
    params = predictions.params
    if not compare_sizes and (recipe is None or len(sizes or ()) > 1):
        raise click.UsageError(
            f"name a recipe and at most one size, or take --all (make: RECIPE=, GPU_GB=, or ALL=1); profile "
            f"{params.profile} can train: {', '.join(trainable_recipes(params))}"
        )
    names = [recipe] if recipe else trainable_recipes(params)
    for name in names:
        available_inputs(params, name)
    if compare_sizes or sizes:
        refuse_cpu(params)
    if compare_sizes:
        show_all(predictions, names, sorted(set(sizes or GPU_SIZES)), as_json=as_json)
        return
    answer, lines = predictions.recipe_memory(names[0], sizes[0] if sizes else params.active.device.memory_gb)
    if as_json:
        click.echo(json.dumps(asdict(answer), indent=2))
        return
    gpu = "" if answer.memory_gb is None else f", {answer.memory_gb:g} GB per GPU"
    click.echo(f"recipe    {answer.recipe}, profile {answer.profile}{gpu}\nbase      {answer.base}")
    click.echo(f"settings  {', '.join(f'{name} {value}' for name, value in answer.settings.items())}")
    click.echo(f"batch     {answer.batch}\ndisk      {answer.disk}\n")
    click.echo("\n".join([*lines, *([f"run it by   {answer.command}"] if answer.command else [])]))


def show_all(predictions: Predictions, names: Sequence[str], sizes: Sequence[float], *, as_json: bool) -> None:
    """Recipes by sizes of GPU, each with the cheapest settings that fit."""
    previews = {name: predictions.preview(name)[0] for name in names}
    rows = {name: [predictions.cheapest(found, size) for size in sizes] for name, found in previews.items()}
    if as_json:
        cells = [
            {
                "recipe": name,
                "memory_gb": size,
                "verdict": fit.verdict,
                "total_gib": in_gib(fit.prediction.total_bytes),
                "settings": settings(fit.plan),
            }
            for name, fits in rows.items()
            for size, fit in zip(sizes, fits, strict=True)
        ]
        click.echo(json.dumps(cells, indent=2))
        return
    table = Table(
        columns=(Column("recipe", "Recipe"), *(Column(f"{size:g}gb", f"{size:g} GB") for size in sizes)),
        rows=tuple(Row(cells=(name, *map(_cell, fits))) for name, fits in rows.items()),
    )
    Console(highlight=False).print(terminal_table(table))
    params = predictions.params
    disks = {name: disk_use(found.fit.plan, params) for name, found in previews.items()}
    bases = {params.root(name): disk.merged_bytes for name, disk in disks.items()}  # in its precision
    click.echo(f"\nProfile {params.profile}, with the cheapest settings that fit; else with the least.")
    click.echo(f"Disk: {comparison_text(disks, bases)}")


def _cell(fit: Fit) -> str:
    """Verdict, total and changes; the accumulation follows from the micro-batch."""
    changes = [] if fit.verdict == "does not fit" else fit.changes
    shorter = [change.partition(" ")[0] + " " + change.rpartition(" ")[2] for change in changes]
    kept = [change for change in shorter if not change.startswith("grad_accumulation")]
    return "\n".join([fit.verdict or "unknown", f"{gib_text(fit.prediction.total_bytes)} GiB", *kept])


if __name__ == "__main__":
    main()
