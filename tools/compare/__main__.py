"""Compare recipes over several seeds, or choose settings for them: one experiment of DVC each. Behind `make compare`.

Reads   the cards of a task's runs in the workspace and in the experiments of HEAD, or in those that are named
        (experiments, branches, tags, commits, `workspace`), and what dvc.lock and the launcher recorded of them
Writes  data/report/TASK/over-seed/, the same files as the comparison of one workspace; with --over nothing
Run     python -m tools.compare detection
        python -m tools.compare detection --over 'recipes.*.learning_rate'

Experiments that differ in more than the seed, and in what --over names, are not mixed: where they are named that is an
error, else they are left out, and said so, as is what failed or has not run. --over ranks the values of a setting for
each recipe, on samples that no report scores (`scored: selection`), and prints the command that trains what was chosen.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from stages.compare import load_report, write_report
from stages.core.errors import UserError, listed, some
from stages.core.lineage import read_lineage
from stages.core.params.load import load_params
from stages.core.params.schema import Params
from stages.kit.reporting.compare import Comparison, compare, read_contenders
from stages.kit.reporting.runs import MODEL_LINEAGE_FILE, cards_dir
from stages.kit.reporting.tables import terminal_table
from tools.compare.choosing import candidates, candidates_table, chosen_command, on_selection
from tools.compare.conditions import conditions, unlike
from tools.compare.experiments import Experiment, fetch, named_revisions

_SHARE = ": data.selection"
"""End of a condition: the share of training samples that `prepare` set aside."""


@click.command(help=__doc__)
@click.argument("task")
@click.argument("experiments", nargs=-1)
@click.option("--over", help="Pattern of the settings to choose, e.g. recipes.*.learning_rate.")
def main(task: str, experiments: tuple[str, ...], over: str | None) -> None:
    params, console = load_params(), Console(highlight=False)
    if over:
        choose_settings(params, task, experiments, over, console=console)
    else:
        compare_experiments(params, task, experiments, console=console)


def compare_experiments(params: Params, task: str, asked: Sequence[str], *, console: Console) -> Comparison:
    """Compare, write and print.

    asked: names of those to compare; none for the workspace and all experiments of HEAD that compare with it.
    Raises UserError where there are not two seeds, and where those named differ in more.
    """
    report = load_report(params, task)
    with tempfile.TemporaryDirectory() as folder:
        found, left_out = comparable(task, asked, Path(folder))
        contenders = read_contenders(params, task, report, [each.data_dir for each in found])
        comparison = compare(report, contenders)
        if not comparison.over_seeds:
            raise UserError(
                f"only one seed was run, in {', '.join(each.name for each in found)} ({left_out_words(left_out)}); "
                f"run more with: dvc exp run --queue -S 'seed=43,44' compare@{task}, then: dvc queue start; or name "
                "those to compare with EXPERIMENTS="
            )
        notes = [_seeds(comparison, found), *([f"{left_out_words(left_out)}."] if left_out else [])]
        names = [each.name for each in contenders]
        notes += [*_missing(found, task, names), *_repeated(found, task, names)]
        comparison = replace(comparison, notes=tuple(notes))
        write_report(comparison, Path("data/report", task, "over-seed"), profile=params.profile, console=console)
    return comparison


def choose_settings(params: Params, task: str, names: Sequence[str], pattern: str, *, console: Console) -> None:
    """Print the values of a setting for each recipe, the best first, and the command that trains the best.

    pattern: of the settings, with * for any name. Raises UserError as `candidates` does.
    """
    report = load_report(params, task)
    with tempfile.TemporaryDirectory() as folder:
        found, left_out = comparable(task, names, Path(folder), varied=pattern)
        ranked = candidates(found, params, report, pattern)
        facts = [fact for each in found for fact in conditions(each, task, list(ranked)).items()]
        shares = sorted({value for fact, value in facts if fact.endswith(_SHARE)})
    console.print(terminal_table(candidates_table(ranked, report)))
    if left_out:
        console.print(Text(f"{left_out_words(left_out)}."), soft_wrap=True)
    console.print(Text(f"Train what was chosen: {chosen_command(ranked, ', '.join(shares), task)}"), soft_wrap=True)


def comparable(
    task: str, names: Sequence[str], folder: Path, *, varied: str | None = None
) -> tuple[list[Experiment], dict[str, str]]:
    """(the experiments that compare, why each other one is left out), copied below `folder`.

    names: those to compare; none for the workspace and all experiments of HEAD.
    Raises UserError where none has a model of the task, and where those named do not compare.
    """
    revisions, left_out = ({name: name for name in names}, {}) if names else named_revisions()
    found = [fetch(name, revision, task, folder) for name, revision in revisions.items()]
    left_out |= {each.name: f"no model of task {task}" for each in found if not each.evaluated(task)}
    if varied and not names:
        left_out |= {each.name: "not scored on the selection split" for each in found if not on_selection(each, task)}
    found = [each for each in found if each.name not in left_out]
    if names:
        _refuse_other_conditions(found, task, varied)
    else:
        left_out |= _of_other_conditions(found, task, varied)
        found = [each for each in found if each.name not in left_out]
    if not found:
        raise UserError(
            f"no experiment has a model of task {task} ({left_out_words(left_out)}); run: dvc repro compare@{task}"
        )
    return found, left_out


def _of_other_conditions(experiments: Sequence[Experiment], task: str, varied: str | None) -> dict[str, str]:
    """Why each does not compare with the first."""
    reasons = {}
    for other in experiments[1:]:
        if differing := unlike([experiments[0], other], task, varied):
            reasons[other.name] = f"unlike {experiments[0].name} in {some([*differing])}"
    return reasons


def _refuse_other_conditions(experiments: Sequence[Experiment], task: str, varied: str | None) -> None:
    if differing := unlike(experiments, task, varied):
        lines = [
            f"{fact}: " + "; ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
            for fact, by_value in differing.items()
        ]
        raise UserError(
            f"these experiments differ in more than {varied or 'the seed'}, so that a difference may come of that:\n"
            f"{listed(lines, 5)}"
        )


def _seeds(comparison: Comparison, experiments: Sequence[Experiment]) -> str:
    seeds = sorted({run.plan.seed for run in comparison.all_runs if run.plan})
    names = ", ".join(each.name for each in experiments)
    return f"Seeds {', '.join(map(str, seeds))}, of {len(experiments)} experiments: {names}."


def _missing(experiments: Sequence[Experiment], task: str, names: Sequence[str]) -> list[str]:
    """A sentence for each recipe that some of the experiments lack, and for each that params.yaml does not have."""
    evaluated = {each.name: each.evaluated(task) for each in experiments}
    ever = dict.fromkeys(name for found in evaluated.values() for name in found)
    missing = {name: [each for each, found in evaluated.items() if name not in found] for name in names if name in ever}
    unknown = [name for name in ever if name not in names]
    return [
        *(f"{name} was not evaluated in {', '.join(lacking)}." for name, lacking in missing.items() if lacking),
        *(f"{name} was evaluated, but is not in params.yaml: left out." for name in unknown),
    ]


def _repeated(experiments: Sequence[Experiment], task: str, names: Sequence[str]) -> list[str]:
    """A sentence for each experiment all of whose trained models another one has too."""
    sentences, seen = [], dict[tuple[str, str], str]()
    for each in experiments:
        cards = [cards_dir(each.data_dir, task) / name for name in each.evaluated(task) if name in names]
        trained = [card for card in cards if (card / "plan.yaml").exists()]
        models = [(card.name, read_lineage(card, name=MODEL_LINEAGE_FILE).digest) for card in trained]
        if models and all(model in seen for model in models):
            sentences.append(f"{each.name} has the same models as {seen[models[0]]}: counted once.")
        for model in models:
            seen.setdefault(model, each.name)
    return sentences


def left_out_words(reasons: Mapping[str, str]) -> str:
    return f"Left out: {', '.join(f'{name} ({why})' for name, why in reasons.items()) or 'none'}"


if __name__ == "__main__":
    main()
