"""Does a recipe fit its device, and how long does it take? No weights, GPU or network, and nothing is written.

Reads   params.yaml; the base's geometry; the base's tokenizer and the prepared data, if they are there
Run     make plan RECIPE=r1-llm-only PROFILE=qwen2-vl-7b GPU="RTX 3090"
        make plan PROFILE=qwen2-vl-7b ALL=1        every recipe of the profile, on GPUs of several sizes

With other values than those of params.yaml (--set) it also says what they change. --json prints the fields of
RecipeMemory, with --all a list of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import click
from rich.console import Console

from stages.core.environment import SET, pinned_instructions
from stages.core.errors import UserError, configure_logging
from stages.core.lineage import folder_digest
from stages.core.params import load_params
from stages.core.params.schema import BuildParams, Params
from stages.core.provenance import PROVENANCE_DIR, Provenance, read_provenance
from stages.core.records import Unreadable, parse_yaml, refusal
from stages.core.tasks import load_task, reader_of
from stages.data.splits import STATS_FILE
from stages.launcher.settings import wrong_for_tasks
from stages.memory.fit import Duration, Fit, advice, cheapest_fit, duration, fastest_fit, process_words, time_text
from stages.models.folders import GEOMETRIES_DIR
from stages.planning.cards import named_card
from stages.planning.disk import DiskUse, disk_use
from stages.planning.ladder import settings
from stages.planning.prediction import PlannedMemory, gib_text
from stages.reporting.tables import Column, Table, terminal_table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stages.memory.preview import Preview
    from tools.timing import MeasuredTime

GPU_SIZES = "16, 24, 40, 48, 80"
"""Sizes of GPUs in GB, as they are sold."""


@dataclass(frozen=True, kw_only=True)
class RecipeMemory:
    """Predicted memory and time of a recipe, of one device."""

    recipe: str
    profile: str
    memory_gb: float | None
    """Size of the GPU, as cards are sold; None on a CPU: its capacity is the machine's memory."""
    card: str | None
    base: str
    """Source of the base, e.g. `hub:OWNER/NAME@REVISION`."""
    batch: str
    """The batch that the prediction is for, in words."""
    settings: dict[str, str]
    """Settings that the ladder may change, as planned: micro_batch, grad_accumulation, gradient_checkpointing, ..."""
    trainable: int
    """Parameters that are trained."""
    memory: PlannedMemory
    """The plan's, with the fields of data/runs/RECIPE/memory.json; its verdict is "fits", "too close", "does not fit",
    or "unknown" if the profile does not give the GPU's size."""
    cheapest: dict[str, Any] | None
    """The first plan down the ladder that fits; else the first that might; else the last: its changes, settings,
    verdict and total_bytes. None if the plan fits as it is, or the device is unknown."""
    disk: DiskUse
    duration: Duration | MeasuredTime | None
    """None on a GPU in fp32 or of a size that no card of the table has; on a CPU unless it is measured."""
    command: str | None
    """Runs the recipe on this device; None if it does not fit."""

    def difference(self, before: RecipeMemory) -> str:
        """Everything that another prediction of the recipe has differently: `GiB 4.00 -> 8.00, micro_batch 4 -> 8`."""

        def facts(of: RecipeMemory) -> dict[str, str]:
            time = next(iter(of.duration.hours.items()), None) if of.duration else None
            return {
                "GiB": gib_text(of.memory.prediction.total_bytes),
                "trainable": f"{of.trainable:,}",
                **({f"time on {time[0]}": time_text(time[1])} if time else {}),
                "verdict": of.memory.verdict,
                **of.settings,
            }

        old, new = facts(before), facts(self)
        both = {name: (old.get(name, "none"), new.get(name, "none")) for name in old | new}
        return ", ".join(f"{name} {was} -> {now}" for name, (was, now) in both.items() if was != now) or "nothing"


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
    """The prepared dataset; None if there is none, or it was made with other settings."""


def root_base(params: Params, recipe: str) -> tuple[str, BuildParams | None]:
    """The base at the root of a recipe's chain of recipes, and the build on the way, if there is one."""
    kind, _, name = params.root(recipe).partition("/")
    build = params.build(name) if kind == "builds" else None
    return (build.base.removeprefix("bases/") if build else name), build


def trainable_recipes(params: Params) -> list[str]:
    """The recipes with a base and data that the profile has."""
    bases, data = params.active.bases, params.active.datasets
    return [name for name, each in params.recipes.items() if root_base(params, name)[0] in bases and each.data in data]


def available_inputs(params: Params, recipe: str) -> Inputs:
    """Raises UserError if the profile has no such base, or its geometry is not known."""
    name, build = root_base(params, recipe)
    source, folder = params.base_source(name), Path("data/bases") / name
    kind, _, where = source.partition(":")
    has_tokenizer = True
    made = recorded(f"base@{name}")
    if not (folder.is_dir() and made and source in made.params.values()):
        has_tokenizer = kind == "folder"
        repository = where.partition("@")[0]
        folder = Path(where) if has_tokenizer else GEOMETRIES_DIR / repository
        if not folder.is_dir():
            if has_tokenizer:
                raise UserError(f"base folder {where} of profiles.{params.profile}.bases.{name} does not exist")
            gpu = "" if params.gpu is None else f" -S {_gpu_option(params)}"
            raise UserError(
                f"base {name} of profile {params.profile} is {repository}: its geometry is not known before it is "
                f"fetched; fetch it with: dvc exp run -S profile={params.profile}{gpu} base@{name}"
            )
    data_dir = available_data(params, params.recipe(recipe).data)
    return Inputs(source=source, config_dir=folder, has_tokenizer=has_tokenizer, build=build, data_dir=data_dir)


def config_of_base(inputs: Inputs) -> PreTrainedConfig:
    """The geometry that the recipe starts from; a mixture's, if it is built from models of config_dir."""
    from stages.mixture.build import mixture_config
    from stages.models.load import load_config

    config, build = load_config(inputs.config_dir), inputs.build
    return config if build is None else mixture_config(config, experts=len(build.experts), top_k=build.top_k)


def recorded(stage: str) -> Provenance | None:
    """The record of a stage, which is there with its outputs."""
    path = Path(PROVENANCE_DIR) / f"{stage}.json"
    return read_provenance(path) if path.is_file() else None


def available_data(params: Params, name: str) -> Path | None:
    """The folder of a prepared dataset; None if there is none, or it was made with other settings (`other_settings`).

    Raises UserError if its task cannot read the dataset.
    """
    dataset, folder = params.dataset(name), Path("data/prepared") / name
    reader_of(load_task(dataset.task, "sources"), dataset, params.dataset_path(name))
    return folder if (folder / STATS_FILE).exists() and not other_settings(params, name) else None


def other_settings(params: Params, name: str) -> list[str]:
    """Settings of a dataset, and of those that it is a mix of, that had other values when it was prepared, by name.

    The record of `prepare` has them, and what a mix was made of; without a record, nothing is known of them.
    """
    dataset, made = params.dataset(name), recorded(f"prepare@{name}")
    if made is None or not (Path("data/prepared") / name).is_dir():
        return []
    then = {key: value for settings in made.params.values() for key, value in settings.items()}
    now = json.loads(json.dumps(asdict(dataset) | asdict(params.data)))
    different = [key for key in now if then.get(key, now[key]) != now[key]]
    for part in dataset.mix or ():
        different += [f"{setting} of {part}" for setting in other_settings(params, part)]
        path = Path("data/prepared") / part
        if path.is_dir() and made.inputs.get(str(path)) not in (None, folder_digest(path)):
            different.append(f"content of {part}")
    return different


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions for one profile's recipes, each plan predicted once."""

    params: Params
    """params.yaml with `options` and `changes`."""
    options: tuple[str, ...]
    """The profile and the GPU that were asked for, as options of -S: ("profile=qwen2-vl-7b", "gpu=24")."""
    changes: tuple[str, ...]
    """`KEY.KEY=VALUE`, values in place of those of params.yaml."""
    made: dict[str, Any] = field(default_factory=dict)
    times: dict[str, MeasuredTime | None] = field(default_factory=dict)
    """Measurements by plan, each made once: a second one differs."""

    def fits(self, recipe: str, inputs: Inputs) -> tuple[Preview, Fit, Fit]:
        """The preview of a recipe, its plan as the profile has it, and the cheapest change that fits."""
        import transformers

        from stages.memory.preview import preview

        transformers.logging.set_verbosity_error()  # it warns of the stand-in's tokens
        has_data = inputs.has_tokenizer and inputs.data_dir is not None
        options: dict[str, Any] = {"base_dir": inputs.config_dir, "has_data": has_data, "made": self.made}
        samples = load_task(self.params.recipe(recipe).task, "samples")
        planned = preview(self.params, recipe, config_of_base(inputs), samples, **options)
        fills = self.params.active.memory.fit == "fill"
        fit = fastest_fit(planned.fit, planned.predict) if fills else planned.fit
        return planned, fit, cheapest_fit(fit, planned.predict, fill=fills)

    def recipe_memory(self, recipe: str, *, timed: bool = False) -> tuple[RecipeMemory, list[str]]:
        """The prediction of a recipe, and its budget and advice in lines. timed: on a CPU, with the time of a training
        that fits, which takes a measurement of some seconds."""
        inputs = available_inputs(self.params, recipe)
        planned, fit, cheapest = self.fits(recipe, inputs)
        plan, (evaluation, batch_size) = fit.plan, planned.evaluation(fit)
        lines = [*planned.warnings, *planned.overrides, *fit.prediction.lines(fit.capacity_bytes)]
        lines += [] if plan.on_gpu else [process_words(fit.prediction)]
        changed: dict[str, Any] | None = None
        if fit.verdict not in (None, "fits"):
            changed = {"changes": cheapest.changes, "settings": settings(cheapest.plan), "verdict": cheapest.verdict}
            changed["total_bytes"] = cheapest.prediction.total_bytes
            lines.append(advice(cheapest))
        verdict = evaluation.verdict or "unknown"
        lines.append(f"evaluation  {gib_text(evaluation.prediction.total_bytes)} GiB, {batch_size} at once: {verdict}")
        batch = f"the largest samples of {inputs.data_dir}"
        if not planned.lengths:
            missing = "data" if inputs.data_dir is None else "tokenizer"
            data = self.params.recipe(recipe).data
            needed = [] if inputs.has_tokenizer else [f"base@{root_base(self.params, recipe)[0]}"]
            needed += [] if inputs.data_dir else [f"prepare@{data}"]
            others = ", ".join(other_settings(self.params, data))
            why = f", as data/prepared/{data} was made with another {others}" if others else ""
            pixels = f" and max_pixels {plan.images.max_pixels}" if plan.images else ""
            batch = f"no {missing} yet{why}: the worst within max_length {plan.recipe.max_length}{pixels}"
            batch += f"; for that of your samples, first: {self._command(*needed)}"
        device = self.params.active.device
        card = named_card(device.card) if device.card else None
        time: Duration | MeasuredTime | None = duration(cheapest, planned.lengths, self.params.prices)
        if timed and not plan.on_gpu and cheapest.verdict == "fits":
            from tools.timing import measured_time

            if (key := str(cheapest.plan)) not in self.times:
                self.times[key] = measured_time(cheapest.plan, planned.predict, planned.lengths)
            time = self.times[key]
        stage = "train" if batch_size == 1 and verdict == "does not fit" else "evaluate"
        predicted = RecipeMemory(
            recipe=recipe,
            profile=self.params.profile,
            memory_gb=card.sold_gb if card else device.memory_gb,
            card=card.name if card else None,
            base=inputs.source,
            batch=batch,
            settings=settings(plan),
            trainable=plan.trainable["total"],
            memory=fit.record(evaluation, batch_size),
            cheapest=changed,
            disk=disk_use(plan, self.params),
            duration=time,
            command=None if cheapest.verdict == "does not fit" else self._command(f"{stage}@{recipe}", fit=cheapest),
        )
        return predicted, lines

    def _command(self, *stages: str, fit: Fit | None = None) -> str:
        """Runs the stages, with what was asked for in place of params.yaml; with a fit, by its changes, in a temporary
        folder, so that params.yaml and the workspace stay as they are.

        `++` sets a value whether or not params.yaml has it.
        """
        changes = [*self.options, *(f"'++{change.removeprefix('++')}'" for change in self.changes)]
        if fit and fit.changes and self.params.active.memory.fit not in ("auto", "fill"):
            changes.append(f"++profiles.{self.params.profile}.memory.fit=auto")
        run = "dvc repro" if not changes else "dvc exp run --temp" if fit else "dvc exp run"
        return " ".join([run, *(f"-S {change}" for change in changes), *stages])


def predictions_for(
    profile: str | None, gpu: float | str | None = None, changes: Sequence[str] = (), **made: Any
) -> Predictions:
    """Predictions with another profile, GPU and other values than those of params.yaml, as far as they are given.

    gpu: a size in GB, as cards are sold, or a card by name. changes: `KEY.KEY=VALUE`. made: of other predictions.
    Raises UserError for a name that no card has, a GPU if the profile runs on a CPU, and none if it does not.
    """
    options = [f"profile={profile}"] if profile else []
    named = [] if gpu is None else [f"gpu={json.dumps(gpu)}"]
    try:
        params = load_params(changes=[*changes, *options, *named])
        if problems := wrong_for_tasks(params):
            raise refusal(Path("params.yaml"), problems)
    except UserError as error:
        asked = ", ".join([*options, *([f"gpu={gpu}"] if named else []), *changes])
        raise (UserError(f"with {asked}, {error.message}") if asked else error) from None
    if gpu is not None:
        options.append(_gpu_option(params))
    return Predictions(params=params, options=tuple(options), changes=tuple(changes), **made)


def _gpu_option(params: Params) -> str:
    """The GPU as an option of -S, quoted for the shell: gpu=24 or 'gpu="RTX 3090"'."""
    device = params.active.device
    return f"'gpu=\"{named_card(device.card).name}\"'" if device.card else f"gpu={device.memory_gb:g}"


@click.command(help=__doc__)
@click.argument("recipe", required=False)
@click.option("--profile", help="A profile of params.yaml.  [default: the active one]")
@click.option("--gpu", "gpus", help="Other GPUs: sizes in GB, or cards by name, separated by commas.")
@click.option("--set", "changes", multiple=True, help="KEY.KEY=VALUE ..., in place of values of params.yaml.")
@click.option("--all", "compare_sizes", is_flag=True, help="Every recipe, or the one given, on GPUs of several sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; a list with --all.")
def main(
    recipe: str | None,
    profile: str | None,
    gpus: str | None,
    changes: tuple[str, ...],
    compare_sizes: bool,
    as_json: bool,
) -> None:
    configure_logging("plan", facts=False)
    changes = tuple(each for text in changes for each in separate(text))
    named = (gpus or (GPU_SIZES if compare_sizes else "")).split(",")
    first, *others = (gpu.strip() or None for gpu in named)
    predictions = predictions_for(profile, first, changes)
    if compare_sizes:
        others_too = (predictions_for(profile, gpu, changes, made=predictions.made) for gpu in others)
        show_all([predictions, *others_too], [recipe] if recipe else None, as_json=as_json)
        return
    if recipe is None or others:
        raise click.UsageError(
            f"name a recipe and at most one GPU, or take --all (make: RECIPE=, GPU=, or ALL=1); profile "
            f"{predictions.params.profile} can train: {', '.join(trainable_recipes(predictions.params))}"
        )
    predicting = Console(stderr=True).status(f"{recipe}: predicting", spinner="line")
    # A CPU is as fast as in a stage.
    pinned = SET | pinned_instructions(os.environ, native=predictions.params.active.memory.native)
    with predicting, patch.dict(os.environ, pinned):
        predicted, lines = predictions.recipe_memory(recipe, timed=True)
        if changes and not as_json:
            with suppress(UserError):  # params.yaml may have a mistake that the changes fix
                before, _ = predictions_for(profile, first, times=predictions.times).recipe_memory(recipe, timed=True)
                lines.append(f"changes   {predicted.difference(before)}")
    if as_json:
        click.echo(json.dumps(asdict(predicted), indent=2))
        return
    gpu = f", {predicted.card or f'{predicted.memory_gb:g} GB per GPU'}" if predicted.memory_gb is not None else ""
    click.echo(f"recipe    {predicted.recipe}, profile {predicted.profile}{gpu}\nbase      {predicted.base}")
    click.echo(f"settings  {', '.join(f'{name} {value}' for name, value in predicted.settings.items())}")
    click.echo(f"batch     {predicted.batch}\ndisk      {predicted.disk}")
    click.echo(f"time      {predicted.duration}\n" if predicted.duration else "")
    click.echo("\n".join([*lines, *([f"run it by   {predicted.command}"] if predicted.command else [])]))


def separate(changes: str) -> list[str]:
    """`KEY=VALUE KEY=VALUE`, one each: a key begins another change where the value before it is whole."""
    found: list[str] = []
    for word in changes.split(" "):
        if found and not (re.match(r"[\w+.:/-]+=", word) and is_yaml(found[-1].partition("=")[2])):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return [change.strip() for change in found if change.strip()]


def is_yaml(text: str) -> bool:
    try:
        parse_yaml(text)
    except Unreadable:
        return False
    return True


def show_all(on_gpus: Sequence[Predictions], names: Sequence[str] | None, *, as_json: bool) -> None:
    """Recipes by GPU, each with the cheapest settings that fit.

    on_gpus: for one profile. names: of recipes; None for all that it can train.
    """
    params = on_gpus[0].params
    names = trainable_recipes(params) if names is None else names
    inputs = {name: available_inputs(params, name) for name in names}  # all are known before any takes time
    rows, predicted = [], []
    with Console(stderr=True).status("", spinner="line") as status:
        for name in names:
            status.update(f"{name}: predicting")
            if as_json:
                predicted += [asdict(each.recipe_memory(name)[0]) for each in on_gpus]
            else:
                rows.append((name, *(_cell(*each.fits(name, inputs[name])[1:]) for each in on_gpus)))
    if as_json:
        click.echo(json.dumps(predicted, indent=2))
        return
    devices = (each.params.active.device for each in on_gpus)
    titles = [named_card(device.card).name if device.card else f"{device.memory_gb:g} GB" for device in devices]
    columns = (Column("recipe", "Recipe"), *(Column(title, title) for title in titles))
    Console(highlight=False).print(terminal_table(Table.of(columns, rows)))
    click.echo(f"\nProfile {params.profile}, with the cheapest settings that fit; else with the least.")


def _cell(fit: Fit, cheapest: Fit) -> str:
    """Verdict, total and changes; the accumulation follows from the micro-batch."""
    changes = cheapest.changes if cheapest is not fit and cheapest.verdict != "does not fit" else ()
    shorter = [change.partition(" ")[0] + " " + change.rpartition(" ")[2] for change in changes]
    kept = [change for change in shorter if not change.startswith("grad_accumulation")]
    return "\n".join([cheapest.verdict or "unknown", f"{gib_text(cheapest.prediction.total_bytes)} GiB", *kept])


if __name__ == "__main__":
    main()
